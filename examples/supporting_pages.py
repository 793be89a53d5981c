"""A reward for search: half for the answer, half for finding the pages that support it.

python launch/tpu_train.py --config smollm2 --reward.function examples/supporting_pages.py ...

Where few answers are right, the pages still tell the trajectories of a group apart. docs/teach.md says what it taught.
"""

from memsearcher_jax.agent.reward import token_f1
from memsearcher_jax.types import StopReason, Trajectory


def reward(trajectories: list[Trajectory]) -> list[float]:
    """Of one problem: the mean of the answer's F1 and of the share of supporting pages found; 0 without an answer."""
    return [_reward(trajectory) for trajectory in trajectories]


def _reward(trajectory: Trajectory) -> float:
    outcome = trajectory.outcome
    if outcome.stop is not StopReason.ANSWERED:
        return 0.0
    problem = trajectory.problem
    answer = token_f1(outcome.answer, problem.golden_answers)
    found = {passage.title.casefold() for passage in outcome.passages}
    titles = {title.casefold() for title in problem.supporting_titles}
    return (answer + len(titles & found) / len(titles)) / 2 if titles else answer
