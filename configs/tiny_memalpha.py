"""Mem-alpha on a laptop: a random nano Qwen reads streams that are made from a seed, no download.

python launch/tpu_train.py --config tiny_memalpha
"""

from memsearcher_jax.agent.memalpha_config import MemalphaConfig
from memsearcher_jax.agent.types import AgentConfig
from memsearcher_jax.config import RunConfig
from memsearcher_jax.data.problems import DataConfig
from memsearcher_jax.data.stream_world import StreamConfig
from memsearcher_jax.model.config import MeshConfig, ModelConfig
from memsearcher_jax.rl.config import EvaluationConfig, RLConfig, SpeakerConfig
from memsearcher_jax.sampling.config import SamplingConfig
from memsearcher_jax.training.config import TrainingConfig


def tiny_memalpha() -> RunConfig:
    """A few steps of the whole loop in a few minutes on two CPU cores, compiling included."""
    return RunConfig(
        model=ModelConfig(
            vocab_size=1_536,
            embed_size=64,
            ffn_size=192,
            layers=2,
            heads=4,
            kv_heads=2,
            head_size=16,
            tied=True,
            max_positions=1_024,
            compute_dtype="float32",
        ),
        mesh=MeshConfig(data=1, fsdp=-1, tensor=1),
        agent=AgentConfig(
            workflow="memalpha",
            prompts="terse_memalpha",
            reply_tokens=160,
            question_tokens=32,
            memory_tokens=320,
        ),
        memalpha=MemalphaConfig(
            chunk_tokens=128,
            core_tokens=64,
            retrieved_items=3,
            answer_memory_tokens=320,
            answer_tokens=24,
        ),
        judge=SpeakerConfig(who="nobody"),
        sampling=SamplingConfig(
            slots=16,
            context_tokens=640,
            decode_tokens=16,
            rows_per_call=8,
            prefill_piece=32,
            prefill_buckets=(128, 512),
            top_k=0,
            top_p=1.0,
        ),
        data=DataConfig(
            made="streams",
            streams=StreamConfig(
                train_streams=64, test_streams=8, train_chunks=10, test_chunks=(10, 130), facts=2, idle=1, questions=8
            ),
        ),
        training=TrainingConfig(
            row_tokens=640,
            rows_per_update=16,
            accumulate=1,
            logit_chunk=128,
            learning_rate=1e-3,
            aggregate="seq-mean-token-mean",
            entropy_coefficient=0.0,
        ),
        rl=RLConfig(steps=3, problems=4, rollouts=4, baseline="position", checkpoint_every=3),
        evaluation=EvaluationConfig(),
    )
