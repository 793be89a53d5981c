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
from memsearcher_jax.types import Outcome, Problem, StopReason, Trajectory, Turn, plain_title

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
    lists = {"golden": golden_names(problem), "supporting": supporting_names(problem)}
    turns: list[TurnQuality] = []
    for step in memory_steps(trajectory.outcome):
        shown = normalize(step.observation) if step.has_observation else None
        before = normalize(step.before)
        after = None if step.after is None else normalize(step.after)
        traces: dict[str, NameTrace] = {}
        metrics: Metrics = {}
        for name, names in lists.items():
            if names:
                traces[name], fractions = _trace(names, shown, before, after)
                metrics |= {f"{name}/{metric}": value for metric, value in fractions.items()}
        if step.after is not None:
            metrics |= _text_metrics(step, step.after)
        turns.append(TurnQuality(traces, metrics, step.after is not None))
    return tuple(turns)


@dataclass(frozen=True)
class MemoryStep:
    """What one turn made of a memory."""

    before: str  # the memory of the turn before
    observation: str  # what the policy had seen when it wrote, without the tool calls that this text repeats
    has_observation: bool
    after: str | None  # None if the turn wrote no memory
    written: str  # the reply that holds the memory


def memory_steps(outcome: Outcome) -> list[MemoryStep]:
    """The memory and the observation of every turn, in the order in which the policy saw and wrote them."""
    turns = outcome.turns
    # MEM1's reply is its memory: what its search finds is read, and kept or not, by the reply of the next turn.
    writes_before_search = any(turn.new_memory and turn.observation and not turn.rewrite for turn in turns)
    steps = []
    unsummarized: list[str] = []  # what was shown since the last memory: a summary is of all of it
    for number, turn in enumerate(turns):
        # A failed rewrite ends the trajectory; only an agent that carries no memory continues with an empty one.
        may_be_empty = number + 1 < len(turns) or outcome.stop is StopReason.MAX_TURNS
        wrote_memory = bool(turn.new_memory) or (bool(turn.rewrite) and may_be_empty)
        before = turn.memory
        seen: Turn | None = turn
        if writes_before_search:
            seen = turns[number - 1] if number else None
            before = seen.new_memory if seen else ""  # `memory` also has what the search found
        observation = shown_text(seen) if seen else ""
        has_observation = bool(seen and seen.observation)
        if wrote_memory:
            observation = "\n".join([*unsummarized, observation])
            unsummarized = []
        elif has_observation:
            unsummarized.append(observation)
        steps.append(
            MemoryStep(
                before=before,
                observation=observation,
                has_observation=has_observation,
                after=turn.new_memory if wrote_memory else None,
                written=turn.rewrite or turn.reply,
            )
        )
    return steps


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
    """The observation without the tool calls that it repeats: those are the policy's own text, not search results.

    It repeats calls in their order, each before its result. A call that is the text of a query, as of Search-R1 and
    MEM1, is not repeated: where a page has the same words, the page was shown.
    """
    queries = {query.text for query in turn.queries}
    shown = []
    rest = turn.observation
    for call in turn.calls:
        if call and call not in queries and call in rest:
            before, _, rest = rest.partition(call)
            shown.append(before)
    return "\n".join([*shown, rest])


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


def _text_metrics(step: MemoryStep, new: str) -> Metrics:
    """Length, truncation, copying and change (as the viewers show it) of the memory that a turn wrote."""
    written = protocol.memory(step.written) or step.written.strip()
    # An empty memory was not cut: the agent carries none. A cut one is the beginning of what was written.
    cut = bool(new) and new != written and written.startswith(new)
    metrics: Metrics = {"memory/words": float(len(new.split())), "memory/cut": float(cut)}
    if step.has_observation and (memory_T := tokenize(new)):
        metrics["memory/copied"] = copied_fraction(memory_T, tokenize(step.observation), MIN_COPIED_RUN)
    old_words = len(step.before.split())
    if old_words:
        changed = sum(len(run.split()) for change, run in word_diff(step.before, new) if change != "same")
        metrics["memory/changed"] = changed / (old_words + len(new.split()))
    return metrics


def _distinct(forms: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """One name for each set of forms; empty forms, which every text would contain, are dropped."""
    names: dict[tuple[str, ...], str] = {}
    for name, candidates in forms.items():
        if kept := tuple(dict.fromkeys(form for form in candidates if form)):
            names.setdefault(kept, name)
    return {name: kept for kept, name in names.items()}
