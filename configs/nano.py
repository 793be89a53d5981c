"""Every part of training on a laptop: a random Qwen of a few layers on a synthetic encyclopedia, no download.

python launch/tpu_train.py --config nano
"""

from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.config import RunConfig
from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.rl.config import EvaluationConfig, RLConfig
from memsearcher_jax.sampling.config import SamplingConfig
from memsearcher_jax.training.config import TrainingConfig


def nano() -> RunConfig:
    """Four steps in half a minute on two CPU cores, compilation included; the next time in ten seconds."""
    return RunConfig(
        model=ModelConfig(
            vocab_size=2_048,
            embed_size=64,
            ffn_size=192,
            layers=2,
            heads=4,
            kv_heads=2,
            head_size=16,
            tie_embeddings=True,
            max_positions=1_024,
            compute_dtype="float32",
        ),
        agent=AgentConfig(
            prompts="brief",
            max_turns=4,
            completion_tokens=64,
            question_tokens=64,
            memory_tokens=96,
            observation_tokens=256,
            max_calls=2,
            default_top_n=3,
        ),
        sampling=SamplingConfig(
            slots=32,
            context_tokens=768,
            decode_steps_per_call=16,
            prefill_chunk=32,
            prefill_buckets=(128, 512),
            top_k=0,
            top_p=1.0,
        ),
        training=TrainingConfig(seq_len=768, minibatch_rows=8, logit_chunk=128, learning_rate=1e-3),
        rl=RLConfig(steps=4, prompts_per_step=16, group_size=4, checkpoint_every=2),
        evaluation=EvaluationConfig(max_turns=4, max_questions=32),
    )
