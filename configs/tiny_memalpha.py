"""Learns to keep a memory of long streams on a laptop: Mem-alpha's GRPO from the packaged warm start, no download.

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
    """Minutes on two CPU cores, compiling included; docs/learning.md shows how many and what it reaches."""
    return RunConfig(
        model=ModelConfig(
            path="package:tiny_memalpha",
            tokenizer="package:tiny_memalpha",
            vocab_size=1_600,
            embed_size=128,
            ffn_size=320,
            layers=4,
            heads=4,
            kv_heads=2,
            head_size=32,
            rope_theta=10_000.0,
            tied=True,
            max_positions=1_024,
            compute_dtype="float32",
        ),
        mesh=MeshConfig(data=1, fsdp=-1, tensor=1),
        agent=AgentConfig(
            workflow="memalpha",
            prompts="terse_memalpha",
            reply_tokens=72,
            question_tokens=24,
            memory_tokens=96,
        ),
        memalpha=MemalphaConfig(
            chunk_tokens=56,
            core_tokens=32,
            shown_items=1,
            retrieved_items=2,
            answer_memory_tokens=128,
            answer_tokens=8,
        ),
        judge=SpeakerConfig(who="nobody"),
        sampling=SamplingConfig(
            slots=32,
            context_tokens=256,
            decode_tokens=8,
            decode_rows=(8, 16),
            rows_per_call=8,
            prefill_piece=32,
            prefill_buckets=(128, 512),
            top_k=0,
            top_p=1.0,
        ),
        # Large enough that no stream comes twice; the days of a long stream are those of short ones.
        data=DataConfig(
            made="streams",
            streams=StreamConfig(
                train_streams=80,
                test_streams=24,
                train_chunks=10,
                test_chunks=(10, 130),
                span=730,
                facts=2,
                idle=1,
                questions=12,
            ),
        ),
        training=TrainingConfig(
            row_tokens=256,
            rows_per_update=32,
            accumulate=8,
            logit_chunk=64,
            learning_rate=3e-4,
            warmup_steps=10,
            decay_steps=200,
            adam_b2=0.99,
            kl_coefficient=0.0,
            entropy_coefficient=0.0,
        ),
        rl=RLConfig(steps=20, problems=4, rollouts=8, baseline="position", even_groups=False, checkpoint_every=10),
        evaluation=EvaluationConfig(),
    )
