"""What a hinted teacher is shown of a problem: made of finished trajectories, after all sampling of a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from memsearcher_jax.agent.memalpha.reward import golden_texts
from memsearcher_jax.agent.prompts import ASSISTANT, END
from memsearcher_jax.agent.reward import cover_exact_match
from memsearcher_jax.runtime.tokenizer import ChatTokenizer
from memsearcher_jax.types import Context, Objectives, Problem, ScoredTrajectory

Hint = tuple[Sequence[int], int]
"""Token ids, and the number of the context's token that they stand before."""
Fact = tuple[str, Sequence[str]]
"""A sentence, and the names that it can have been read by."""


def make_hints(scored: Sequence[ScoredTrajectory], tokenizer: ChatTokenizer) -> list[list[Hint]]:
    """For each context of each trajectory what the question needs of what was read last, at the end of that: golden
    answers, and the titles of supporting pages that the trajectory did not find.

    So a hint teaches to read: to write of a search result, or of a part of a stream, what it says. Where it says
    nothing that the question needs there is none: a teacher who knows more would neither search nor trust the memory.
    """
    hints = []
    for trajectory in (one.trajectory for one in scored):
        problem, turns = trajectory.problem, trajectory.outcome.turns
        found = {page.title for turn in turns for result in turn.results for page in result.passages}
        missed = [title for title in problem.supporting_titles if title not in found]
        facts = [*_answers(problem), *((f"The next page is {title}.", (title,)) for title in missed)]
        reads_prompt = problem.stream is not None
        hints.append([_hint(context, facts, tokenizer, reads_prompt) for context in trajectory.contexts])
    return hints


def _hint(context: Context, facts: Iterable[Fact], tokenizer: ChatTokenizer, reads_prompt: bool) -> Hint:
    sampled_T = np.asarray(context.sampled, bool)
    (starts,) = np.nonzero(sampled_T & ~np.roll(sampled_T, 1))
    if not (len(starts) > 1 or (reads_prompt and len(starts))):
        return (), 0
    reply = int(starts[-1])
    begin = int(np.flatnonzero(sampled_T[:reply])[-1]) + 1 if len(starts) > 1 else 0
    read = tokenizer.transcript(context.ids[begin:reply])
    if not (known := [sentence for sentence, names in facts if cover_exact_match(read, names)]):
        return (), 0
    (ends,) = np.nonzero(np.equal(context.ids[begin:reply], tokenizer.encode_trusted(END + ASSISTANT)[0]))
    return tokenizer.encode_untrusted(" ".join(["", *known])), begin + int(ends[-1]) if len(ends) else reply


def _answers(problem: Problem) -> Iterator[Fact]:
    if problem.stream and problem.stream.questions:
        for question in problem.stream.questions:
            texts = golden_texts(question.answer)
            yield f"{question.text} {' or '.join(texts)}", texts
    else:
        for texts in problem.golden if isinstance(problem.golden, Objectives) else (problem.golden,):
            yield f"The answer to the question is {' or '.join(texts)}.", texts
