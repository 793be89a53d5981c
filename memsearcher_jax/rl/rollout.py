"""Serves workflows: every `Say` goes to a slot of the sampler, every `Find` to the host's search, side by side.

A trajectory keeps its slot until it ends; then the slot takes the next one that waits. Searches run in a thread while
the device decodes. Nobody waits for the slowest trajectory. Whatever goes wrong with a trajectory ends that one, with
a reason of its own.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from memsearcher_jax.agent.types import (
    Context,
    Find,
    Finish,
    Outcome,
    Problem,
    Prompt,
    Reply,
    Say,
    Stop,
    Trajectory,
    Workflow,
)
from memsearcher_jax.retrieval.search import Searcher
from memsearcher_jax.rl.searches import SearchDesk
from memsearcher_jax.rl.tokens import ChatTokenizer
from memsearcher_jax.sampling.engine import Engine, Spoken
from memsearcher_jax.sampling.pool import Pool


@dataclass(frozen=True)
class Job:
    """One rollout to run. `number` is unique in its batch and names the rollout's random draws."""

    number: int
    problem: Problem
    rollout: int


def jobs_for(problems: Sequence[Problem], rollouts: int, *, first: int = 0) -> list[Job]:
    """G rollouts of each problem, numbered in order: the copies of a problem stand together.

    `first`: which one of all hosts' problems these begin with, so that no two hosts draw alike.
    """
    return [
        Job(number=index * rollouts + copy, problem=problem, rollout=copy)
        for index, problem in enumerate(problems, start=first)
        for copy in range(rollouts)
    ]


@dataclass
class _Run:
    """A trajectory under way, with the slot that is its own until it ends."""

    job: Job
    workflow: Workflow
    slot: int
    has_context: bool = False
    contexts: list[Context] = field(default_factory=list)


@dataclass
class _Batch:
    """What is under way in one call of `RolloutDriver.run`."""

    waiting: deque[Job]
    desk: SearchDesk[_Run]
    runs: dict[int, _Run] = field(default_factory=dict)  # by slot
    tick_seconds: float = 0.0  # of the last tick


@dataclass(frozen=True)
class RolloutDriver:
    """What all trajectories share."""

    engine: Engine | Pool
    tokenizer: ChatTokenizer
    searcher: Searcher | None  # None if no workflow searches
    make_workflow: Callable[[Problem], Workflow]
    search_seconds: float = 60.0  # a search that takes longer has failed
    waited: list[float] = field(default_factory=list, compare=False)  # for searches of the last run, in seconds
    check: Callable[[], None] = lambda: None  # called after every call of the device; what it raises ends the batch

    def run(self, jobs: Sequence[Job], params, key: jax.Array) -> Iterator[tuple[Job, Trajectory]]:
        """Yields trajectories as they end, in no fixed order; what each holds depends on `params` and `key` alone.

        `params` are on the engine's mesh, in its compute type. A workflow that raises ends with Stop.FAULT, one whose
        policy has logits that are not finite with Stop.NOT_FINITE; a search that fails or is late is an answer. The
        others go on, and every slot is free at the end, also when the caller stops early.
        """
        self.engine.start(params, key)
        self.waited.clear()
        batch = _Batch(deque(jobs), SearchDesk(self.searcher, self.search_seconds, self.waited))
        try:
            while batch.waiting or batch.runs:
                self.check()
                for run, answer in self._answers(batch):
                    request = self._advance(run, answer)
                    if isinstance(request, Find):
                        batch.desk.ask(run, request)
                    elif isinstance(request, Outcome):
                        del batch.runs[run.slot]
                        yield run.job, self._trajectory(run, request)
        finally:
            self.engine.release()

    def _answers(self, batch: _Batch) -> Iterator[tuple[_Run, Any]]:
        """Who can go on, and with what. Lazy on purpose: those admitted first take part in the tick that follows."""
        for slot in self.engine.free:
            if slot not in batch.runs and batch.waiting:
                job = batch.waiting.popleft()
                batch.runs[slot] = _Run(job, self._workflow(job.problem), slot)
                yield batch.runs[slot], None
        batch.desk.start()
        if batch.desk.asking:
            batch.desk.wait(self._patience(batch))
            yield from batch.desk.answers()
            batch.desk.start()  # what they ask next is searched during the tick
        if self.engine.speaking:
            began = time.monotonic()
            ended = self.engine.tick()
            batch.tick_seconds = time.monotonic() - began
            for spoken in ended:
                yield batch.runs[spoken.slot], spoken

    def _patience(self, batch: _Batch) -> float:
        """Seconds to wait for searches before the next tick, in which whoever still searches has no part.

        As long as those who speak lose no more by waiting than those who search would lose by missing the tick.
        """
        return batch.tick_seconds * batch.desk.asking / len(batch.runs) if self.engine.speaking else math.inf

    def _workflow(self, problem: Problem) -> Workflow:
        """The problem's workflow, made when it is first asked: one that can not be made is a fault of its own."""
        return (yield from self.make_workflow(problem))

    def _advance(self, run: _Run, answer: Any) -> Find | Outcome | None:
        """Lets the workflow go on until it searches, ends, or speaks (None)."""
        if isinstance(answer, Spoken) and not answer.sound:
            with contextlib.suppress(Exception):  # a workflow may object to being closed; it is over all the same
                run.workflow.close()
            return Outcome(Stop.NOT_FINITE, error="the policy's logits were not finite")
        try:
            if isinstance(answer, Spoken):
                answer = self.tokenizer.reply(answer.ids)
            while True:
                request = run.workflow.send(answer)
                if isinstance(request, Find):
                    return request
                if self._say(run, request):
                    return None
                answer = Reply("", Finish.NO_ROOM)
        except StopIteration as end:
            return end.value
        except Exception as error:
            return Outcome(Stop.FAULT, error=f"{type(error).__name__}: {error}")

    def _say(self, run: _Run, say: Say) -> bool:
        """Hands the text to the run's slot; False if it does not fit the context."""
        fresh = isinstance(say.text, Prompt)
        if not (fresh or run.has_context):
            raise ValueError("a workflow must open a context with a Prompt before it adds text")
        ids = self.tokenizer.prompt(say.text) if fresh else self.tokenizer.pieces(say.text)
        if not self.engine.fits(None if fresh else run.slot, len(ids)):
            return False
        if fresh:
            self._close_context(run)
            self.engine.begin(run.slot, ids, (run.job.number, len(run.contexts)), say.max_tokens)
            run.has_context = True
        else:
            self.engine.extend(run.slot, ids, say.max_tokens)
        return True

    def _close_context(self, run: _Run) -> None:
        if run.has_context:
            recorded = self.engine.take(run.slot)
            run.contexts.append(Context(recorded.ids, recorded.logprobs, recorded.sampled))
        run.has_context = False

    def _trajectory(self, run: _Run, outcome: Outcome) -> Trajectory:
        self._close_context(run)
        if outcome.stop is Stop.NOT_FINITE:
            run.contexts.pop()  # a trainer's forward pass over it would not be finite either
        transcript = self.tokenizer.transcript(run.contexts[-1].ids) if run.contexts else ""
        return Trajectory(run.job.problem, run.job.rollout, outcome, tuple(run.contexts), transcript)
