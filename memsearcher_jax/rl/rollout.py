"""Runs workflows on the engine: every `Generate` goes to a slot, every `Search` to the host's search, concurrently.

A workflow keeps its slot until it ends; then the slot takes the next one in the queue. Searches run in threads while
the device decodes, and no workflow waits for the slowest. A failure ends the workflow that caused it, with a stop
reason of its own. A workflow may also be paused where it opened its context, and go on from there later, with other
weights (`carry_over`): it is run again on the responses that it got until then.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import jax

from memsearcher_jax.retrieval.search import Searcher
from memsearcher_jax.rl.metrics import RolloutStats, device_memory
from memsearcher_jax.rl.search_executor import SearchExecutor
from memsearcher_jax.rl.tokenizer import ChatTokenizer
from memsearcher_jax.sampling.config import SamplingParams
from memsearcher_jax.sampling.context import FindStop
from memsearcher_jax.sampling.engine import Engine
from memsearcher_jax.sampling.scheduler import FinishedGeneration
from memsearcher_jax.types import (
    Completion,
    Context,
    FinishReason,
    Generate,
    Outcome,
    Problem,
    Prompt,
    Search,
    SearchResult,
    StopReason,
    Trajectory,
    Workflow,
)

MAX_PATIENCE = 1.0  # seconds without looking whether the run is to stop
Params = dict[str, Any]  # weights on the engine's mesh, in its compute type
Result = TypeVar("Result")
Response = Completion | tuple[SearchResult, ...]


@dataclass(frozen=True)
class FinishedWorkflow:
    """What a workflow returned, and the contexts that it opened."""

    outcome: Outcome
    contexts: tuple[Context, ...]
    responses: tuple[Response, ...] = ()  # to all of its requests, in order


@dataclass(frozen=True)
class PausedWorkflow:
    """A workflow that is about to open a context; without contexts, one that is to begin."""

    contexts: tuple[Context, ...] = ()
    responses: tuple[Response, ...] = ()


Rollout = FinishedWorkflow | PausedWorkflow


@dataclass(frozen=True)
class Job:
    """One rollout to make."""

    number: int  # seeds its draws; unique in a call, on all hosts
    problem: Problem
    rollout: int  # which of the problem's G copies
    paused: PausedWorkflow = PausedWorkflow()  # where it goes on


def make_jobs(problems: Sequence[Problem], group_size: int) -> list[Job]:
    """G rollouts of each problem, numbered in order: the copies of a problem are adjacent."""
    copies = ((problem, copy) for problem in problems for copy in range(group_size))
    return [Job(number, problem, copy) for number, (problem, copy) in enumerate(copies)]


def group_numbers(trajectories: int, group_size: int) -> list[int]:
    """The group of each trajectory of `make_jobs`, in order."""
    return [index // group_size for index in range(trajectories)]


@dataclass
class _Active:
    """A workflow that holds a slot."""

    number: int
    workflow: Workflow
    slot: int
    responses: list[Response] = field(default_factory=list)
    has_context: bool = False
    end_tokens: int = 0  # stop tokens at the end of the context: 0 or 1
    contexts: list[Context] = field(default_factory=list)  # those that are complete
    complete_responses: int = 0  # until the prompt of the open context


@dataclass(frozen=True)
class WorkflowExecutor:
    """The engine and the search that workflows share."""

    engine: Engine
    tokenizer: ChatTokenizer
    searcher: Searcher | None = None  # None if no workflow searches
    search_timeout: float = 60.0  # seconds after which a search has failed
    max_search_outage: float = 0.0  # seconds for which searches are repeated while none is answered
    concurrent_searches: int = 1  # batches of searches that run at a time
    check: Callable[[], None] = lambda: None  # called after every step of the engine; what it raises ends the run
    sampling: SamplingParams | None = None  # None: as the engine's settings say

    def run(
        self,
        workflows: Iterable[tuple[int, Workflow, PausedWorkflow]],
        params: Params,
        key: jax.Array,
        result: Callable[[int, Rollout], Result],
        *,
        should_continue: Callable[[], bool] = lambda: True,
        version: int = 0,
    ) -> Generator[Result, None, RolloutStats]:
        """Yields `result(number, ended workflow)` in the order in which they end, and returns the statistics.

        Each workflow comes with a number, which seeds its draws together with `key`: what it generates depends on
        `params`, `key` and its number alone. It begins where it was paused. `params` are on the engine's mesh, in its
        compute type. A workflow that raises ends with StopReason.FAULT, one whose logits are not finite with
        StopReason.NOT_FINITE; a failed search is a result. Every slot is free at the end, also when the caller stops
        early. `version` is recorded in the contexts. Workflows that another thread appends to `workflows`, where that
        is a deque, take part.

        When `should_continue()` returns False, the workflows under way are paused where they opened their current
        context, which is dropped. Workflows that are still in the queue yield no result.
        """
        began = time.monotonic()
        self.engine.start(params, key)
        limits = self.search_timeout, self.max_search_outage, self.concurrent_searches
        searches = SearchExecutor[_Active](self.searcher, *limits)
        queue = workflows if isinstance(workflows, deque) else deque(workflows)
        run = _Run(self, queue, searches, should_continue, version)
        try:
            for number, ended in run.ended():
                yield result(number, ended)
        finally:
            stats = self.engine.stop()
        memory = device_memory([device.memory_stats() for device in jax.local_devices()])
        interrupted_tokens = stats.generated_tokens - run.kept_tokens
        seconds = time.monotonic() - began
        return RolloutStats(stats, seconds, tuple(searches.latencies), memory, interrupted_tokens)


@dataclass
class _Run:
    """One call of `WorkflowExecutor.run`."""

    shared: WorkflowExecutor
    queue: deque[tuple[int, Workflow, PausedWorkflow]]
    searches: SearchExecutor[_Active]
    should_continue: Callable[[], bool]
    version: int
    active: dict[int, _Active] = field(default_factory=dict)  # by slot
    step_seconds: float = 0.0  # of the engine's last step
    kept_tokens: int = 0  # sampled, of complete contexts

    def ended(self) -> Iterator[tuple[int, Rollout]]:
        while (self.active or self.queue) and self.should_continue():
            self.shared.check()
            for active, answer in self._answers():
                request = self._advance(active, answer)
                if isinstance(request, Search):
                    self.searches.submit(active, request)
                elif isinstance(request, Outcome):
                    del self.active[active.slot]
                    yield active.number, self._finish(active, request)
        for active in self.active.values():
            responses = tuple(active.responses[: active.complete_responses])
            yield active.number, PausedWorkflow(tuple(active.contexts), responses)

    def _answers(self) -> Iterator[tuple[_Active, Any]]:
        """Workflows that can go on, with what they are sent. Lazy: those started first take part in the next step."""
        engine, searches = self.shared.engine, self.searches
        for slot in engine.free_slots:
            if slot not in self.active and self.queue:
                number, workflow, paused = self.queue.popleft()
                self.active[slot] = _Active(number, workflow, slot, contexts=list(paused.contexts))
                yield self.active[slot], paused
        searches.start()
        if searches.pending:
            searches.wait(self._search_patience())
            yield from searches.completed()
            searches.start()  # requests that these workflows submit next run during the step
        if engine.active:
            began = time.monotonic()
            generations = engine.step()
            self.step_seconds = time.monotonic() - began
            for generation in generations:
                yield self.active[generation.slot], generation

    def _search_patience(self) -> float:
        """Seconds to wait for searches before the next step, which workflows that still search miss.

        Waiting must cost the generating workflows no more than missing the step costs the searching ones. Searches
        that take longer than a step miss it anyway.
        """
        if not self.shared.engine.active:
            return MAX_PATIENCE
        if self.searches.latencies and self.searches.latencies[-1] > self.step_seconds:
            return 0.0
        return self.step_seconds * self.searches.running / len(self.active)

    def _advance(self, active: _Active, answer: Any) -> Search | Outcome | None:
        """Resumes the workflow until it searches, ends, or generates (None)."""
        if isinstance(answer, FinishedGeneration) and not answer.finite:
            with contextlib.suppress(Exception):  # a workflow may object to being closed; it is over all the same
                active.workflow.close()
            return Outcome(StopReason.NOT_FINITE, error="the policy's logits were not finite")
        try:
            if isinstance(answer, FinishedGeneration):
                active.end_tokens = int(answer.ids[-1] in self.shared.tokenizer.stop_ids)
                answer = self.shared.tokenizer.completion(answer.ids, found_stop=answer.found_stop)
            if isinstance(answer, PausedWorkflow):
                answer = _replay(active, answer.responses)
            while True:
                active.responses += [] if answer is None else [answer]
                request = active.workflow.send(answer)
                if isinstance(request, Search):
                    return request
                if self._generate(active, request):
                    return None
                answer = Completion("", FinishReason.CONTEXT_FULL)
        except StopIteration as end:
            # None would mean that it generates, and the run would wait for ever.
            return end.value or Outcome(StopReason.FAULT, error="the workflow returned no Outcome")
        except Exception as error:
            return Outcome(StopReason.FAULT, error=f"{type(error).__name__}: {error}")

    def _generate(self, active: _Active, request: Generate) -> bool:
        """Hands the text to the workflow's slot; False if it does not fit the context."""
        engine, tokenizer = self.shared.engine, self.shared.tokenizer
        find_stop = partial(tokenizer.find_stop, request.stop) if request.stop else None
        seed, sampling = active.number, self.shared.sampling
        if overrides := request.overrides:
            find_stop = partial(_find_stop, find_stop, overrides.progress)
            seed = overrides.seed
            sampling = replace(
                sampling or engine.settings.params, temperature=overrides.temperature, top_p=overrides.top_p
            )
        if isinstance(request.text, Prompt):
            prompt_ids = [id for segment in tokenizer.prompt(request.text) for id in segment]
            if not engine.fits(None, len(prompt_ids)):
                return False
            self._close_context(active)
            rng_stream = seed, len(active.contexts)
            engine.open_context(active.slot, prompt_ids, rng_stream, request.max_tokens, sampling, find_stop)
            active.has_context, active.complete_responses = True, len(active.responses)
            return True
        if not active.has_context:
            raise ValueError("a workflow must open a context with a Prompt before it adds text")
        ids = tokenizer.encode_spans(request.text)
        if not engine.fits(active.slot, len(ids)):
            return False
        drop = active.end_tokens if request.same_turn else 0
        engine.extend_context(active.slot, ids, request.max_tokens, find_stop, drop)
        return True

    def _close_context(self, active: _Active) -> None:
        if active.has_context:
            context = self.shared.engine.pop_context(active.slot)
            active.contexts.append(Context(context.ids, context.logprobs, context.sampled, self.version))
            self.kept_tokens += sum(context.sampled)
        active.has_context = False

    def _finish(self, active: _Active, outcome: Outcome) -> FinishedWorkflow:
        self._close_context(active)
        if outcome.stop is StopReason.NOT_FINITE:
            active.contexts.pop()  # a trainer's forward pass over it would not be finite either
        return FinishedWorkflow(outcome, tuple(active.contexts), tuple(active.responses))


def _find_stop(find_stop: FindStop | None, progress: Callable[[Sequence[int]], bool], ids: Sequence[int]) -> int | None:
    """As `find_stop`; `progress` sees the ids and may end the generation."""
    end = find_stop(ids) if find_stop else None
    return len(ids) if progress(ids[:end]) and end is None else end


def _replay(active: _Active, responses: Sequence[Response]) -> Response | None:
    """Sends the workflow all responses but the last, which it returns; None for a workflow that has not begun."""
    *earlier, last = (None, *responses)
    for response in earlier:
        active.workflow.send(response)
    active.responses += responses[:-1]
    return last


@dataclass(frozen=True)
class RolloutDriver:
    """Makes trajectories of problems."""

    executor: WorkflowExecutor
    make_workflow: Callable[[Problem], Workflow]

    def run(
        self, jobs: Sequence[Job], params: Params, key: jax.Array
    ) -> Generator[tuple[Job, Trajectory], None, RolloutStats]:
        """Yields trajectories as they end and returns the statistics; see `WorkflowExecutor.run`."""
        job_by_number = {job.number: job for job in jobs}

        def trajectory(number: int, ended: Rollout) -> tuple[Job, Trajectory]:
            assert isinstance(ended, FinishedWorkflow), "nothing pauses these workflows"
            job = job_by_number[number]
            return job, self.trajectory(job.problem, job.rollout, ended)

        workflows = ((job.number, self._workflow(job.problem), job.paused) for job in jobs)
        return (yield from self.executor.run(workflows, params, key, trajectory))

    def run_while(
        self,
        jobs: Iterable[Job],
        params: Params,
        key: jax.Array,
        *,
        should_continue: Callable[[], bool],
        version: int,
    ) -> Generator[tuple[int, Rollout], None, RolloutStats]:
        """Yields what became of each job that has begun or gone on, by its number; see `WorkflowExecutor.run`."""
        workflows = ((job.number, self._workflow(job.problem), job.paused) for job in jobs)
        return self.executor.run(
            workflows, params, key, lambda *ended: ended, should_continue=should_continue, version=version
        )

    def trajectory(self, problem: Problem, rollout: int, finished: FinishedWorkflow) -> Trajectory:
        """A finished workflow as one of the problem's rollouts."""
        last_ids = finished.contexts[-1].ids if finished.contexts else ()
        transcript = self.executor.tokenizer.transcript(last_ids)
        return Trajectory(problem, rollout, finished.outcome, finished.contexts, transcript)

    def outcome(self, problem: Problem, responses: Sequence[Response]) -> Outcome:
        """What the problem's workflow returns after these responses."""
        workflow = self._workflow(problem)
        try:
            for response in (None, *responses):
                workflow.send(response)
        except StopIteration as end:
            return end.value
        raise ValueError(f"the workflow of problem {problem.id!r} does not end with the responses of its checkpoint")

    def rollout(
        self, jobs: Sequence[Job], params: Params, key: jax.Array, notify: Callable[[str], None]
    ) -> tuple[list[Trajectory], RolloutStats]:
        """The trajectories of the jobs, in their order, and what it took to make them."""
        trajectories: dict[int, Trajectory] = {}
        finished = self.run(jobs, params, key)
        with contextlib.closing(finished):
            while True:
                try:
                    job, trajectory = next(finished)
                except StopIteration as end:
                    return [trajectories[job.number] for job in jobs], end.value
                trajectories[job.number] = trajectory
                notify(f"{len(trajectories)}/{len(jobs)} trajectories")

    def _workflow(self, problem: Problem) -> Workflow:
        """The problem's workflow, made when it is first resumed: one that cannot be made is a fault of its own."""
        return (yield from self.make_workflow(problem))
