"""Quality of the memories of a trajectory, measured from its text alone, without human or model judges.

For every turn: which golden answers and supporting entities the observation showed and the rewritten memory holds, what
the last memory held and this one does not, how much was copied verbatim, how long the memory is and how much of it
changed. docs/evaluate.md has the formulas and their limits. A metric that is undefined for a turn (a fraction of
nothing) is absent from its metrics, and means are over the turns that have it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from memsearcher_jax.agent import protocol
from memsearcher_jax.agent.reward import normalize
from memsearcher_jax.report.word_diff import word_diff
from memsearcher_jax.types import Problem, StopReason, Trajectory, Turn, plain_title

CLOSED_ANSWERS = frozenset({"yes", "no", "noanswer"})
"""Normalised answers that are not names: almost every text contains them, so their presence is no evidence."""

MIN_COPIED_RUN = 5
"""Consecutive tokens that must occur in the observation in the same order to count as copied."""

Metrics = dict[str, float]


@dataclass(frozen=True)
class NameTrace:
    """Which names of a list each text of a turn contains, in the order of the names.

    `held` and `lost` are None if the turn wrote no memory; `shown` is None without an observation.
    """

    shown: tuple[str, ...] | None
    held: tuple[str, ...] | None
    lost: tuple[str, ...] | None  # held by the previous memory but not by this one


@dataclass(frozen=True)
class TurnQuality:
    names: dict[str, NameTrace]  # of the lists "golden" and "supporting"; absent if the data has no names to track
    metrics: Metrics  # such as `golden/held`, `supporting/lost`, `memory/copied`
    wrote_memory: bool


def memory_quality(trajectory: Trajectory) -> tuple[TurnQuality, ...]:
    """Measure every turn of a trajectory.

    Raises:
        ValueError: `supporting_titles` in the problem's metadata is not a list of strings.
    """
    problem = trajectory.problem
    outcome = trajectory.outcome
    lists = {"golden": golden_names(problem), "supporting": supporting_names(problem)}
    turns: list[TurnQuality] = []
    for number, turn in enumerate(outcome.turns, start=1):
        # A failed rewrite ends the trajectory; only an agent that carries no memory continues with an empty one.
        may_be_empty = number < len(outcome.turns) or outcome.stop is StopReason.MAX_TURNS
        wrote_memory = bool(turn.new_memory) or (bool(turn.rewrite) and may_be_empty)
        shown = normalize(shown_text(turn)) if turn.observation else None
        before = normalize(turn.memory)
        after = normalize(turn.new_memory) if wrote_memory else None
        traces: dict[str, NameTrace] = {}
        metrics: Metrics = {}
        for name, names in lists.items():
            if names:
                traces[name], fractions = _trace(names, shown, before, after)
                metrics |= {f"{name}/{metric}": value for metric, value in fractions.items()}
        if wrote_memory:
            metrics |= _text_metrics(turn)
        turns.append(TurnQuality(traces, metrics, wrote_memory))
    return tuple(turns)


def last_memory(turns: Sequence[TurnQuality]) -> Metrics:
    """The metrics of the last turn that wrote a memory: the memory that the final turn answers from."""
    return next((turn.metrics for turn in reversed(turns) if turn.wrote_memory), {})


def metric_columns(rows: Iterable[Metrics]) -> dict[str, list[float]]:
    """The values of each metric in the rows that have it, in order of first occurrence."""
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    return columns


def golden_names(problem: Problem) -> dict[str, tuple[str, ...]]:
    """Golden answers that a text can contain, with their normalised form; one answer per normalised form."""
    forms = {answer: (normalize(answer),) for answer in problem.golden_answers}
    return _distinct({answer: form for answer, form in forms.items() if form[0] not in CLOSED_ANSWERS})


def supporting_names(problem: Problem) -> dict[str, tuple[str, ...]]:
    """Titles of the supporting passages with their normalised forms, with and without a final `(...)`.

    For the title "Fame (2009 film)", a sentence has "Fame".
    """
    titles = problem.supporting_titles
    return _distinct({title: (normalize(title), normalize(plain_title(title))) for title in titles})


def shown_text(turn: Turn) -> str:
    """The observation without the tool calls that it repeats: those are the policy's own text, not search results."""
    text = turn.observation
    for call in filter(None, turn.calls):
        text = text.replace(call, "\n", 1)
    return text


def tokenize(text: str) -> list[str]:
    """Words and punctuation marks. The policy's tokens would depend on the preceding text."""
    return re.findall(r"\w+|[^\w\s]", text)


def copied_fraction(memory_T: Sequence[str], source: Sequence[str], min_run: int) -> float:
    """The fraction of tokens in runs of at least `min_run` that `source` has, too; a shorter text must be one run."""
    size = min(min_run, len(memory_T))  # a longer run consists of such ones
    runs = {tuple(source[start : start + size]) for start in range(len(source) - size + 1)}
    copied: set[int] = set()  # positions
    for start in range(len(memory_T) - size + 1):
        if tuple(memory_T[start : start + size]) in runs:
            copied.update(range(start, start + size))
    return len(copied) / len(memory_T)


def _trace(
    names: Mapping[str, tuple[str, ...]], shown: str | None, before: str, after: str | None
) -> tuple[NameTrace, Metrics]:
    """Which normalised texts contain the names, and the fractions.

    `any_` is 1 if there is at least one, for the spellings of one answer.
    """

    def in_text(text: str) -> tuple[str, ...]:
        return tuple(name for name, forms in names.items() if any(form in text for form in forms))

    found = None if shown is None else in_text(shown)
    held_before = in_text(before)
    metrics: Metrics = {}
    if found is not None:
        metrics |= {"shown": len(found) / len(names), "any_shown": float(bool(found))}
    if after is None:
        return NameTrace(found, None, None), metrics
    held = in_text(after)
    kept = tuple(name for name in found or () if name in held)
    lost = tuple(name for name in held_before if name not in held)
    metrics |= {"held": len(held) / len(names), "any_held": float(bool(held))}
    if found:
        metrics["kept"] = len(kept) / len(found)
    if held_before:
        metrics["lost"] = len(lost) / len(held_before)
    return NameTrace(found, held, lost), metrics


def _text_metrics(turn: Turn) -> Metrics:
    """Length, truncation, copying and change (as the viewers show it) of the memory that the turn wrote."""
    old = turn.memory
    new = turn.new_memory
    text = turn.rewrite or turn.reply
    written = protocol.memory(text) or text.strip()
    # An empty memory was not cut: the agent carries none. A cut one is the beginning of what was written.
    cut = bool(new) and new != written and written.startswith(new)
    metrics: Metrics = {"memory/words": float(len(new.split())), "memory/cut": float(cut)}
    if turn.observation and (memory_T := tokenize(new)):
        metrics["memory/copied"] = copied_fraction(memory_T, tokenize(shown_text(turn)), MIN_COPIED_RUN)
    if old.split():
        changed = sum(len(run.split()) for change, run in word_diff(old, new) if change != "same")
        metrics["memory/changed"] = changed / (len(old.split()) + len(new.split()))
    return metrics


def _distinct(forms: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """One name for each set of forms; empty forms, which every text would contain, are dropped."""
    names: dict[tuple[str, ...], str] = {}
    for name, candidates in forms.items():
        if kept := tuple(dict.fromkeys(form for form in candidates if form)):
            names.setdefault(kept, name)
    return {name: kept for kept, name in names.items()}
