"""What a hinted teacher is shown of a problem: made of finished trajectories, after all sampling of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from memsearcher_jax.agent.memalpha.reward import golden_texts
from memsearcher_jax.agent.prompts import ASSISTANT, END
from memsearcher_jax.agent.reward import cover_exact_match
from memsearcher_jax.runtime.tokenizer import ChatTokenizer
from memsearcher_jax.types import Context, Objectives, Problem, ScoredTrajectory

Hint = tuple[Sequence[int], int]
"""Token ids, and the number of the context's token that they stand before."""


def make_hints(scored: Sequence[ScoredTrajectory], tokenizer: ChatTokenizer) -> list[list[Hint]]:
    """For each context of each trajectory the golden answers that stand in what was read last, at the end of that.

    So a hint teaches to read: to write of a search result, or of a part of a stream, what the question needs. Where no
    answer was read there is none: a teacher who knows it would neither search nor trust the memory.
    """
    trajectories = [one.trajectory for one in scored]
    return [[_hint(one.problem, context, tokenizer) for context in one.contexts] for one in trajectories]


def _hint(problem: Problem, context: Context, tokenizer: ChatTokenizer) -> Hint:
    sampled_T = np.asarray(context.sampled, bool)
    (starts,) = np.nonzero(sampled_T & ~np.roll(sampled_T, 1))
    if not (len(starts) > 1 or (problem.stream and len(starts))):
        return (), 0
    reply = int(starts[-1])
    begin = int(np.flatnonzero(sampled_T[:reply])[-1]) + 1 if len(starts) > 1 else 0
    read = tokenizer.transcript(context.ids[begin:reply])
    if not (known := [text for text, answers in _answers(problem) if cover_exact_match(read, answers)]):
        return (), 0
    (ends,) = np.nonzero(np.equal(context.ids[begin:reply], tokenizer.encode_trusted(END + ASSISTANT)[0]))
    return tokenizer.encode_untrusted(" ".join(["", *known])), begin + int(ends[-1]) if len(ends) else reply


def _answers(problem: Problem) -> Iterator[tuple[str, Sequence[str]]]:
    """The sentences that tell the answers, each with the spellings of its answer."""
    if problem.stream and problem.stream.questions:
        for question in problem.stream.questions:
            texts = golden_texts(question.answer)
            yield f"{question.text} {' or '.join(texts)}", texts
    else:
        for texts in problem.golden if isinstance(problem.golden, Objectives) else (problem.golden,):
            yield f"The answer to the question is {' or '.join(texts)}.", texts
