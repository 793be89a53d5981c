"""Mem-alpha on Qwen3-4B with its paper's settings.

python launch/tpu_train.py --config memalpha_4b --model.path DIR --data.train FILES
"""

from memsearcher_jax.agent.memalpha_config import MemalphaConfig
from memsearcher_jax.agent.types import AgentConfig
from memsearcher_jax.config import RunConfig
from memsearcher_jax.data.problems import DataConfig
from memsearcher_jax.model.config import MeshConfig, ModelConfig
from memsearcher_jax.rl.config import RLConfig
from memsearcher_jax.sampling.config import SamplingConfig
from memsearcher_jax.training.config import TrainingConfig


def memalpha_4b() -> RunConfig:
    """16 devices of 32 GB (v6e-16) by default: an update of 16 rows has about the original's 32 contexts.

    The start answers from 4,096 tokens of memory, and judges. The original asks a model of 32B, with 30,000 tokens:
    `--answerer.who endpoint --memalpha.answer_memory_tokens 30000`, and `--judge.who endpoint`. Without `data.train`
    streams are made from a seed.
    """
    return RunConfig(
        model=ModelConfig(
            vocab_size=151_936,
            embed_size=2_560,
            ffn_size=9_728,
            layers=36,
            heads=32,
            kv_heads=8,
            head_size=128,
            tied=True,
            family="qwen3",
            max_positions=40_960,
            remat="full",
        ),
        mesh=MeshConfig(data=1, fsdp=-1, tensor=1),
        agent=AgentConfig(workflow="memalpha", prompts="memalpha", reply_tokens=2_048, memory_tokens=2_048),
        memalpha=MemalphaConfig(chunk_tokens=2_560, answer_memory_tokens=4_096),
        sampling=SamplingConfig(slots=32, tensor=4, top_k=0, top_p=1.0),
        data=DataConfig(made="streams"),
        training=TrainingConfig(
            rows_per_update=16,
            accumulate=1,
            warmup_steps=5,
            aggregate="seq-mean-token-mean",
            entropy_coefficient=0.0,
        ),
        rl=RLConfig(steps=90, problems=32, rollouts=8, baseline="pooled"),
    )
