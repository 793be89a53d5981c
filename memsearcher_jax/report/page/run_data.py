"""Reads the folder of a run and keeps one small summary per trajectory.

Two kinds of folders are supported: a training run (metrics.jsonl, trajectories/step_*.jsonl.gz) and an evaluation
(trajectories/host_*.jsonl.gz, results.json once it is finished).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from memsearcher_jax.jsonl import flatten, numbered_lines
from memsearcher_jax.logs.metrics import METRICS_FILE, Metrics, read_metrics
from memsearcher_jax.logs.run_facts import RESULTS_FILE, read_facts
from memsearcher_jax.logs.trajectories import HOST_FILES, STEP_FILES, decode_trajectory, log_lines, summarize_trajectory
from memsearcher_jax.types import ScoredTrajectory, TrajectorySummary

MIN_STEPS_TO_SPLIT = 4  # a shorter training run is not divided into its beginning and its end


@dataclass(frozen=True)
class RunData:
    name: str
    kind: str  # "training run" or "evaluation"
    settings: dict[str, Any]
    steps: list[Metrics]
    results: dict[str, Any]  # of an evaluation; empty until it has ended
    summaries: list[TrajectorySummary]
    note: str = ""  # which data of the folder is left out, in sentences


@dataclass(frozen=True)
class TrajectoryGroup:
    """Trajectories that share a table column and a plot color."""

    label: str
    summaries: list[TrajectorySummary] = field(repr=False)


def read_run(
    folder: Path,
    *,
    max_trajectories: int,
    on_trajectory: Callable[[ScoredTrajectory, TrajectorySummary], None] | None = None,
) -> RunData:
    """Read a training run or an evaluation.

    If a training run has more than about `max_trajectories`, evenly spaced steps are read, including the last.
    `on_trajectory` gets at most `max_trajectories`, evenly spaced among those read. `RunData.note` says what is left
    out.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: it is neither kind of run, or a file of it is damaged.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    facts = read_facts(folder)
    training = facts.training
    results = {} if training else facts.results
    files = sorted((folder / "trajectories").glob(STEP_FILES if training else HOST_FILES))
    if not training and not files:
        raise ValueError(
            f"{folder} has neither {METRICS_FILE} nor trajectories/{HOST_FILES}: name the folder of a training run or "
            "of an evaluation"
        )
    chosen = files
    notes: list[str] = []
    if training and files:
        # A training run may have a million trajectories, which take longer to count than the rest of the report.
        in_first = sum(1 for _ in numbered_lines(files[0]))
        max_files = max(1, max_trajectories // max(1, in_first))
        chosen = [files[index] for index in evenly_spaced(len(files), max_files)]
    if len(chosen) < len(files):
        notes.append(f"Trajectories are those of {len(chosen)} of {len(files)} steps, evenly spaced.")
    # Only an evaluation that is not finished has files that grow, or that end where it was killed.
    read_lines = numbered_lines if training or results else log_lines
    total = sum(1 for path in chosen for _ in read_lines(path))
    if on_trajectory and total > max_trajectories:
        share = f"{max_trajectories:,} of {total:,}"
        notes.append(f"The browser contains {share} trajectories, evenly spaced; tables and plots use all.")
    if not training and not results:
        notes.append(f"The evaluation is not finished: there is no {RESULTS_FILE}.")
    kept = set(evenly_spaced(total, max_trajectories))
    summaries: list[TrajectorySummary] = []
    for path in chosen:
        step = int(path.name.removeprefix("step_").partition(".")[0]) if training else None
        for where, line in read_lines(path):
            scored = decode_trajectory(where, line)
            summaries.append(summarize_trajectory(scored, step))
            if on_trajectory and len(summaries) - 1 in kept:
                on_trajectory(scored, summaries[-1])
    return RunData(
        name=folder.resolve().name,  # the folder may be given as "."
        kind="training run" if training else "evaluation",
        settings=facts.settings,
        steps=read_metrics(folder / METRICS_FILE) if training else [],
        results=results,
        summaries=summaries,
        note=" ".join(notes),
    )


def evenly_spaced(total: int, limit: int) -> list[int]:
    """At most `limit` of the indices below `total`, ascending: with the last, and with the first if there are two."""
    descending = np.linspace(total - 1, 0, min(total, limit)).round().astype(int)
    return descending[::-1].tolist()


def groups_of(run: RunData, label: str = "") -> list[TrajectoryGroup]:
    """An evaluation is one group. A training run has two: the first and the last quarter of its steps."""
    steps = sorted({summary.step for summary in run.summaries if summary.step is not None})
    if len(steps) < MIN_STEPS_TO_SPLIT:
        return [TrajectoryGroup(label or "all", run.summaries)] if run.summaries else []
    quarter = len(steps) // 4
    groups = []
    for chosen_steps in (steps[:quarter], steps[-quarter:]):
        first = chosen_steps[0]
        last = chosen_steps[-1]
        span = f"step {first}" if first == last else f"steps {first} to {last}"
        chosen = [summary for summary in run.summaries if summary.step in chosen_steps]
        groups.append(TrajectoryGroup(f"{label}, {span}" if label else span, chosen))
    return groups


def distinct_labels(run: RunData, other: RunData) -> tuple[str, str]:
    """Different labels for two runs, which start with the workflow."""
    first = _label(run)
    second = _label(other)
    return (first, second) if first != second else (f"{first} 1", f"{second} 2")


def _label(run: RunData) -> str:
    workflow = flatten(run.settings).get("agent.workflow", "")
    return f"{workflow} ({run.name})".strip()
