"""Evaluation: every question once, under evaluation's settings, by the same driver that training uses."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from memsearcher_jax.hosts.distributed import Hosts
from memsearcher_jax.logs.trajectories import (
    HOST_FILES,
    append_trajectory,
    clean_log,
    read_trajectories,
    summarize_trajectory,
)
from memsearcher_jax.rl.batch import RolloutBatch, exchange
from memsearcher_jax.rl.metrics import TEST_PREFIX, Metrics, trajectory_metrics
from memsearcher_jax.rl.recovery import Recovery
from memsearcher_jax.rl.rewards import RewardFn, asks_models
from memsearcher_jax.rl.rng import named_key
from memsearcher_jax.rl.rollout import Job, Params, Rollout, RolloutDriver, make_jobs
from memsearcher_jax.rl.setup import Run
from memsearcher_jax.rl.state import RunState
from memsearcher_jax.rl.timing import Timer
from memsearcher_jax.types import Problem, ScoredTrajectory, TrajectorySummary

HOST_FILE = "host_{:04d}.jsonl.gz"  # trajectories of one host: one of HOST_FILES


def evaluate(
    run: Run,
    driver: RolloutDriver,
    params: Params,
    notify: Callable[[str], None],
    reward_fn: RewardFn,
    jobs: Sequence[Job],
) -> list[ScoredTrajectory]:
    """One scored trajectory for each of the jobs, in order, all in memory."""
    key = evaluation_key(run)
    trajectories, _ = driver.trajectories(jobs, params, key, notify)
    driver.engine.release()  # rewards have the memory of the sampler's cache, as in training
    return reward_fn(trajectories, key, notify, params)


@dataclass
class Evaluator:
    """Evaluates the policy while it trains, on all hosts together."""

    run: Run
    driver: RolloutDriver
    reward_fn: RewardFn
    hosts: Hosts

    def before_first_step(self, state: RunState, recovery: Recovery) -> Metrics:
        """The test metrics of weights whose evaluation was due when the run ended, or which a rollback may restore."""
        every = self.run.config.rl.evaluate_every
        health = recovery.monitor
        if not every or health.state.evaluated == state.step:
            return {}
        was_due = state.step > 0 and state.step % every == 0
        if was_due or (health.rolls_back and recovery.best_step is None):
            return self.evaluate(state, recovery, Timer())
        return {}

    def if_due(self, state: RunState, recovery: Recovery, timer: Timer) -> Metrics:
        """The test metrics of the weights, if the settings ask for them after this step."""
        every = self.run.config.rl.evaluate_every
        if not every or state.step % every:
            return {}
        with timer("evaluate"):
            return self.evaluate(state, recovery, timer)

    def evaluate(self, state: RunState, recovery: Recovery, timer: Timer) -> Metrics:
        """The test metrics of the weights. Raises RunEnded on all hosts if one is to stop, or if it was lost."""
        all_jobs = make_jobs(self.run.problems.test, 1)
        jobs = [all_jobs[number] for number in self.hosts.share(len(all_jobs))]
        batch = None
        with self.hosts.guarded():
            self.hosts.check()
            scored = evaluate(self.run, self.driver, state.params, timer.notify, self.reward_fn, jobs)
            batch = RolloutBatch((), [summarize_trajectory(trajectory) for trajectory in scored])
        summaries = exchange(self.hosts, batch).summaries
        metrics = self.hosts.agreed(lambda: trajectory_metrics(summaries, self.run.agent))  # its own numbers may fail
        recovery.monitor.record_evaluation(state.step, metrics)
        return {f"{TEST_PREFIX}{name}": value for name, value in metrics.items()}


def read_summaries(folder: Path, problems: Sequence[Problem]) -> dict[str, TrajectorySummary]:
    """What all hosts of an evaluation of `problems` have written to `folder` so far, by the question's id.

    Raises ValueError if a file is damaged, or holds anything but these questions, once each.
    """
    problem_by_id = {problem.id: problem for problem in problems}
    summaries: dict[str, TrajectorySummary] = {}
    for path in sorted(folder.glob(HOST_FILES)):
        for scored in read_trajectories(path, log=True):
            problem = scored.trajectory.problem
            if problem != problem_by_id.get(problem.id):
                raise ValueError(f"{path}: question {problem.id!r} is not one of these: start another evaluation")
            if problem.id in summaries:
                raise ValueError(f"{path}: question {problem.id!r} was answered before: start another evaluation")
            summaries[problem.id] = summarize_trajectory(scored)
    return summaries


def drop_lost_trajectories(folder: Path, hosts: Hosts) -> None:
    """Removes the trajectories that were lost to faults from the files of this host: their questions are asked again.

    Also removes an incomplete last line, left by a killed process. Raises ValueError if a file is damaged.
    """
    for path in sorted(folder.glob(HOST_FILES)):
        # Only the host that a file belongs to may change it; earlier, there may have been more hosts.
        number = int(path.name.removeprefix("host_").partition(".")[0])
        if number % hosts.count == hosts.index:
            clean_log(path, lambda scored: not scored.trajectory.outcome.stop.is_fault)


def missing_jobs(problems: Sequence[Problem], done: Container[str], hosts: Hosts) -> list[Job]:
    """The jobs of this host, every `hosts.count`-th, whose questions' ids are not in `done`."""
    jobs_of_host = make_jobs(problems, 1)[hosts.index :: hosts.count]
    return [job for job in jobs_of_host if job.problem.id not in done]


def evaluate_to_folder(
    run: Run,
    driver: RolloutDriver,
    params: Params,
    jobs: Sequence[Job],
    folder: Path,
    hosts: Hosts,
    reward_fn: RewardFn,
    on_answer: Callable[[str, TrajectorySummary], None],
) -> None:
    """Runs the jobs and appends each trajectory to the host's file as it ends; `on_answer` gets its question's id.

    What is sampled for a question depends on its place among all questions alone. Trajectories whose rewards ask an
    answerer or the policy are rewarded as many at a time as there are slots: a killed evaluation loses these at most.
    """
    key = evaluation_key(run)

    def notify(line: str) -> None:
        """Each answer is shown as it ends."""

    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / HOST_FILE.format(hosts.index), "ab") as log:

        def write(scored: ScoredTrajectory) -> None:
            append_trajectory(log, scored)
            on_answer(scored.trajectory.problem.id, summarize_trajectory(scored))

        def on_end(job: Job, ended: Rollout) -> None:
            (scored,) = reward_fn([driver.trajectory(job, ended)], key, notify, params)
            write(scored)

        if not asks_models(run.agent):
            driver.run(jobs, params, key, on_end)
            return
        chunk = run.config.sampling.slots
        for start in range(0, len(jobs), chunk):
            for scored in evaluate(run, driver, params, notify, reward_fn, jobs[start : start + chunk]):
                write(scored)


def evaluation_key(run: Run) -> jax.Array:
    """The key for all draws of an evaluation."""
    return named_key(run.config.seed, "evaluate", 0)
