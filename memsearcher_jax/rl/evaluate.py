"""Evaluation: every question once, under evaluation's settings, by the same driver that training uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from memsearcher_jax.agent.types import Problem
from memsearcher_jax.report.trajectories import Scored, read_trajectories, write_trajectories
from memsearcher_jax.rl import score
from memsearcher_jax.rl.build import Run
from memsearcher_jax.rl.keys import key_for
from memsearcher_jax.rl.rollout import Job, RolloutDriver, jobs_for

PART = 256  # questions whose trajectories share a file; a killed evaluation loses at most so many


def roll_out(
    driver: RolloutDriver, jobs: Sequence[Job], params, key: jax.Array, tell: Callable[[str], None]
) -> list[Scored]:
    """Runs the jobs, scores each trajectory as it ends, tells how far it is; returns them in the order of `jobs`."""
    done: dict[int, Scored] = {}
    for job, trajectory in driver.run(jobs, params, key):
        done[job.number] = score.scored(trajectory)
        tell(f"{len(done)}/{len(jobs)} trajectories")
    return [done[job.number] for job in jobs]


def questions_of(run: Run) -> list[Problem]:
    """The test questions, or the first `evaluation.questions` of them. Raises ValueError if there are none."""
    problems = list(run.problems.test)[: run.config.evaluation.questions or None]
    if not problems:
        raise ValueError("there are no test questions: set data.test to a file of questions")
    return problems


def evaluate(
    run: Run,
    driver: RolloutDriver,
    params,
    tell: Callable[[str], None],
    *,
    folder: Path | None = None,
    ended: Callable[[list[Scored], list[Scored]], None] = lambda part, done: None,
) -> list[Scored]:
    """One scored trajectory for each of `questions_of(run)`, in order.

    `driver` has evaluation's settings; `params` are the sampler's. With a `folder`, trajectories are kept there in
    parts, and parts that it holds already are read instead of run. `ended` gets each part as it is there, and all so
    far.
    """
    jobs, key, done = jobs_for(questions_of(run), 1), key_for(run.config.seed, "evaluate", 0), []
    for start in range(0, len(jobs), PART):
        path = folder / f"part_{start // PART:04d}.jsonl.gz" if folder else None
        if path and path.exists():
            part = list(read_trajectories(path))
        else:
            part = roll_out(
                driver,
                jobs[start : start + PART],
                params,
                key,
                lambda text, at=start: tell(f"{text} from question {at}"),
            )
            if path:
                write_trajectories(path, part)
        done += part
        ended(part, done)
    return done
