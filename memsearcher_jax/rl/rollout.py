"""Serves workflows: every `Say` goes to a slot of the sampler, every `Find` to the host's search, side by side.

A trajectory keeps its slot until it ends; then the slot takes the next one that waits. Searches run in a thread while
the device decodes. Nobody waits for the slowest trajectory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax

from memsearcher_jax.agent.types import (
    Context,
    Find,
    Finish,
    Found,
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
from memsearcher_jax.rl.tokens import ChatTokenizer
from memsearcher_jax.sampling.engine import Engine


@dataclass(frozen=True)
class Job:
    """One rollout to run. `number` is unique in its batch and names the rollout's random draws."""

    number: int
    problem: Problem
    rollout: int


def jobs_for(problems: Sequence[Problem], rollouts: int) -> list[Job]:
    """G rollouts of each problem, numbered in order: the copies of a problem stand together."""
    return [
        Job(number=index * rollouts + copy, problem=problem, rollout=copy)
        for index, problem in enumerate(problems)
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


@dataclass(frozen=True)
class _Batch:
    """What is under way in one call of `RolloutDriver.run`."""

    waiting: deque[Job]
    runs: dict[int, _Run] = field(default_factory=dict)  # by slot
    searches: dict[Future, list[_Run]] = field(default_factory=dict)


@dataclass(frozen=True)
class RolloutDriver:
    """What all trajectories share."""

    engine: Engine
    tokenizer: ChatTokenizer
    searcher: Searcher
    make_workflow: Callable[[Problem], Workflow]

    def run(self, jobs: Sequence[Job], params, key: jax.Array) -> Iterator[tuple[Job, Trajectory]]:
        """Yields trajectories as they end, in no fixed order; what each holds depends on `params` and `key` alone.

        `params` are on the engine's mesh, in its compute type. A workflow that raises ends with Stop.FAULT and the
        others go on.
        """
        self.engine.start(params, key)
        batch = _Batch(deque(jobs))
        with ThreadPoolExecutor(max_workers=1) as pool:
            while batch.waiting or batch.runs:
                finds: list[tuple[_Run, Find]] = []
                for run, answer in self._answers(batch):
                    request = self._advance(run, answer)
                    if isinstance(request, Find):
                        finds.append((run, request))
                    elif isinstance(request, Outcome):
                        del batch.runs[run.slot]
                        yield run.job, self._trajectory(run, request)
                if finds:
                    future = pool.submit(search_all, self.searcher, [find for _, find in finds])
                    batch.searches[future] = [run for run, _ in finds]

    def _answers(self, batch: _Batch) -> Iterator[tuple[_Run, Any]]:
        """Who can go on, and with what. Lazy on purpose: those admitted first take part in the tick that follows."""
        for slot in self.engine.free:
            if slot not in batch.runs and batch.waiting:
                job = batch.waiting.popleft()
                batch.runs[slot] = _Run(job, self.make_workflow(job.problem), slot)
                yield batch.runs[slot], None
        if self.engine.speaking:
            for spoken in self.engine.tick():
                yield batch.runs[spoken.slot], self.tokenizer.reply(spoken.ids)
        elif batch.searches:
            next(iter(batch.searches)).result()
        for search in [search for search in batch.searches if search.done()]:
            yield from zip(batch.searches.pop(search), search.result(), strict=True)

    def _advance(self, run: _Run, answer: Any) -> Find | Outcome | None:
        """Lets the workflow go on until it searches, ends, or speaks (None)."""
        while True:
            try:
                request = run.workflow.send(answer)
            except StopIteration as end:
                return end.value
            except Exception as error:
                return Outcome(Stop.FAULT, error=f"{type(error).__name__}: {error}")
            if isinstance(request, Find):
                return request
            if self._say(run, request):
                return None
            answer = Reply("", Finish.NO_ROOM)

    def _say(self, run: _Run, say: Say) -> bool:
        """Hands the text to the run's slot; False if it does not fit the context."""
        fresh = isinstance(say.text, Prompt)
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
        transcript = self.tokenizer.transcript(run.contexts[-1].ids) if run.contexts else ""
        return Trajectory(run.job.problem, run.job.rollout, outcome, tuple(run.contexts), transcript)


def search_all(searcher: Searcher, finds: Sequence[Find]) -> list[tuple[Found, ...]]:
    """All queries of all `finds` in one batched call, at the largest top_n asked for; each gets its own share back.

    A failed search is an answer too: the workflow decides what becomes of its trajectory.
    """
    queries = [query for find in finds for query in find.queries]
    try:
        passages = searcher.search([query.text for query in queries], max(query.top_n for query in queries))
        found = [Found(tuple(ranked[: query.top_n])) for query, ranked in zip(queries, passages, strict=True)]
    except Exception as error:
        found = [Found(error=f"{type(error).__name__}: {error}")] * len(queries)
    answers = iter(found)
    return [tuple(next(answers) for _ in find.queries) for find in finds]
