"""Searches and calls of tools next to the sampler: batched, run in threads, abandoned when they take too long."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass, field, replace
from typing import Any

from memsearcher_jax.agent.tool_functions import Tool
from memsearcher_jax.python_files import described
from memsearcher_jax.retrieval.search import Searcher
from memsearcher_jax.types import Call, Search, SearchResult, ToolResult, encodable

OUTAGE_PAUSE = 1.0  # seconds before requests are repeated
MAX_CHARACTERS = 1_000_000  # of a result of a tool: to encode more takes longer than many calls may
MAX_TOOL_THREADS = 16  # calls of one tool that run at a time, unless it takes batches
Results = tuple[SearchResult, ...]
Request = Search | Call
Response = Results | ToolResult


@dataclass(frozen=True)
class _Pending:
    caller: Any
    request: Request
    since: float = field(default_factory=time.monotonic)
    failed_at: float = math.inf  # when it first failed alone, of time.monotonic


@dataclass(frozen=True)
class _Batch:
    pending: tuple[_Pending, ...]
    future: futures.Future[Sequence[Response]]
    began: float  # of time.monotonic


@dataclass
class Backend:
    """What answers the requests of one kind, its limits, and, in a ToolExecutor, the requests of one rollout.

    A batch that fails, or has no results after `timeout` seconds, is split: each of its requests runs again alone. What
    fails alone gets its error as its response. While the backend is down, it is queued again, until `max_outage`
    seconds after it was submitted, unless a request that began after its first failure was answered.
    """

    answer: Callable[[Sequence[Any]], Sequence[Response]]  # called in a thread: one response for each request
    timeout: float  # seconds after which a call of it has failed
    max_outage: float = 0.0  # seconds for which requests are repeated while it is down, before they fail
    max_concurrency: int = 1  # calls of it that run at a time
    batches: bool = True  # whether one call answers all requests that wait
    outages: tuple[type[Exception], ...] = (ConnectionError, TimeoutError)  # errors that say that it is down
    waiting: list[_Pending] = field(default_factory=list, init=False)
    running: list[_Batch] = field(default_factory=list, init=False)
    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=1_000_000), init=False)
    last_available: float = field(default=-math.inf, init=False)  # of time.monotonic
    suspended_until: float = field(default=-math.inf, init=False)

    @property
    def may_start(self) -> bool:
        return bool(self.waiting) and len(self.running) < self.max_concurrency

    def start(self) -> None:
        while self.may_start and time.monotonic() >= self.suspended_until:
            count = len(self.waiting) if self.batches else 1
            self.running.append(self._begin(tuple(self.waiting[:count])))
            self.waiting = self.waiting[count:]

    def completed(self) -> Iterator[tuple[Any, Response]]:
        now = time.monotonic()
        for batch in list(self.running):
            if not batch.future.done() and now < batch.began + self.timeout:
                continue
            self.running.remove(batch)
            late = TimeoutError(f"no answer in {self.timeout:g} s")
            error = batch.future.exception() if batch.future.done() else late
            if error is not None and len(batch.pending) > 1:
                self.running += [self._begin((pending,)) for pending in batch.pending]
                continue
            if error is not None and self._is_outage(batch, error, now):
                (pending,) = batch.pending
                self.waiting.append(replace(pending, failed_at=min(pending.failed_at, now)))
                self.suspended_until = now + OUTAGE_PAUSE
                continue
            if error is None:
                self.last_available = max(self.last_available, batch.began)
                responses = batch.future.result()
            else:
                responses = [failed(pending.request, error) for pending in batch.pending]
            for pending, response in zip(batch.pending, responses, strict=True):
                self.latencies.append(now - pending.since)
                yield pending.caller, response

    def _is_outage(self, batch: _Batch, error: BaseException, now: float) -> bool:
        """Whether the backend is down rather than this request bad, and may come back in time."""
        (pending,) = batch.pending
        # Otherwise a request that began after the first failure was answered.
        nothing_answered = self.last_available <= pending.failed_at
        in_time = now - pending.since < self.max_outage
        return isinstance(error, self.outages) and nothing_answered and in_time

    def _begin(self, pending: tuple[_Pending, ...]) -> _Batch:
        future: futures.Future[Sequence[Response]] = futures.Future()
        batch = _Batch(pending, future, time.monotonic())

        def answer() -> None:
            try:
                responses = self.answer([waiting.request for waiting in pending])
                if len(responses) != len(pending):
                    raise ValueError(f"{len(responses)} results for {len(pending)} calls")
                future.set_result(responses)
            except BaseException as error:  # a command line that a tool calls may exit
                future.set_exception(error)

        # An executor's threads are joined when the process ends, so that one hanging call would keep it alive.
        threading.Thread(target=answer, daemon=True).start()
        return batch


class ToolExecutor:
    """Accepts requests at any time and returns their responses with the caller that submitted each."""

    def __init__(self, backends: Mapping[str, Backend]):
        """`backends`: of searches under "", of each tool under its name. Their requests are those of this executor."""
        self._backends = {name: replace(backend) for name, backend in backends.items()}
        self.latencies = self._backends[""].latencies  # seconds from each search to its results, failures included

    @property
    def running(self) -> int:
        """Requests that are being answered."""
        return sum(len(batch.pending) for backend in self._backends.values() for batch in backend.running)

    @property
    def pending(self) -> int:
        """Requests without a response."""
        return sum(len(backend.waiting) for backend in self._backends.values()) + self.running

    def submit(self, caller: Any, request: Request) -> None:
        """Queues a request; `start` begins it."""
        name = request.tool if isinstance(request, Call) else ""
        self._backends[name].waiting.append(_Pending(caller, request))

    def start(self) -> None:
        """Begins the next batches, where few enough are running and no outage suspends them."""
        for backend in self._backends.values():
            backend.start()

    def completed(self) -> Iterator[tuple[Any, Response]]:
        """Requests that got responses or were abandoned since the last call."""
        return itertools.chain.from_iterable(backend.completed() for backend in self._backends.values())

    def wait(self, timeout: float = math.inf) -> None:
        """Returns when a batch has finished, timed out or may begin again after an outage, or after `timeout` s."""
        now = time.monotonic()
        running: list[futures.Future[Any]] = []
        wake_at = now + timeout
        for backend in self._backends.values():
            for batch in backend.running:
                running.append(batch.future)
                wake_at = min(wake_at, batch.began + backend.timeout)
            if backend.may_start:
                wake_at = min(wake_at, backend.suspended_until)
        remaining = max(0.0, wake_at - now)
        if not running:
            time.sleep(remaining)
        futures.wait(running, remaining, futures.FIRST_COMPLETED)


def search_backend(
    searcher: Searcher | None, timeout: float = 60.0, max_outage: float = 0.0, max_concurrency: int = 1
) -> Backend:
    """Searches: all queries of all requests that wait are one call."""
    return Backend(lambda requests: _search(searcher, requests), timeout, max_outage, max_concurrency)


def tool_backend(
    tool: Tool, timeout: float = 30.0, max_outage: float = 0.0, clip: Callable[[str], str] = str
) -> Backend:
    """Calls of a tool, whose text `clip` bounds. Only a lost connection says that it is down."""

    def cut(text: str) -> str:
        return clip(encodable(text[:MAX_CHARACTERS]))

    def answer(requests: Sequence[Call]) -> list[ToolResult]:
        values = tool.answer([request.arguments for request in requests])
        results = []
        for request, value in zip(requests, values, strict=True):
            result = value
            if not isinstance(value, ToolResult):
                result = ToolResult(request.tool, request.arguments, str(value))
            results.append(replace(result, text=cut(result.text), error=cut(result.error)))
        return results

    concurrency = 1 if tool.batches else MAX_TOOL_THREADS
    return Backend(answer, timeout, max_outage, concurrency, tool.batches, outages=(ConnectionError,))


def respond(backends: Mapping[str, Backend], request: Request) -> Response:
    """The response to one request, without an executor: for a person at a keyboard, or a script."""
    try:
        return backends[request.tool if isinstance(request, Call) else ""].answer([request])[0]
    except (Exception, SystemExit) as error:
        return failed(request, error)


def _search(searcher: Searcher | None, requests: Sequence[Search]) -> list[Results]:
    """All queries in one batched call, at the largest top_n asked for; each keeps its own top_n."""
    if searcher is None:
        raise RuntimeError("the workflow searches, and there is no index")
    queries = [query for request in requests for query in request.queries]
    passages = searcher.search([query.text for query in queries], max(query.top_n for query in queries))
    results = [SearchResult(tuple(ranked[: query.top_n])) for query, ranked in zip(queries, passages, strict=True)]
    responses = []
    first = 0
    for request in requests:
        end = first + len(request.queries)
        responses.append(tuple(results[first:end]))
        first = end
    return responses


def failed(request: Request, error: BaseException) -> Response:
    """A failure is a response too: the workflow decides what becomes of its trajectory."""
    text = encodable(described(error))
    if isinstance(request, Call):
        return ToolResult(request.tool, request.arguments, error=text, lost=isinstance(error, ConnectionError))
    return (SearchResult(error=text),) * len(request.queries)
