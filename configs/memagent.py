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
    """The settings of MemAgent's 7B run, on the devices of `qwen7b`: chunks of 5,000 tokens, a memory and an answer of
    1,024, 16 rollouts of 128 documents of 32,000 tokens, exact match as the reward.
    """
    base = qwen7b()
    return replace(
        base,
        agent=replace(
            base.agent,
            workflow="memagent",
            prompts="memagent",
            completion_tokens=1_024,
            rewrite_tokens=1_024,
            observation_tokens=5_000,
        ),
        data=replace(base.data, synthetic="documents", documents=DocumentConfig(1_000, (1_000, 10_000))),
        reward=RewardConfig(metric="exact_match", wrong_answer=0.0, require_format=False),
        sampling=replace(base.sampling, top_k=0, top_p=0.999, kv_tokens=1_048_576),
        training=replace(base.training, entropy_coefficient=0.0, warmup_steps="20"),
        rl=replace(base.rl, prompts_per_step=128, group_size=16),
    )


def tiny_memagent() -> RunConfig:
    """Documents of 40 passages, some 10 chunks. From the weights of `tiny`, which write a memory and an answer in this
    form but do not keep a fact, rewards alone taught nothing in 40 steps, and 8 steps of imitation before 12 of them
    nothing either; a longer warm start is not measured yet.

    python -m examples.warmstart.demonstrate --config tiny_memagent --steps 100 --out demos
    python launch/sft.py --config tiny_memagent --sft.trajectories demos --out warm
    python launch/tpu_train.py --config tiny_memagent --model.path warm
    """
    base = tiny()
    return replace(
        base,
        agent=replace(base.agent, workflow="memagent", prompts="terse_memagent", observation_tokens=192),
        sampling=replace(base.sampling, context_tokens=448),
        training=replace(base.training, seq_len=480),
        data=replace(
            base.data,
            synthetic="documents",
            encyclopedia=replace(base.data.encyclopedia, hops=(1,), train_questions=1_000, test_questions=48),
            documents=DocumentConfig(train_passages=40, test_passages=(40, 400, 4_000)),
        ),
        reward=replace(base.reward, require_format=False),
        rl=replace(base.rl, steps=60, prompts_per_step=8),
    )
