"""The Search-R1 baseline: Qwen2.5-3B with the settings of its published GRPO runs, and the evaluation of its weights.

python launch/tpu_train.py --config search_r1_3b --model.path DIR --data.train FILES \\
    --retrieval.corpus FILE --retrieval.encoder DIR
python launch/evaluate.py --config search_r1_3b --checkpoint DIR --benchmarks all --data.root DIR \\
    --retrieval.index DIR --retrieval.encoder DIR
"""

from dataclasses import replace

from memsearcher_jax.agent.config import RewardConfig
from memsearcher_jax.config import RunConfig
from memsearcher_jax.configs.qwen3b import qwen3b


def search_r1_3b() -> RunConfig:
    """The devices of `qwen3b`. Four searches and a last reply, three passages each, exact match as the reward."""
    base = qwen3b()
    return replace(
        base,
        agent=replace(
            base.agent,
            workflow="search_r1",
            prompts="search_r1",
            max_turns=5,
            completion_tokens=500,
            observation_tokens=500,
            default_top_n=3,
        ),
        reward=RewardConfig(metric="exact_match", wrong_answer=0.0, require_format=False),
        sampling=replace(base.sampling, top_k=0, top_p=1.0),
        training=replace(base.training, warmup_steps=286),
        rl=replace(base.rl, steps=500, prompts_per_step=512),
        evaluation=replace(base.evaluation, max_turns=5),
    )
