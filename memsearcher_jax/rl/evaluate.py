"""Evaluation: every question once, under evaluation's settings, by the same driver that training uses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import jax

from memsearcher_jax.agent.types import Problem, Trajectory
from memsearcher_jax.report.page_facts import Facts, facts_of
from memsearcher_jax.report.trajectories import Scored
from memsearcher_jax.report.trajectory_log import TrajectoryLog, cut_torn_end, read_log
from memsearcher_jax.rl import score
from memsearcher_jax.rl.build import Run
from memsearcher_jax.rl.exam import Exam
from memsearcher_jax.rl.hosts import Hosts, Interrupted
from memsearcher_jax.rl.keys import key_for
from memsearcher_jax.rl.part import Part, gather
from memsearcher_jax.rl.rollout import Job, RolloutDriver, jobs_for

PART = "part_{:04d}.jsonl.gz"  # trajectories of one host
EXAM = 2**31 - 1  # names the draws of an exam, beside those of its trajectories


@dataclass(frozen=True)
class Share:
    """The questions of one of several hosts that evaluate together: every `hosts`-th, from number `host` on."""

    host: int = 0  # from 0
    hosts: int = 1

    def holds(self, number: int) -> bool:
        """Whether this host has the question, or the file, of that number. Each has exactly one host."""
        return number % self.hosts == self.host

    def count(self, questions: int) -> int:
        """How many of so many questions this host has."""
        return len(range(self.host, questions, self.hosts))


def roll_out(
    driver: RolloutDriver,
    jobs: Sequence[Job],
    params,
    key: jax.Array,
    tell: Callable[[str], None],
    exam: Exam | None = None,
) -> list[Scored]:
    """Runs the jobs and scores their trajectories, tells how far it is; returns them in the order of `jobs`.

    `exam` is for trajectories that read streams, whose questions are asked when all are over.
    """
    return scored(run_all(driver, jobs, params, key, tell), key, tell, exam)


def run_all(
    driver: RolloutDriver, jobs: Sequence[Job], params, key: jax.Array, tell: Callable[[str], None]
) -> list[Trajectory]:
    """The trajectories of the jobs, in their order."""
    done: dict[int, Trajectory] = {}
    for job, trajectory in driver.run(jobs, params, key):
        done[job.number] = trajectory
        tell(f"{len(done)}/{len(jobs)} trajectories")
    return [done[job.number] for job in jobs]


def scored(
    trajectories: Sequence[Trajectory], key: jax.Array, tell: Callable[[str], None], exam: Exam | None
) -> list[Scored]:
    """What each is worth. `key` is that of their rollout."""
    if exam:
        return exam.grade(trajectories, jax.random.fold_in(key, EXAM), tell)
    return [score.scored(trajectory) for trajectory in trajectories]


def questions_of(run: Run) -> list[Problem]:
    """The test questions; of each benchmark the first `evaluation.questions`, if that is not 0.

    Raises ValueError if there are none, or if two have one id, by which their trajectories are told apart.
    """
    limit, taken, problems = run.config.evaluation.questions, dict[str, int](), dict[str, Problem]()
    for problem in run.problems.test:
        source = problem.metadata.get("source", "")
        taken[source] = taken.get(source, 0) + 1
        if limit and taken[source] > limit:
            continue
        if problem.id in problems:
            raise ValueError(f'two test questions have the id "{problem.id}": evaluate the files of data.test apart')
        problems[problem.id] = problem
    if not problems:
        raise ValueError("there are no test questions: set data.test to a file of questions")
    return list(problems.values())


def evaluate(
    run: Run,
    driver: RolloutDriver,
    params,
    tell: Callable[[str], None],
    exam: Exam | None = None,
    share: Share | None = None,
) -> list[Scored]:
    """One scored trajectory for each of `questions_of(run)`, or of a share of them, in order, all in memory.

    `driver` has evaluation's settings; `params` are the sampler's; `exam` as in `roll_out`, by evaluation's rules.
    """
    exam = replace(exam, evaluation=True) if exam else None
    return roll_out(driver, missing(questions_of(run), (), share or Share()), params, _key(run), tell, exam)


def measure(
    run: Run,
    driver: RolloutDriver,
    params,
    tell: Callable[[str], None],
    exam: Exam | None,
    hosts: Hosts,
) -> Sequence[Facts]:
    """`evaluate` by all hosts together: the facts of all questions on each of them; none if the run is to stop."""
    part = None
    with suppress(Interrupted):
        batch = evaluate(run, driver, params, tell, exam, Share(hosts.index, hosts.count))
        part = Part((), [facts_of(one) for one in batch])
    whole = gather(hosts, part)
    return whole.facts if whole else ()


def recorded(folder: Path, problems: Sequence[Problem], share: Share) -> dict[str, Facts]:
    """What an evaluation of `problems` has left in `folder` so far, by the question's id; of all hosts.

    A last line that a killed process left torn is cut off, in the files that belong to this share.
    Raises ValueError if a file is damaged, or holds something else than these questions, once each.
    """
    wanted = {problem.id: problem for problem in problems}
    facts: dict[str, Facts] = {}
    for path in sorted(folder.glob(PART.replace("{:04d}", "*"))):
        if share.holds(_number_of(path)):
            cut_torn_end(path)
        for scored in read_log(path):
            problem = scored.trajectory.problem
            if problem != wanted.get(problem.id):
                raise ValueError(f"{path}: question {problem.id!r} is not one of these: start another evaluation")
            if problem.id in facts:
                raise ValueError(f"{path}: question {problem.id!r} was answered before: start another evaluation")
            facts[problem.id] = facts_of(scored)
    return facts


def missing(problems: Sequence[Problem], done: Collection[str], share: Share) -> list[Job]:
    """The jobs of this share whose questions' ids are not among `done`."""
    return [job for job in jobs_for(problems, 1) if share.holds(job.number) and job.problem.id not in done]


def answer(
    run: Run,
    driver: RolloutDriver,
    params,
    jobs: Sequence[Job],
    folder: Path,
    share: Share,
    exam: Exam | None = None,
) -> Iterator[tuple[str, Facts]]:
    """Runs the jobs and keeps each trajectory in `folder` as it ends; yields the question's id and the facts then.

    What is drawn for a question depends on its place among all questions, not on what was done before a restart.
    With an `exam`, streams are read in parts, and kept when the questions of their part are answered.
    """
    with TrajectoryLog(folder / PART.format(share.host)) as log:
        for scored in _examined(run, driver, params, jobs, exam) if exam else _answered(run, driver, params, jobs):
            log.append(scored)
            yield scored.trajectory.problem.id, facts_of(scored)


def _answered(run: Run, driver: RolloutDriver, params, jobs: Sequence[Job]) -> Iterator[Scored]:
    for _, trajectory in driver.run(jobs, params, _key(run)):
        yield score.scored(trajectory)


def _examined(run: Run, driver: RolloutDriver, params, jobs: Sequence[Job], exam: Exam) -> Iterator[Scored]:
    """A killed evaluation loses one part at most; a part has as many streams as the sampler has slots."""
    size = run.config.sampling.slots
    for start in range(0, len(jobs), size):
        yield from roll_out(driver, jobs[start : start + size], params, _key(run), lambda _: None, exam)


def _key(run: Run) -> jax.Array:
    return key_for(run.config.seed, "evaluate", 0)


def _number_of(path: Path) -> int:
    digits = path.name.removeprefix("part_").partition(".")[0]
    if not digits.isdecimal():
        raise ValueError(f"{path}: an evaluation's files are named {PART.format(12)}: move it away")
    return int(digits)
