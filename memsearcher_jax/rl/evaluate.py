"""Evaluation: every question once, under evaluation's settings, by the same driver that training uses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import jax

from memsearcher_jax.logs.atomic_write import atomic_write
from memsearcher_jax.logs.trajectories import (
    append_trajectory,
    compress_trajectories,
    open_log,
    read_log,
    summarize_trajectory,
    truncate_incomplete,
)
from memsearcher_jax.rl.batch import RolloutBatch, exchange
from memsearcher_jax.rl.reward_fn import RewardFn
from memsearcher_jax.rl.rng import named_key
from memsearcher_jax.rl.rollout import Job, Params, RolloutDriver, make_jobs
from memsearcher_jax.rl.setup import Run, select_test_problems
from memsearcher_jax.runtime.distributed import Hosts, Interrupted
from memsearcher_jax.types import Problem, ScoredTrajectory, TrajectorySummary

SHARD_FILE = "shard_{:04d}.jsonl.gz"  # trajectories of one host


@dataclass(frozen=True)
class Shard:
    """The questions of one of several hosts that evaluate together: every `count`-th, from number `index` on."""

    index: int = 0  # from 0
    count: int = 1

    def holds(self, number: int) -> bool:
        """Whether the question, or the file, of that number belongs to this shard; it belongs to exactly one."""
        return number % self.count == self.index

    def size(self, questions: int) -> int:
        """How many of `questions` questions belong to this shard."""
        return len(range(self.index, questions, self.count))


def evaluation_problems(run: Run) -> list[Problem]:
    """The test problems that count: see `setup.select_test_problems`."""
    return select_test_problems(run.problems.test, run.config.evaluation.max_questions)


def evaluate(
    run: Run,
    driver: RolloutDriver,
    params: Params,
    notify: Callable[[str], None],
    reward_fn: RewardFn,
    jobs: Sequence[Job] | None = None,
) -> list[ScoredTrajectory]:
    """One scored trajectory for each of the jobs, by default of `evaluation_problems(run)`, in order, all in memory.

    `driver` and `reward_fn` have evaluation's settings; `params` are the sampler's.
    """
    if jobs is None:
        jobs = make_jobs(evaluation_problems(run), 1)
    key = evaluation_key(run)
    trajectories, _ = driver.rollout(jobs, params, key, notify)
    driver.executor.engine.release()  # rewards have the memory of the sampler's cache, as in training
    return reward_fn(trajectories, key, notify)


def evaluate_together(
    run: Run,
    driver: RolloutDriver,
    params: Params,
    notify: Callable[[str], None],
    reward_fn: RewardFn,
    hosts: Hosts,
) -> Sequence[TrajectorySummary]:
    """`evaluate` by all hosts: the summaries of all questions on each of them; none if the run is to stop."""
    jobs = missing_jobs(evaluation_problems(run), (), Shard(hosts.index, hosts.count))
    batch = None
    with suppress(Interrupted):
        scored = evaluate(run, driver, params, notify, reward_fn, jobs)
        batch = RolloutBatch((), [summarize_trajectory(one) for one in scored])
    joined = exchange(hosts, batch)
    if joined is None:
        return ()
    summaries = list(joined.summaries)
    rest = iter(joined.summaries)  # one host's after the other's
    for index in range(hosts.count):
        count = Shard(index, hosts.count).size(len(summaries))
        summaries[index :: hosts.count] = itertools.islice(rest, count)
    return summaries


def read_summaries(folder: Path, problems: Sequence[Problem], shard: Shard) -> dict[str, TrajectorySummary]:
    """What all hosts of an evaluation of `problems` have written to `folder` so far, by the question's id.

    An incomplete last line, left by a killed process, is cut off in the files that belong to this shard.
    Raises ValueError if a file is damaged, or holds anything but these questions, once each.
    """
    problem_by_id = {problem.id: problem for problem in problems}
    summaries: dict[str, TrajectorySummary] = {}
    for path in _files(folder):
        if shard.holds(_file_number(path)):
            truncate_incomplete(path)
        for scored in read_log(path):
            problem = scored.trajectory.problem
            if problem != problem_by_id.get(problem.id):
                raise ValueError(f"{path}: question {problem.id!r} is not one of these: start another evaluation")
            if problem.id in summaries:
                raise ValueError(f"{path}: question {problem.id!r} was answered before: start another evaluation")
            summaries[problem.id] = summarize_trajectory(scored)
    return summaries


def drop_lost_trajectories(folder: Path, shard: Shard) -> None:
    """Removes the trajectories that were lost to faults from the files of this shard: their questions are asked again.

    Raises ValueError if a file is damaged.
    """
    for path in filter(lambda path: shard.holds(_file_number(path)), _files(folder)):
        logged = list(read_log(path))
        kept = [scored for scored in logged if not scored.trajectory.outcome.stop.is_fault]
        if len(kept) < len(logged):
            atomic_write(path, b"".join(compress_trajectories([scored]) for scored in kept))


def missing_jobs(problems: Sequence[Problem], done: Collection[str], shard: Shard) -> list[Job]:
    """The jobs of this shard whose questions' ids are not in `done`."""
    done = frozenset(done)
    return [job for job in make_jobs(problems, 1) if shard.holds(job.number) and job.problem.id not in done]


def evaluate_to_folder(
    run: Run,
    driver: RolloutDriver,
    params: Params,
    jobs: Sequence[Job],
    folder: Path,
    shard: Shard,
    reward_fn: RewardFn,
    chunk: int = 1,
) -> Iterator[tuple[str, TrajectorySummary]]:
    """Runs the jobs, appends each trajectory to the shard's file as it ends, and yields the question's id and summary.

    What is sampled for a question depends on its place among all questions, not on what was done before a restart.
    With `chunk` above 1, that many trajectories are rewarded together: a killed evaluation loses one chunk at most.
    """
    key, notify = evaluation_key(run), lambda line: None
    if chunk == 1:
        rewarded = (reward_fn([one], key, notify) for _, one in driver.run(jobs, params, key))
    else:
        starts = range(0, len(jobs), chunk)
        rewarded = (evaluate(run, driver, params, notify, reward_fn, jobs[start : start + chunk]) for start in starts)
    with open_log(folder / SHARD_FILE.format(shard.index)) as log:
        for scored in itertools.chain.from_iterable(rewarded):
            append_trajectory(log, scored)
            yield scored.trajectory.problem.id, summarize_trajectory(scored)


def evaluation_key(run: Run) -> jax.Array:
    """The key for all draws of an evaluation."""
    return named_key(run.config.seed, "evaluate", 0)


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob(SHARD_FILE.replace("{:04d}", "*")))


def _file_number(path: Path) -> int:
    digits = path.name.removeprefix("shard_").partition(".")[0]
    if not digits.isdecimal():
        raise ValueError(f"{path}: an evaluation's files are named {SHARD_FILE.format(12)}: move it away")
    return int(digits)
