"""Multi-context GRPO on a laptop, from the packaged warm start, no download.

python launch/tpu_train.py --config tiny
"""

from dataclasses import replace

from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.config import RunConfig
from memsearcher_jax.configs.nano import nano
from memsearcher_jax.data.config import DataConfig
from memsearcher_jax.data.synthetic.encyclopedia import EncyclopediaConfig
from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.rl.config import EvaluationConfig, RLConfig
from memsearcher_jax.training.config import TrainingConfig


def tiny() -> RunConfig:
    """Five minutes on two CPU cores, compilation included; docs/train.md has the results."""
    base = nano()
    return RunConfig(
        model=ModelConfig(
            path="package:tiny",
            vocab_size=1_536,
            embed_size=128,
            ffn_size=320,
            layers=4,
            heads=4,
            kv_heads=2,
            head_size=32,
            rope_theta=10_000.0,
            tie_embeddings=True,
            max_positions=1_024,
            compute_dtype="float32",
        ),
        agent=AgentConfig(
            prompts="terse",
            max_turns=8,
            completion_tokens=40,
            question_tokens=32,
            memory_tokens=32,
            observation_tokens=96,
            max_calls=1,
            default_top_n=1,
        ),
        sampling=replace(
            base.sampling, slots=64, context_tokens=360, decode_steps_per_call=8, decode_batch_sizes=(16, 32, 48)
        ),
        # Large enough that no question is repeated and no name can be memorised.
        data=DataConfig(
            encyclopedia=EncyclopediaConfig(train_people=256, train_questions=3_000, test_people=64, test_questions=300)
        ),
        training=TrainingConfig(
            seq_len=384,
            minibatch_contexts=50,
            minibatch_rows=16,
            grad_accum_steps=8,
            logit_chunk=96,
            learning_rate=3e-4,
            warmup_steps="2",
            decay_steps="end",
            adam_b2=0.99,
            kl_coefficient=0.0,
            entropy_coefficient=0.0,
        ),
        rl=RLConfig(
            steps=50,
            prompts_per_step=16,
            group_size=8,
            keep_constant_reward_groups=False,
            checkpoint_every=25,
            evaluate_every=50,
        ),
        evaluation=EvaluationConfig(max_turns=8),
    )
