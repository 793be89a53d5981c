"""Mem-alpha on published Qwen models with its paper's settings.

python launch/tpu_train.py --config memalpha_4b --model.path DIR --data.train FILES
"""

from dataclasses import replace

from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.agent.memalpha.config import MemalphaConfig
from memsearcher_jax.config import RunConfig
from memsearcher_jax.configs.qwen import qwen3_4b
from memsearcher_jax.data.config import DataConfig
from memsearcher_jax.rl.config import RLConfig
from memsearcher_jax.training.config import TrainingConfig


def memalpha_4b() -> RunConfig:
    """Qwen3-4B on 16 devices of 32 GB (v6e-16) by default.

    85 steps are five epochs of the original's 562 streams, 32 per step.

    An update has the original's 32 contexts: a step of 256 trajectories of 10 chunks makes 80 updates. The learning
    rate rises over 5 % of the steps, as the original's.

    The initial policy answers from 4,096 tokens of memory, and judges. The original asks a model of 32B, with 30,000
    tokens: `--answerer.backend openai --memalpha.answer_memory_tokens 30000`, and `--judge.backend openai`. With
    `--smoke_test` streams are generated from a seed.
    """
    base = qwen3_4b()
    return replace(
        base,
        agent=AgentConfig(workflow="memalpha", completion_tokens=2_048, memory_tokens=2_048),
        memalpha=MemalphaConfig(answer_memory_tokens=4_096),
        sampling=replace(base.sampling, top_k=0, top_p=1.0),
        data=DataConfig(synthetic="streams"),
        training=TrainingConfig(
            minibatch_contexts=32,
            minibatch_rows=32,
            grad_accum_steps=2,
            warmup_steps="5%",
            aggregate="seq-mean-token-mean",
            entropy_coefficient=0.0,
        ),
        rl=RLConfig(steps=85, prompts_per_step=32, group_size=8, advantage_scope="pooled"),
    )
