"""What a hinted teacher is shown of a problem: made of finished trajectories, after all sampling of a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from memsearcher_jax.agent.prompts import ASSISTANT, END
from memsearcher_jax.agent.reward import cover_exact_match, golden_texts, normalize
from memsearcher_jax.runtime.tokenizer import ChatTokenizer
from memsearcher_jax.types import Context, Objectives, Problem, ScoredTrajectory

Hint = tuple[Sequence[int], int]
"""Token ids, and the number of the context's token that they are inserted before."""


def make_hints(scored: Sequence[ScoredTrajectory], tokenizer: ChatTokenizer) -> list[list[Hint]]:
    """For each context of each trajectory what the question needs of what was read last, at the end of that: golden
    answers, and the titles of supporting pages that the trajectory did not find.

    So a hint teaches to read: which names to write of a search result, or of a part of a stream. It is these names
    alone, because a policy imitates the words of a sentence around them. Where nothing that the question needs was read
    there is none: a teacher who knows more would neither search nor trust the memory.
    """
    hints = []
    for trajectory in (one.trajectory for one in scored):
        problem, turns = trajectory.problem, trajectory.outcome.turns
        found = {page.title for turn in turns for result in turn.results for page in result.passages}
        needed = [*_answers(problem), *((title,) for title in problem.supporting_titles if title not in found)]
        reads_prompt = problem.stream is not None
        hints.append([_hint(context, needed, tokenizer, reads_prompt) for context in trajectory.contexts])
    return hints


def _answers(problem: Problem) -> Iterable[Sequence[str]]:
    """The spellings of each answer."""
    if problem.stream and problem.stream.questions:
        return [golden_texts(question.answer) for question in problem.stream.questions]
    return problem.golden if isinstance(problem.golden, Objectives) else (problem.golden,)


def _hint(context: Context, needed: Iterable[Sequence[str]], tokenizer: ChatTokenizer, reads_prompt: bool) -> Hint:
    sampled_T = np.asarray(context.sampled, bool)
    (starts,) = np.nonzero(sampled_T & ~np.roll(sampled_T, 1))
    if not (len(starts) > 1 or (reads_prompt and len(starts))):
        return (), 0
    reply = int(starts[-1])
    begin = int(np.flatnonzero(sampled_T[:reply])[-1]) + 1 if len(starts) > 1 else 0
    read = tokenizer.transcript(context.ids[begin:reply])
    names = [
        next((name for name in spellings if normalize(name) and cover_exact_match(read, name)), "")
        for spellings in needed
    ]
    if not any(names):
        return (), 0
    (ends,) = np.nonzero(np.equal(context.ids[begin:reply], tokenizer.encode_trusted(END + ASSISTANT)[0]))
    ids = tokenizer.encode_untrusted("".join(f" {name}." for name in names if name))
    return ids, begin + int(ends[-1]) if len(ends) else reply
