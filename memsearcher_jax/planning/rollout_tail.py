"""How long the rollout of a step takes until its last trajectory has ended, with and without `rl.carry_over`.

Total tokens divided by throughput ignores the slowest trajectories: the contexts of a trajectory follow one another,
however many slots there are. The simulation runs the schedule of training itself (`rl/carry_over.py`) on a driver whose
contexts take a given time instead of being sampled. While decoding is bound by memory, a token takes the same time in
any slot, whatever the others do. Trajectories are drawn independently; in a run those of one problem are more alike.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import astuple, dataclass, replace

import jax
import numpy as np

from memsearcher_jax.rl import carry_over
from memsearcher_jax.rl.config import RLConfig
from memsearcher_jax.rl.metrics import RolloutStats
from memsearcher_jax.rl.rollout import FinishedWorkflow, Job, Params, PausedWorkflow, Rollout
from memsearcher_jax.sampling.scheduler import SamplerStats
from memsearcher_jax.types import Context, Outcome, Problem, ScoredTrajectory, StopReason, Trajectory

STEPS = 40  # whose mean is taken


@dataclass(frozen=True)
class SimulatedStep:
    """The rollout of one step on one host."""

    seconds: float
    idle_share: float  # of the slots, over these seconds, that no trajectory held
    interrupted_share: float  # of the same, in which contexts were sampled that have to be sampled again


def sampled_tokens(scored: Iterable[ScoredTrajectory]) -> list[list[int]]:
    """Of each trajectory of a run that opened contexts, the tokens that the policy generated in each of them."""
    return [[sum(context.sampled) for context in one.trajectory.contexts] for one in scored if one.trajectory.contexts]


def drawn_tokens(trajectories: int, *, max_turns: int, mean_tokens: float, max_tokens: int) -> list[list[int]]:
    """As `sampled_tokens`, drawn: any number of turns is as likely, and lengths are exponential, cut at a limit."""
    rng = np.random.default_rng(0)
    turns = rng.integers(1, max_turns, trajectories, endpoint=True)
    return [np.clip(rng.exponential(mean_tokens, count), 1, max_tokens).astype(int).tolist() for count in turns]


def context_seconds(
    tokens: Sequence[Sequence[int]], *, token_seconds: float, search_seconds: float = 0.0
) -> list[list[float]]:
    """Seconds of each context: its tokens one after the other, and a search in all but the last of a trajectory."""
    return [
        [count * token_seconds + search_seconds * (turn + 1 < len(one)) for turn, count in enumerate(one)]
        for one in tokens
    ]


def mean_step(seconds: Sequence[Sequence[float]], *, slots: int, hosts: int, settings: RLConfig) -> SimulatedStep:
    """The mean of STEPS steps of `simulate`, without those in which nothing is carried yet, or no longer."""
    edge = settings.carry_over + 1
    settings = replace(settings, steps=STEPS + 2 * edge)
    simulated = simulate(seconds, slots=slots, hosts=hosts, settings=settings)[edge:-edge]
    return SimulatedStep(*np.mean([astuple(step) for step in simulated], axis=0).tolist())


def simulate(seconds: Sequence[Sequence[float]], *, slots: int, hosts: int, settings: RLConfig) -> list[SimulatedStep]:
    """`settings.steps` steps of one of the hosts; its trajectories are drawn from those whose contexts take `seconds`.

    Raises ValueError without any, or where one has no context.
    """
    if not seconds or not all(seconds):
        raise ValueError("there are no trajectories to draw from, or one of them has no context")
    driver = _SimulatedDriver(seconds, slots)
    carried = carry_over.nothing_carried(0, settings.prompts_per_step).share(0, hosts)
    key, steps = jax.random.key(0), []
    for step in range(settings.steps):
        _, carried, stats = carry_over.rollout(
            driver,
            carried,
            lambda step: [Problem(f"{step}/{index}", "", ()) for index in range(settings.prompts_per_step)],
            {},
            key,
            step,
            settings,
            lambda line: None,
        )
        sampler = stats.sampler
        interrupted_share = stats.interrupted_tokens / max(1, sampler.slots)
        steps.append(SimulatedStep(stats.seconds, sampler.idle_slot_share, interrupted_share))
    return steps


@dataclass(frozen=True)
class _SimulatedDriver:
    """A `carry_over.Driver` whose trajectories take time and have empty contexts. Counts in microseconds."""

    seconds: Sequence[Sequence[float]]
    slots: int

    def run_while(
        self,
        jobs: Iterable[Job],
        params: Params,
        key: jax.Array,
        *,
        should_continue: Callable[[], bool],
        version: int,
    ) -> Generator[tuple[int, Rollout], None, RolloutStats]:
        queue = deque((job, job.paused.contexts) for job in jobs)
        running: list[tuple[float, int, Job, tuple[Context, ...]]] = []  # by the end of the context
        now, busy, interrupted, context = 0.0, 0.0, 0.0, Context((), (), (), version)
        while (running or queue) and should_continue():
            while queue and len(running) < self.slots:
                job, contexts = queue.popleft()
                end = now + self._plan(job)[len(contexts)]
                heapq.heappush(running, (end, job.number, job, contexts))
            end, number, job, contexts = heapq.heappop(running)
            contexts, plan = (*contexts, context), self._plan(job)
            busy += (end - now) * (len(running) + 1)
            now = end
            if len(contexts) == len(plan):
                yield number, FinishedWorkflow(Outcome(StopReason.ANSWERED), contexts)
            else:
                heapq.heappush(running, (now + plan[len(contexts)], number, job, contexts))
        for end, number, job, contexts in running:
            interrupted += self._plan(job)[len(contexts)] - (end - now)
            yield number, PausedWorkflow(contexts)
        sampler = SamplerStats(active_slots=round(busy * 1e6), slots=round(self.slots * now * 1e6))
        return RolloutStats(sampler, now, interrupted_tokens=round(interrupted * 1e6))

    def trajectory(self, problem: Problem, rollout: int, finished: FinishedWorkflow) -> Trajectory:
        return Trajectory(problem, rollout, finished.outcome, finished.contexts, "")

    def _plan(self, job: Job) -> Sequence[float]:
        step, index = map(int, job.problem.id.split("/"))
        rng = np.random.default_rng([0, step, index, job.rollout])
        return self.seconds[int(rng.integers(len(self.seconds)))]
