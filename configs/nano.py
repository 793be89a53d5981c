"""The whole loop on a laptop: a random nano Qwen on the embedded toy world, no download.

python launch/tpu_train.py --config nano
"""

from memsearcher_jax.agent.types import AgentConfig
from memsearcher_jax.config import RunConfig
from memsearcher_jax.model.config import MeshConfig, ModelConfig
from memsearcher_jax.rl.config import EvaluationConfig, RLConfig
from memsearcher_jax.sampling.config import SamplingConfig
from memsearcher_jax.training.config import TrainingConfig


def nano() -> RunConfig:
    """A few steps in under three minutes on two CPU cores, compiling included."""
    return RunConfig(
        model=ModelConfig(
            vocab_size=2_048,
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
            prompts="brief",
            max_turns=4,
            reply_tokens=64,
            question_tokens=64,
            memory_tokens=96,
            observation_tokens=256,
            max_calls=2,
            default_top_n=3,
        ),
        sampling=SamplingConfig(
            slots=32,
            context_tokens=768,
            decode_tokens=16,
            rows_per_call=8,
            prefill_piece=32,
            prefill_buckets=(128, 512),
            top_k=0,
            top_p=1.0,
        ),
        training=TrainingConfig(
            row_tokens=768,
            rows_per_update=8,
            accumulate=1,
            logit_chunk=128,
            learning_rate=1e-3,
        ),
        rl=RLConfig(steps=4, problems=16, rollouts=4, checkpoint_every=2),
        evaluation=EvaluationConfig(max_turns=4, questions=32),
    )
