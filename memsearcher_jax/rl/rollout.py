"""Runs workflows on the engine: every `Generate` goes to a slot, `Search` and `Call` to the host's tools, concurrently.

A workflow keeps its slot until it ends; then the slot takes the next one in the queue. Tools run while the device
decodes, and no workflow waits for the slowest. A failure ends the workflow that caused it, with a stop reason of its
own. A workflow may also be paused where it opened its context, and go on from there later, with other weights
(`carry_over`): it is run again on the responses that it got until then.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from memsearcher_jax.agent.run import checked
from memsearcher_jax.python_files import described
from memsearcher_jax.rl.metrics import RolloutStats, device_memory
from memsearcher_jax.rl.tool_executor import Backend, ToolExecutor, search_backend
from memsearcher_jax.sampling.config import SamplingParams
from memsearcher_jax.sampling.context import FindStop
from memsearcher_jax.sampling.engine import Engine
from memsearcher_jax.sampling.scheduler import FinishedGeneration
from memsearcher_jax.tokenizer import ChatTokenizer
from memsearcher_jax.types import (
    Call,
    Completion,
    Context,
    FinishReason,
    Generate,
    GenerationKind,
    Outcome,
    Problem,
    Prompt,
    Search,
    SearchResult,
    StopReason,
    ToolResult,
    Trajectory,
    Workflow,
)

MAX_PATIENCE = 1.0  # seconds without looking whether the run is to stop
CALL_MARGIN = 0.01  # seconds before the devices need their next call
Params = dict[str, Any]  # weights on the engine's mesh, in its compute type
_Handle = Callable[["_Running", "Search | Call | Outcome | None"], None]
Response = Completion | tuple[SearchResult, ...] | ToolResult


@dataclass(frozen=True)
class Rollout:
    """A workflow that ended, or that is about to open a context; by default one that is to begin."""

    contexts: tuple[Context, ...] = ()  # that are complete
    responses: tuple[Response, ...] = ()  # to all of its requests until then, in order
    outcome: Outcome | None = None  # None: it goes on


@dataclass(frozen=True)
class Job:
    """One rollout to make."""

    number: int  # seeds its draws; unique in a call, on all hosts
    problem: Any  # what the driver's `start` takes
    rollout: int = 0  # which of the problem's G copies
    begun: Rollout = Rollout()  # where it goes on


def make_jobs(problems: Sequence[Problem], group_size: int, first: int = 0) -> list[Job]:
    """G rollouts of each problem, numbered in order from that of problem number `first` on."""
    return [
        Job((first + index) * group_size + copy, problem, copy)
        for index, problem in enumerate(problems)
        for copy in range(group_size)
    ]


@dataclass
class _SampledTokens:
    """What one generation added to a context."""

    kind: GenerationKind
    count: int


@dataclass
class _Running:
    """A workflow that holds a slot."""

    job: Job
    generator: Workflow
    slot: int
    version: int  # of the policy
    contexts: list[Context]  # those that are complete
    responses: list[Response] = field(default_factory=list)
    has_context: bool = False
    end_tokens: int = 0  # stop tokens at the end of the context: 0 or 1
    complete_responses: int = 0  # until the prompt of the open context
    kept_tokens: int = 0  # sampled in this run, of complete contexts
    kind: GenerationKind = "action"  # of the generation under way, or of the last one
    generations: list[_SampledTokens] = field(default_factory=list)  # of the open context


@dataclass(frozen=True)
class RolloutDriver:
    """Makes rollouts of problems on an engine."""

    engine: Engine
    tokenizer: ChatTokenizer
    start: Callable[[Any], Workflow]  # the workflow of a job's problem
    # What answers searches, under "", and calls, under the tool's name.
    backends: Mapping[str, Backend] = field(default_factory=lambda: {"": search_backend(None)})
    check: Callable[[], None] = lambda: None  # called after every step of the engine; what it raises ends the run
    sampling: SamplingParams | None = None  # None: as the engine's settings say
    records_memory: bool = False  # whether contexts say which of their tokens are those of memories

    def run(
        self,
        jobs: Iterable[Job],
        params: Params,
        key: jax.Array,
        on_end: Callable[[Job, Rollout], None],
        *,
        version: int = 0,
        should_continue: Callable[[], bool] = lambda: True,
    ) -> RolloutStats:
        """Runs the jobs, calls `on_end` with each in the order in which they end, and returns the statistics.

        What a workflow generates in float32 depends on `params` (on the engine's mesh, in its compute type), `key` and
        its number alone. A workflow that raises ends with StopReason.FAULT, one whose logits are not finite with
        StopReason.NOT_FINITE; a failed search is a result. Every slot is free at the end. `version` is recorded in the
        contexts. Jobs that another thread appends to `jobs`, where that is a deque, take part.

        When `should_continue()` returns False, the workflows under way are paused where they opened their current
        context, which is dropped. Jobs that have not begun then do not end.
        """
        began = time.monotonic()
        queue = jobs if isinstance(jobs, deque) else deque(jobs)
        running: dict[int, _Running] = {}  # by slot
        tools = ToolExecutor(self.backends)
        kept_tokens = 0
        step_seconds = 0.0

        def handle(workflow: _Running, request: Search | Call | Outcome | None) -> None:
            """Does what the workflow asks for; None: it generates."""
            nonlocal kept_tokens
            self.engine.keep_busy()
            if isinstance(request, Search | Call):
                tools.submit(workflow, request)
            elif isinstance(request, Outcome):
                del running[workflow.slot]
                finished = self._finish(workflow, request)
                kept_tokens += workflow.kept_tokens
                on_end(workflow.job, finished)

        self.engine.start(params, key)
        try:
            while (running or queue) and should_continue():
                self.check()
                for slot in self.engine.scheduler.free_slots:
                    if slot not in running and queue:
                        job = queue.popleft()
                        generator = self._workflow(job.problem)
                        running[slot] = _Running(job, generator, slot, version, list(job.begun.contexts))
                        handle(running[slot], self._begin(running[slot]))
                tools.start()
                if tools.pending:
                    patience = self._patience(tools, len(running), step_seconds)
                    self._await_tools(tools, patience, handle)
                    tools.start()  # requests that these workflows have submitted run during the step
                if self.engine.scheduler.active:
                    step_began = time.monotonic()
                    generations = self.engine.step()
                    step_seconds = time.monotonic() - step_began
                    for generation in generations:
                        workflow = running[generation.slot]
                        handle(workflow, self._generated(workflow, generation))
            for workflow in running.values():
                kept_tokens += workflow.kept_tokens
                responses = tuple(workflow.responses[: workflow.complete_responses])
                on_end(workflow.job, Rollout(tuple(workflow.contexts), responses))
        finally:
            stats = self.engine.stop()
        memory = device_memory([device.memory_stats() for device in jax.local_devices()])
        interrupted_tokens = stats.generated_tokens - kept_tokens
        return RolloutStats(stats, time.monotonic() - began, tuple(tools.latencies), memory, interrupted_tokens)

    def trajectories(
        self, jobs: Sequence[Job], params: Params, key: jax.Array, notify: Callable[[str], None], version: int = 0
    ) -> tuple[list[Trajectory], RolloutStats]:
        """The trajectories of the jobs, in their order, and what it took to make them."""
        finished: dict[tuple[int, int], Trajectory] = {}

        def on_end(job: Job, ended: Rollout) -> None:
            finished[job.number, job.rollout] = self.trajectory(job, ended)
            notify(f"{len(finished)}/{len(jobs)} trajectories")

        stats = self.run(jobs, params, key, on_end, version=version)
        return [finished[job.number, job.rollout] for job in jobs], stats

    def trajectory(self, job: Job, finished: Rollout) -> Trajectory:
        """A finished workflow as one of the problem's rollouts."""
        assert finished.outcome is not None, "only `should_continue` pauses workflows"
        last_ids = finished.contexts[-1].ids if finished.contexts else ()
        transcript = self.tokenizer.transcript(last_ids)
        results = tuple(response for response in finished.responses if isinstance(response, ToolResult))
        return Trajectory(job.problem, job.rollout, finished.outcome, finished.contexts, transcript, results)

    def outcome(self, problem: Problem, responses: Sequence[Response]) -> Outcome:
        """What the problem's workflow returns after these responses. Raises ValueError if it does not return."""
        workflow = self._workflow(problem)
        reason = "it asks for more"
        try:
            for response in (None, *responses):
                workflow.send(response)
        except StopIteration as end:
            return end.value
        except Exception as error:
            reason = described(error)
        raise ValueError(
            f"the workflow of problem {problem.id!r} does not return again what it returned: with the responses in the "
            f"checkpoint {reason}; a workflow must depend on its arguments and responses alone"
        )

    def _workflow(self, problem: Any) -> Workflow:
        return checked(self.start, problem, list(filter(None, self.backends)))

    def _await_tools(self, tools: ToolExecutor, patience: float, handle: _Handle) -> None:
        """Waits for tools, and resumes the workflows whose requests were answered."""
        deadline = time.monotonic() + patience
        while True:
            tools.wait(max(0.0, deadline - time.monotonic()))
            for workflow, response in tools.completed():
                handle(workflow, self._resume(workflow, response))
            # Devices that work meanwhile need no new call yet: the more workflows take part in it, the better.
            is_early = self.engine.seconds_left > CALL_MARGIN and time.monotonic() < deadline
            if not (self.engine.is_async and tools.pending and is_early):
                return

    def _patience(self, tools: ToolExecutor, running: int, step_seconds: float) -> float:
        """Seconds to wait for tools before the next step, which workflows that still wait for one miss.

        Waiting must cost the others no more than missing the step costs these; slow searches miss it anyway. It costs
        nothing while calls are in flight that the devices have not finished.
        """
        if not self.engine.scheduler.active:
            return MAX_PATIENCE
        if self.engine.is_async:
            return max(0.0, self.engine.seconds_left - CALL_MARGIN)
        if tools.latencies and tools.latencies[-1] > step_seconds:
            return 0.0
        return step_seconds * tools.running / running

    def _begin(self, workflow: _Running) -> Search | Call | Outcome | None:
        """Starts the workflow, or lets it go on after the responses that it got before it was paused.

        Returns what it asks for, as `_resume` does.
        """
        begun = workflow.job.begun.responses
        responses = (None, *begun)  # a generator starts with None
        try:
            for response in responses[:-1]:
                workflow.generator.send(response)
        except StopIteration as end:
            return end.value
        except Exception as error:
            return Outcome(StopReason.FAULT, error=described(error))
        workflow.responses += begun[:-1]
        return self._resume(workflow, responses[-1])

    def _generated(self, workflow: _Running, generation: FinishedGeneration) -> Search | Call | Outcome | None:
        """Resumes the workflow with a generation that has ended; returns what it asks for, as `_resume` does."""
        if not generation.finite:
            with contextlib.suppress(Exception):  # a workflow may object to being closed; it is over all the same
                workflow.generator.close()
            return Outcome(StopReason.NOT_FINITE, error="the policy's logits were not finite")
        ended_by_token = bool(generation.ids) and generation.ids[-1] in self.tokenizer.stop_ids
        workflow.end_tokens = int(ended_by_token)
        workflow.generations.append(_SampledTokens(workflow.kind, len(generation.ids)))
        completion = self.tokenizer.completion(generation.ids, found_stop=generation.found_stop)
        return self._resume(workflow, completion)

    def _resume(self, workflow: _Running, response: Response | None) -> Search | Call | Outcome | None:
        """Sends the workflow a response, None to begin, until it asks for a tool, ends, or generates (None)."""
        try:
            while True:
                if response is not None:
                    workflow.responses.append(response)
                request = workflow.generator.send(response)
                if not isinstance(request, Generate):
                    return request
                if self._generate(workflow, request):
                    return None
                response = Completion("", FinishReason.CONTEXT_FULL)
        except StopIteration as end:
            return end.value
        except Exception as error:
            return Outcome(StopReason.FAULT, error=described(error))

    def _generate(self, workflow: _Running, request: Generate) -> bool:
        """Hands the text to the workflow's slot; False if it does not fit the context."""
        find_stop = self._find_stop(request)
        if isinstance(request.text, Prompt):
            return self._open_context(workflow, request.text, request, find_stop)
        if not workflow.has_context:
            raise ValueError("a workflow must open a context with a Prompt before it adds text")
        scheduler = self.engine.scheduler
        ids = self.tokenizer.span_ids(request.text)
        if not scheduler.fits(workflow.slot, len(ids) + request.room - 1):
            return False
        drop = workflow.end_tokens if request.same_turn else 0
        if drop:
            workflow.generations[-1].count -= drop
        workflow.kind = request.kind
        scheduler.extend_context(workflow.slot, ids, request.max_tokens, find_stop, drop)
        return True

    def _open_context(self, workflow: _Running, prompt: Prompt, request: Generate, find_stop: FindStop | None) -> bool:
        """Replaces the context of the workflow by a new one; False, and changes nothing, if the prompt does not fit."""
        scheduler = self.engine.scheduler
        ids = self.tokenizer.span_ids(prompt.segments)
        if not scheduler.fits(None, len(ids) + request.room - 1):
            return False
        self._close_context(workflow)
        seed = workflow.job.number
        params = self.sampling
        if request.overrides:
            seed = request.overrides.seed
            params = replace(
                params or scheduler.settings.params,
                temperature=request.overrides.temperature,
                top_p=request.overrides.top_p,
            )
        rng_stream = (seed, len(workflow.contexts))
        scheduler.open_context(workflow.slot, ids, rng_stream, request.max_tokens, params, find_stop)
        workflow.has_context = True
        workflow.kind = request.kind
        workflow.generations = []
        workflow.complete_responses = len(workflow.responses)
        return True

    def _find_stop(self, request: Generate) -> FindStop | None:
        """Where the generation ends apart from the stop tokens."""
        find_stop = partial(self.tokenizer.find_stop, request.stop) if request.stop else None
        if request.overrides:
            return partial(_stop_or_progress, find_stop, request.overrides.progress)
        return find_stop

    def _close_context(self, workflow: _Running) -> None:
        if workflow.has_context:
            context = self.engine.scheduler.pop_context(workflow.slot)
            memory = np.zeros(0, bool)
            if self.records_memory:
                memory = _memory_mask(context.sampled, workflow.generations)
            recorded = Context(context.ids, context.logprobs, context.sampled, workflow.version, memory)
            workflow.contexts.append(recorded)
            workflow.kept_tokens += int(np.count_nonzero(context.sampled))
        workflow.has_context = False

    def _finish(self, workflow: _Running, outcome: Outcome) -> Rollout:
        self._close_context(workflow)
        if outcome.stop is StopReason.NOT_FINITE:
            workflow.contexts.pop()  # a trainer's forward pass over it would not be finite either
        return Rollout(tuple(workflow.contexts), tuple(workflow.responses), outcome)


def _memory_mask(sampled: np.ndarray, generations: Sequence[_SampledTokens]) -> np.ndarray:
    """True on the sampled tokens that generations of memories added; the generations are in their order."""
    memory = np.zeros(len(sampled), bool)
    positions = np.flatnonzero(sampled)
    first = 0
    for generation in generations:
        memory[positions[first : first + generation.count]] = generation.kind == "memory"
        first += generation.count
    return memory


def _stop_or_progress(
    find_stop: FindStop | None, progress: Callable[[Sequence[int]], bool], ids: Sequence[int]
) -> int | None:
    """As `find_stop`; `progress` sees the ids and may end the generation."""
    end = find_stop(ids) if find_stop else None
    is_ended = progress(ids[:end])
    return len(ids) if is_ended and end is None else end
