"""What a hinted teacher is shown of a problem: made of finished trajectories, after all sampling of a step."""

from __future__ import annotations

import json
from collections.abc import Sequence

from memsearcher_jax.agent.prompts import END, SYSTEM
from memsearcher_jax.runtime.tokenizer import ChatTokenizer
from memsearcher_jax.types import ScoredTrajectory


def hint_ids(scored: Sequence[ScoredTrajectory], tokenizer: ChatTokenizer) -> list[tuple[int, ...]]:
    """For each trajectory a system message with the golden answers of its problem, and the supporting passages that
    any of the problem's trajectories has found."""
    passages: dict[str, dict[str, str]] = {}
    for trajectory in (one.trajectory for one in scored):
        titles, found = trajectory.problem.supporting_titles, passages.setdefault(trajectory.problem.id, {})
        for result in (result for turn in trajectory.outcome.turns for result in turn.results):
            found |= {passage.id: passage.contents for passage in result.passages if passage.title in titles}
    hints = []
    for problem in (one.trajectory.problem for one in scored):
        answers = f"The answer is {' or '.join(problem.golden_answers)}."
        if problem.stream and problem.stream.questions:
            pairs = ((one.text, json.dumps(one.answer, ensure_ascii=False)) for one in problem.stream.questions)
            answers = "\n".join(map(" ".join, pairs))
        text = "\n\n".join([answers, *passages[problem.id].values()])
        ends = tokenizer.encode_trusted(SYSTEM), tokenizer.encode_trusted(END)
        hints.append((*ends[0], *tokenizer.encode_untrusted(text), *ends[1]))
    return hints
