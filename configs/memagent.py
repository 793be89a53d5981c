"""MemAgent: a long text, read chunk by chunk for one question; the paper's settings, and a small run.

python launch/tpu_train.py --config tiny_memagent
python launch/tpu_train.py --config memagent_7b --model.path DIR --data.train hotpotqa_train_32k.parquet \\
    --data.test eval_50.json eval_100.json
"""

from dataclasses import replace

from memsearcher_jax.agent.config import RewardConfig
from memsearcher_jax.config import RunConfig
from memsearcher_jax.configs.qwen import qwen7b
from memsearcher_jax.configs.tiny import tiny
from memsearcher_jax.data.synthetic.documents import DocumentConfig


def memagent_7b() -> RunConfig:
    """The settings of MemAgent's 7B run, on the devices of `qwen7b`.

    Chunks of 5,000 tokens, a memory and an answer of 1,024, 16 rollouts of 128 documents of 32,000 tokens, exact match
    as the reward.
    """
    base = qwen7b()
    return replace(
        base,
        agent=replace(
            base.agent, workflow="memagent", completion_tokens=1_024, rewrite_tokens=1_024, observation_tokens=5_000
        ),
        data=replace(base.data, synthetic="documents", documents=DocumentConfig(1_000, (1_000, 10_000))),
        reward=RewardConfig(metric="exact_match", wrong_answer=0.0, require_format=False),
        sampling=replace(base.sampling, top_k=0, top_p=0.999, kv_tokens=1_048_576),
        training=replace(base.training, entropy_coefficient=0.0, warmup_steps="20"),
        rl=replace(base.rl, prompts_per_step=128, group_size=16),
    )


def tiny_memagent() -> RunConfig:
    """Documents of 10 passages, about one in a chunk of 64 tokens; the test has up to 1,000.

    Ten minutes on one CPU core; docs/train.md has the results.
    """
    base = tiny()
    return replace(
        base,
        model=replace(base.model, path="package:tiny_memagent", tokenizer="package:tiny"),
        agent=replace(base.agent, workflow="memagent", observation_tokens=64),
        sampling=replace(base.sampling, context_tokens=256),
        training=replace(base.training, minibatch_contexts=176, minibatch_rows=96, grad_accum_steps=12),
        data=replace(
            base.data,
            synthetic="documents",
            encyclopedia=replace(base.data.encyclopedia, hops=(1,), train_questions=1_000, test_questions=100),
            documents=DocumentConfig(train_passages=10, test_passages=(10, 50, 100, 500, 1_000)),
        ),
        reward=memagent_7b().reward,
        rl=replace(base.rl, steps=60, prompts_per_step=32, evaluate_every=0),
    )
