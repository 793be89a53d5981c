"""How good the memories of a trajectory are, from its text alone: no person and no other model judges.

For every turn: which golden answers and supporting entities the observation showed and the rewritten memory holds, what
earlier memories held and this one does not, how much was copied word for word, how long the memory is and how much of
it changed. docs/memory_quality.md has the formulas and what they can not see. A metric that is undefined for a turn (a
share of nothing) is absent from its numbers, and means are over the turns that have it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from memsearcher_jax.agent.types import Problem, Ruler, Stop, Trajectory, Turn
from memsearcher_jax.report.diff import word_diff

CLOSED_ANSWERS = frozenset({"yes", "no", "noanswer"})
"""Normalised answers that are no names: almost every text holds them, so that holding them says nothing."""

LEAST_RUN = 5
"""Tokens that must stand in the observation in the same order, one after the other, to count as copied."""

_TOKEN = re.compile(r"\w+|[^\w\s]")
_QUALIFIER = re.compile(r"\s*\([^()]*\)\s*$")

Metrics = dict[str, float]


@dataclass(frozen=True)
class Rules:
    """What must mean the same here as to the agent. This room knows the agent's types only, so functions are given."""

    normalize: Callable[[str], str]
    """agent.reward.normalize: a text holds a name if the one, normalised, contains the other, as in cover-EM."""
    written: Callable[[str], str]
    """agent.protocol.memory: what a memory reply asked to remember, before it was cut at the budget."""
    ruler: Ruler | None = None
    """Measures in tokens of the policy; without it lengths are in words only."""
    budget: int = 0
    """agent.memory_tokens, the budget in tokens of the policy; needed with a ruler."""
    least_run: int = LEAST_RUN

    def __post_init__(self) -> None:
        if self.least_run < 1:
            raise ValueError(f"least_run is {self.least_run}: a copied run has at least one token")
        if self.ruler and self.budget < 1:
            raise ValueError(f"budget is {self.budget}: with a ruler, give agent.memory_tokens of the run")


@dataclass(frozen=True)
class Names:
    """Which of the `wanted` names stood where; all tuples keep the order of `wanted`.

    `held` and what follows it are None where the turn wrote no memory; `shown` is None where it saw no observation.
    """

    wanted: tuple[str, ...]
    shown: tuple[str, ...] | None
    held_before: tuple[str, ...]
    held: tuple[str, ...] | None
    lost: tuple[str, ...] | None  # the memory before held them, this one does not
    ever_held: tuple[str, ...]  # in any memory up to the one before
    forgotten: tuple[str, ...] | None  # of `ever_held`, what this memory does not hold

    def metrics(self) -> Metrics:
        """Shares in [0, 1]; `any_` is 1 where there is at least one, for lists of spellings of one answer."""
        numbers: Metrics = {}
        if self.shown is not None:
            numbers |= {"shown": len(self.shown) / len(self.wanted), "any_shown": float(bool(self.shown))}
        if self.held is None:
            return numbers
        numbers |= {"held": len(self.held) / len(self.wanted), "any_held": float(bool(self.held))}
        if self.shown:
            numbers["kept"] = len(set(self.shown) & set(self.held)) / len(self.shown)
        if self.held_before:
            numbers["lost"] = len(self.lost) / len(self.held_before)
        if self.ever_held:
            numbers["forgotten"] = len(self.forgotten) / len(self.ever_held)
        return numbers


@dataclass(frozen=True)
class TurnQuality:
    """One turn, counted from 1. `golden` or `supporting` is None where the data names nothing to look for."""

    number: int
    golden: Names | None
    supporting: Names | None
    text: Metrics  # of the new memory; {} where the turn wrote none
    wrote_memory: bool

    @property
    def metrics(self) -> Metrics:
        """All numbers of the turn, as `golden/held`, `supporting/lost`, `memory/copied`."""
        parts = {
            "golden": self.golden.metrics() if self.golden else {},
            "supporting": self.supporting.metrics() if self.supporting else {},
            "memory": self.text,
        }
        return {f"{part}/{name}": value for part, numbers in parts.items() for name, value in numbers.items()}


@dataclass(frozen=True)
class TrajectoryQuality:
    """The turns of one trajectory; `hops` is None where the data does not say."""

    problem_id: str
    hops: int | None
    turns: tuple[TurnQuality, ...]

    @property
    def means(self) -> Metrics:
        """Each metric's mean over the turns that have it."""
        return {name: mean.value for name, mean in _means(turn.metrics for turn in self.turns).items()}

    @property
    def last(self) -> Metrics:
        """The numbers of the last turn that wrote a memory: what the final turn had to answer from."""
        return next((turn.metrics for turn in reversed(self.turns) if turn.wrote_memory), {})


@dataclass(frozen=True)
class Mean:
    value: float
    count: int  # how many turns or trajectories have the metric


@dataclass(frozen=True)
class MemorySummary:
    """Many trajectories. The keys of the inner mappings are those of `TurnQuality.metrics`."""

    trajectories: int
    turns: int
    over_turns: dict[str, Mean]  # every turn weighs the same
    over_trajectories: dict[str, Mean]  # of `means`: every trajectory weighs the same
    at_the_end: dict[str, Mean]  # of `last`, over trajectories
    by_turn: dict[int, dict[str, Mean]]  # over turns of that number
    by_hops: dict[int, dict[str, Mean]]  # over trajectories of that many hops

    def to_json(self) -> dict[str, Any]:
        """The same as dicts that JSON can hold."""
        return asdict(self)


def memory_quality(trajectory: Trajectory, rules: Rules) -> TrajectoryQuality:
    """Every turn of a trajectory.

    Raises:
        ValueError: the problem's metadata has `supporting_titles` that are no texts, or `hops` that is no number.
    """
    problem, outcome = trajectory.problem, trajectory.outcome
    golden, supporting = golden_names(problem, rules.normalize), supporting_names(problem, rules.normalize)
    ever: set[str] = set()
    turns = []
    for number, turn in enumerate(outcome.turns, start=1):
        wrote = _wrote_memory(turn, last=number == len(outcome.turns), stop=outcome.stop)
        shown = rules.normalize(shown_text(turn)) if turn.observation else None
        before, after = rules.normalize(turn.memory), rules.normalize(turn.new_memory) if wrote else None
        traces = [_trace(names, shown, before, after, ever) for names in (golden, supporting)]
        turns.append(TurnQuality(number, *traces, _text_metrics(turn, rules) if wrote else {}, wrote))
        ever |= {name for trace in traces if trace for name in (*trace.held_before, *(trace.held or ()))}
    return TrajectoryQuality(problem.id, hops_of(problem), tuple(turns))


def summarise(qualities: Iterable[TrajectoryQuality]) -> MemorySummary:
    """Means over many trajectories, over their turns, by the turn's number and by hops."""
    qualities = list(qualities)
    turns = [turn for quality in qualities for turn in quality.turns]
    numbers = sorted({turn.number for turn in turns})
    hops = sorted({quality.hops for quality in qualities if quality.hops is not None})
    return MemorySummary(
        trajectories=len(qualities),
        turns=len(turns),
        over_turns=_means(turn.metrics for turn in turns),
        over_trajectories=_means(quality.means for quality in qualities),
        at_the_end=_means(quality.last for quality in qualities),
        by_turn={number: _means(turn.metrics for turn in turns if turn.number == number) for number in numbers},
        by_hops={count: _means(quality.means for quality in qualities if quality.hops == count) for count in hops},
    )


def golden_names(problem: Problem, normalize: Callable[[str], str]) -> dict[str, tuple[str, ...]]:
    """Golden answers that a text can hold, each with its normalised form; one for all that normalise alike."""
    forms = {answer: (normalize(answer),) for answer in problem.golden_answers}
    return _distinct({answer: form for answer, form in forms.items() if form[0] not in CLOSED_ANSWERS})


def supporting_names(problem: Problem, normalize: Callable[[str], str]) -> dict[str, tuple[str, ...]]:
    """Titles of the supporting passages with their normalised forms: as it stands, and without a final `(...)`.

    A title says "Fame (2009 film)" where a sentence says "Fame".
    """
    titles = problem.metadata.get("supporting_titles") or []
    if not isinstance(titles, list | tuple) or not all(isinstance(title, str) for title in titles):
        raise ValueError(
            f"problem {problem.id!r}: metadata.supporting_titles must be a list of titles, it is {titles!r}"
        )
    return _distinct({title: (normalize(title), normalize(_QUALIFIER.sub("", title))) for title in titles})


def hops_of(problem: Problem) -> int | None:
    """How many facts the question needs, where the data says it."""
    hops = problem.metadata.get("hops")
    if hops is not None and (not isinstance(hops, int) or isinstance(hops, bool)):
        raise ValueError(f"problem {problem.id!r}: metadata.hops must be a whole number, it is {hops!r}")
    return hops


def shown_text(turn: Turn) -> str:
    """The observation without the tool calls that it repeats: what the policy wrote itself, no search has shown."""
    text, start = turn.observation, 0
    for call in turn.calls:
        place = text.find(call, start) if call else -1
        if place >= 0:
            text, start = f"{text[:place]}\n{text[place + len(call) :]}", place + 1
    return text


def tokens_of(text: str) -> list[str]:
    """Words and punctuation marks as they are written. The policy's tokens would depend on what stands before them."""
    return _TOKEN.findall(text)


def common_runs(memory_T: Sequence[str], source: Sequence[str]) -> np.ndarray:
    """For each token, the length of the longest run that ends with it and stands in `source` too: int [T]."""
    ids = {token: number for number, token in enumerate(dict.fromkeys(source))}
    source_O = np.array([ids[token] for token in source], np.int64)
    run_T = np.zeros(len(memory_T), np.int64)
    length_O = np.zeros(len(source), np.int64)  # of the run that ends at each token of the source and at the last of T
    for place, token in enumerate(memory_T):
        before_O = np.concatenate([[0], length_O[:-1]])
        length_O = np.where(source_O == ids.get(token, -1), before_O + 1, 0)
        run_T[place] = length_O.max(initial=0)
    return run_T


def copied_share(run_T: np.ndarray, least_run: int) -> float:
    """The share of tokens inside runs (see `common_runs`) of at least `least_run`; a shorter text must be one run."""
    least_run = min(least_run, len(run_T))
    copied_T = np.zeros(len(run_T), bool)
    for place in np.flatnonzero(run_T >= least_run):
        copied_T[place + 1 - run_T[place] : place + 1] = True
    return float(copied_T.mean())


def _wrote_memory(turn: Turn, *, last: bool, stop: Stop) -> bool:
    """Whether the turn ended with a memory. A rewrite that failed ended its trajectory; only `remember=False` goes on
    with an empty one."""
    return bool(turn.new_memory) or (bool(turn.rewrite) and (not last or stop is Stop.MAX_TURNS))


def _trace(
    names: Mapping[str, tuple[str, ...]], shown: str | None, before: str, after: str | None, ever: set[str]
) -> Names | None:
    """Where the names stand in the normalised texts; None if there are no names to look for."""
    if not names:
        return None

    def in_text(text: str) -> tuple[str, ...]:
        return tuple(name for name, forms in names.items() if any(form in text for form in forms))

    held_before, held = in_text(before), None if after is None else in_text(after)
    ever_held = tuple(name for name in names if name in ever or name in held_before)
    return Names(
        wanted=tuple(names),
        shown=None if shown is None else in_text(shown),
        held_before=held_before,
        held=held,
        lost=None if held is None else tuple(name for name in held_before if name not in held),
        ever_held=ever_held,
        forgotten=None if held is None else tuple(name for name in ever_held if name not in held),
    )


def _text_metrics(turn: Turn, rules: Rules) -> Metrics:
    """Length, cut, copying and change of the memory that the turn wrote."""
    old, new, written = turn.memory, turn.new_memory, rules.written(turn.rewrite)
    cut = 0 < len(new) < len(written)  # an empty one was not cut: the run hands no memory on
    numbers: Metrics = {"words": float(len(new.split())), "cut": float(cut)}
    if rules.ruler:
        tokens = rules.ruler.count(new)
        excess = max(0, rules.ruler.count(written) - rules.budget) if cut else 0
        numbers |= {"tokens": float(tokens), "fill": tokens / rules.budget, "tokens_cut": float(excess)}
    if turn.observation and (memory_T := tokens_of(new)):
        run_T = common_runs(memory_T, tokens_of(shown_text(turn)))
        numbers |= {"copied": copied_share(run_T, rules.least_run), "longest_run": float(run_T.max())}
    return numbers | _change(old, new)


def _change(old: str, new: str) -> Metrics:
    """By the words of `word_diff`, which the viewers show; {} where there was no memory before."""
    old_count, new_count = len(old.split()), len(new.split())
    if not old_count:
        return {}
    words = {"same": 0, "added": 0, "removed": 0}
    for change, run in word_diff(old, new):
        words[change] += len(run.split())
    numbers = {
        "changed": (words["added"] + words["removed"]) / (old_count + new_count),
        "removed": words["removed"] / old_count,
    }
    return numbers | ({"added": words["added"] / new_count} if new_count else {})


def _distinct(forms: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """One name for each set of forms; forms of no letters, which every text would hold, are left out."""
    names: dict[tuple[str, ...], str] = {}
    for name, texts in forms.items():
        if kept := tuple(dict.fromkeys(text for text in texts if text)):
            names.setdefault(kept, name)
    return {name: texts for texts, name in names.items()}


def _means(rows: Iterable[Metrics]) -> dict[str, Mean]:
    """The mean of each metric over the rows that have it, in the order in which the metrics first occur."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            values.setdefault(name, []).append(value)
    return {name: Mean(float(np.mean(column)), len(column)) for name, column in values.items()}
