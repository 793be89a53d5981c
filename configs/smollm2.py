"""Multi-context GRPO of SmolLM2-135M on real questions and passages: a language model that two CPU cores can train.

python launch/tpu_train.py --config smollm2 --data.train FILE --data.test FILE --retrieval.corpus FILE

The weights are in the folder smollm2, from launch/import_gguf.py. Training goes on with packaged adapters
of a warm start. docs/train.md has every command.
"""

from dataclasses import replace

from memsearcher_jax.agent.config import RewardConfig
from memsearcher_jax.config import RunConfig
from memsearcher_jax.configs.nano import nano
from memsearcher_jax.data.config import DataConfig
from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.retrieval.config import RetrievalConfig
from memsearcher_jax.rl.config import EvaluationConfig, RLConfig
from memsearcher_jax.training.config import TrainingConfig


def smollm2() -> RunConfig:
    """Small steps of 60 trajectories. Groups whose rewards are all equal, about half, are left out.

    The reward is exact match: an answer that shares a surname or an "of" with the reference has an F1 above 0, and in a
    group of wrong answers that is all that counts.
    """
    base = nano()
    return RunConfig(
        model=ModelConfig(
            family="llama",
            vocab_size=49_152,
            embed_size=576,
            ffn_size=1_536,
            layers=30,
            heads=9,
            kv_heads=3,
            head_size=64,
            rope_theta=100_000.0,
            norm_eps=1e-5,
            tie_embeddings=True,
            max_positions=8_192,
            remat="save_qkv_attention_up",
            path="smollm2",
            lora_rank=16,
            adapter="package:smollm2_search",
        ),
        agent=replace(
            base.agent,
            max_turns=5,
            completion_tokens=96,
            question_tokens=96,
            memory_tokens=80,
            observation_tokens=192,
            max_calls=1,
            default_top_n=1,
            max_top_n=1,
        ),
        sampling=replace(base.sampling, decode_batch_sizes=(8, 16)),
        reward=RewardConfig(metric="exact_match"),
        data=DataConfig(questions="span"),
        retrieval=RetrievalConfig(method="hybrid", index_type="exact"),
        # A row holds three contexts or four, of about 60 trained tokens each.
        training=TrainingConfig(
            seq_len=1_024,
            minibatch_rows=32,
            grad_accum_steps=32,
            logit_chunk=64,
            learning_rate=4e-5,
            warmup_steps="2 updates",
            adam_b2=0.99,
            kl_coefficient=0.0,
            entropy_coefficient=0.0,
        ),
        rl=RLConfig(steps=60, prompts_per_step=12, keep_constant_reward_groups=False, checkpoint_every=4),
        evaluation=EvaluationConfig(max_turns=5),
    )
