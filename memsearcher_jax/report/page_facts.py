"""What the report page says about a run, read from its folder and boiled down to one small value per trajectory.

Two kinds of folders are understood: a training run (metrics.jsonl, trajectories/step_*.jsonl.gz) and an evaluation
(trajectories/part_*.jsonl.gz, results.json once it is finished).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memsearcher_jax.agent.types import Context, Stop, Trajectory
from memsearcher_jax.jsonl import numbered_lines, parse_object
from memsearcher_jax.report.metrics import FILE_NAME, Metrics, read_metrics
from memsearcher_jax.report.trajectories import Scored, read_trajectories

Z_95 = 1.959964  # standard normal quantile of a two-sided 95 % interval
WHOLE_BELOW = 4  # steps; a shorter run is not taken apart into its beginning and its end


@dataclass(frozen=True)
class Facts:
    """What the tables and plots need of one trajectory."""

    dataset: str  # "" where the data does not say
    hops: int | None  # facts that the question needs, where the data says it
    turns: int
    searches: int
    stop: Stop
    reward: float
    scores: dict[str, float]
    tokens_of_turns: tuple[int, ...]  # see `tokens_of_turns`
    step: int | None = None  # of training
    counts: dict[str, int] = field(default_factory=dict)  # of `Outcome`

    @property
    def right(self) -> bool | None:
        """Whether the answer matches exactly; None if nobody scored it."""
        return None if "exact_match" not in self.scores else self.scores["exact_match"] == 1.0


@dataclass(frozen=True)
class Run:
    """One folder, as far as the page tells of it."""

    name: str
    kind: str  # "training run" or "evaluation"
    settings: dict[str, Any]  # run.json
    steps: list[Metrics]
    results: dict[str, Any]  # results.json; empty until an evaluation is finished
    facts: list[Facts]
    note: str = ""  # what of the folder the page leaves out, in a sentence

    @property
    def workflow(self) -> str:
        agent = self.settings.get("agent")
        return str(agent.get("workflow", "")) if isinstance(agent, dict) else ""


@dataclass(frozen=True)
class Group:
    """Trajectories that share a column of a table and a colour in a plot."""

    label: str
    facts: list[Facts] = field(repr=False)


def read_run(folder: str | Path, *, most: int, browse: Callable[[Scored, Facts], None] | None = None) -> Run:
    """Reads a training run or an evaluation.

    Of a training run with more than about `most` trajectories, evenly spaced steps are read, the last one always.
    `browse` gets at most `most` trajectories, evenly spaced among those read. What is left out, `Run.note` says.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: it holds neither kind of run, or a file of it is damaged.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    training = (folder / FILE_NAME).is_file()
    files = sorted((folder / "trajectories").glob("*.jsonl.gz"))
    if not training and not files:
        raise ValueError(
            f"{folder} holds no run to report on: neither {FILE_NAME} nor trajectories/*.jsonl.gz; "
            "name the folder of a training run or of an evaluation"
        )
    chosen = choose_files(files, most) if training else files
    total = sum(count_lines(path) for path in chosen)
    facts: list[Facts] = []
    for path, scored in _all(chosen):
        facts.append(facts_of(scored, _step_of(path) if training else None))
        if browse and is_chosen(len(facts) - 1, total, most):
            browse(scored, facts[-1])
    notes = []
    if len(chosen) < len(files):
        notes.append(f"Trajectories are those of {len(chosen)} of {len(files)} steps, evenly spaced.")
    if browse and total > most:
        notes.append(f"The browser holds {most:,} of {total:,} trajectories, evenly spaced; the numbers are about all.")
    results = _read_object(folder / "results.json")
    if not training and not results:
        notes.append("The evaluation is not finished: there is no results.json.")
    return Run(
        # A folder may be given as "." or end in a slash.
        name=folder.resolve().name,
        kind="training run" if training else "evaluation",
        settings=_read_object(folder / "run.json"),
        steps=read_metrics(folder / FILE_NAME) if training else [],
        results=results,
        facts=facts,
        note=" ".join(notes),
    )


def choose_files(files: Sequence[Path], most: int) -> Sequence[Path]:
    """As many evenly spaced files as hold about `most` trajectories, if all are as long as the first; the last always.

    A training run may keep a million trajectories; counting them all would take longer than the report.
    """
    if not files:
        return files
    fitting = max(1, most // max(1, count_lines(files[0])))
    if fitting >= len(files):
        return files
    if fitting == 1:
        return files[-1:]
    last = len(files) - 1
    return [files[round(number * last / (fitting - 1))] for number in range(fitting)]


def is_chosen(index: int, total: int, most: int) -> bool:
    """Whether to keep the item at `index` of `total`, so that min(most, total) are kept, evenly spaced."""
    return total <= most or (index + 1) * most // total > index * most // total


def count_lines(path: Path) -> int:
    """Trajectories in a file, without decoding them."""
    return sum(1 for _ in numbered_lines(path))


def facts_of(scored: Scored, step: int | None = None) -> Facts:
    """The facts of one trajectory; its dataset and hops are what its problem's metadata says."""
    trajectory = scored.trajectory
    outcome, metadata = trajectory.outcome, trajectory.problem.metadata
    hops, source = metadata.get("hops"), metadata.get("source")
    return Facts(
        dataset=source if isinstance(source, str) else "",
        hops=hops if isinstance(hops, int) else None,
        turns=len(outcome.turns),
        searches=sum(len(turn.queries) for turn in outcome.turns),
        stop=outcome.stop,
        reward=scored.reward,
        scores=scored.scores,
        tokens_of_turns=tokens_of_turns(trajectory),
        step=step,
        counts=outcome.counts,
    )


def tokens_of_turns(trajectory: Trajectory) -> tuple[int, ...]:
    """How many tokens the context held when each turn ended.

    An agent with a memory has a context for each turn. One that keeps its history has a single context, in which each
    reply is a run of sampled tokens: the turn ends where its run ends.
    """
    contexts = trajectory.contexts
    if len(contexts) == 1 and len(trajectory.outcome.turns) > 1:
        return _run_ends(contexts[0])
    return tuple(len(context.ids) for context in contexts)


def _run_ends(context: Context) -> tuple[int, ...]:
    following = (*context.sampled[1:], False)
    return tuple(
        position + 1
        for position, (here, after) in enumerate(zip(context.sampled, following, strict=False))
        if here and not after
    )


def groups_of(run: Run, label: str = "") -> list[Group]:
    """An evaluation is one group. Of a training run, the first and the last quarter of the steps are two."""
    steps = sorted({facts.step for facts in run.facts if facts.step is not None})
    if len(steps) < WHOLE_BELOW:
        return [Group(label or "all", run.facts)] if run.facts else []
    quarter = len(steps) // 4
    groups = []
    for part in (steps[:quarter], steps[-quarter:]):
        span = f"step {part[0]}" if len(part) == 1 else f"steps {part[0]} to {part[-1]}"
        chosen = [facts for facts in run.facts if facts.step is not None and part[0] <= facts.step <= part[-1]]
        groups.append(Group(f"{label}, {span}" if label else span, chosen))
    return groups


def labels_of(run: Run, other: Run) -> tuple[str, str]:
    """Names for two runs that tell them apart: the workflow first, for that is what one compares."""
    first, second = (" ".join(filter(None, (one.workflow, f"({one.name})"))) for one in (run, other))
    return (first, second) if first != second else (f"{first} 1", f"{second} 2")


def mean(values: Sequence[float]) -> float:
    """NaN for none."""
    return math.fsum(values) / len(values) if values else math.nan


def wilson_interval(right: int, total: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927, "Probable inference"); it stays within 0 and 1 for few and for all."""
    if total == 0:
        return math.nan, math.nan
    share, spread = right / total, Z_95**2 / total
    middle = (share + spread / 2) / (1 + spread)
    half = Z_95 / (1 + spread) * math.sqrt(share * (1 - share) / total + spread / (4 * total))
    # Rounding could put an end just past the share itself where all or none are right.
    return max(0.0, min(middle - half, share)), min(1.0, max(middle + half, share))


def _all(files: Sequence[Path]) -> Iterator[tuple[Path, Scored]]:
    for path in files:
        for scored in read_trajectories(path):
            yield path, scored


def _step_of(path: Path) -> int:
    digits = path.name.removeprefix("step_").partition(".")[0]
    if not digits.isdecimal():
        raise ValueError(f"{path}: the trajectories of a training run are in files named step_000012.jsonl.gz")
    return int(digits)


def _read_object(path: Path) -> dict[str, Any]:
    return parse_object(str(path), path.read_bytes()) if path.is_file() else {}
