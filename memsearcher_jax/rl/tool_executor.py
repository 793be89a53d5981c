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

from memsearcher_jax.agent.tool_functions import OwnedCall, ServerDied, Tool, as_text
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
    is_alone: bool = False  # it shares no call with other requests, because a call that it was in has failed
    is_suspect: bool = False  # it ran while its server died, and runs again with nothing next to it


@dataclass(frozen=True, eq=False)
class _Batch:
    pending: tuple[_Pending, ...]
    future: futures.Future[Sequence[Response | BaseException]]
    began: float  # of time.monotonic

    @property
    def is_exclusive(self) -> bool:
        return self.pending[0].is_suspect


@dataclass
class Backend:
    """What answers the requests of one kind, its limits, and, in a ToolExecutor, the requests of one rollout.

    A batch of several requests that fails, or has no results after `timeout` seconds, is split where its requests may
    run twice (`repeats`): each runs again alone. Where they may not, all of them have failed, and are lost.

    While the backend is down, a request is queued again, until `max_outage` seconds after it was submitted. A request
    that fails like this although others are answered is itself the reason, and fails. The requests that ran when a
    server died are repeated with nothing next to them: the one during which it dies again is the reason, and fails.
    """

    answer: Callable[[Sequence[Any]], Sequence[Response | BaseException]]
    """Called in a thread. Returns the response to each request, or the error of one that failed alone."""
    timeout: float  # seconds after which a call of it has failed
    max_outage: float = 0.0  # seconds for which requests are repeated while it is down, before they fail
    max_concurrency: int = 1  # calls of it that run at a time; those that were abandoned do not count
    batches: bool = True  # whether one call answers all requests that wait
    repeats: bool = True  # whether a request of a batch that failed may run again
    outages: tuple[type[Exception], ...] = (ConnectionError, TimeoutError)  # errors that say that it is down
    waiting: deque[_Pending] = field(default_factory=deque, init=False)
    running: list[_Batch] = field(default_factory=list, init=False)
    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=1_000_000), init=False)
    last_available: float = field(default=-math.inf, init=False)  # of time.monotonic
    down_since: float = field(default=math.inf, init=False)  # since when nothing was answered; infinite: it is up
    last_error: BaseException | None = field(default=None, init=False)  # of the outage
    suspended_until: float = field(default=-math.inf, init=False)

    @property
    def may_start(self) -> bool:
        """Whether a request waits that may start, but for an outage."""
        if not self.waiting or any(batch.is_exclusive for batch in self.running):
            return False
        limit = 1 if self.waiting[0].is_suspect else self.max_concurrency
        return len(self.running) < limit

    def start(self) -> None:
        while self.may_start and time.monotonic() >= self.suspended_until:
            batch = [self.waiting.popleft()]
            while self.batches and not batch[0].is_alone and self.waiting and not self.waiting[0].is_alone:
                batch.append(self.waiting.popleft())
            self._begin(tuple(batch))

    def completed(self) -> Iterator[tuple[Any, Response]]:
        now = time.monotonic()
        for batch in list(self.running):
            is_late = now >= batch.began + self.timeout
            if not batch.future.done() and not is_late:
                continue
            self.running.remove(batch)
            if not batch.future.done():
                yield from self._failed(batch.pending, TimeoutError(f"no answer in {self.timeout:g} s"), now)
            elif error := batch.future.exception():
                yield from self._failed(batch.pending, error, now)
            else:
                for pending, response in zip(batch.pending, batch.future.result(), strict=True):
                    if isinstance(response, BaseException):
                        yield from self._failed((pending,), response, now)
                    else:
                        self._answered(batch)
                        yield self._respond(pending, response, now)
        if now >= self.gives_up_at:
            assert self.last_error is not None, "it came with the outage"
            for pending in list(self.waiting):
                if now >= self._gives_up_at(pending):
                    self.waiting.remove(pending)
                    yield self._respond(pending, failed(pending.request, self.last_error), now)

    @property
    def gives_up_at(self) -> float:
        """When the next request that waits for the end of an outage fails, of time.monotonic."""
        return min(map(self._gives_up_at, self.waiting), default=math.inf)

    def _gives_up_at(self, pending: _Pending) -> float:
        # With a limit of 0 a request fails by its own call only, and not by the failure of another one.
        if not self.max_outage:
            return math.inf
        return max(pending.since, self.down_since) + self.max_outage

    def _respond(self, pending: _Pending, response: Response, now: float) -> tuple[Any, Response]:
        self.latencies.append(now - pending.since)
        return pending.caller, response

    def _answered(self, batch: _Batch) -> None:
        self.last_available = max(self.last_available, batch.began)
        if batch.began > self.down_since:
            self.down_since = math.inf

    def _failed(self, requests: Sequence[_Pending], error: BaseException, now: float) -> Iterator[tuple[Any, Response]]:
        """The responses to the requests that failed together, unless they are queued again."""
        is_outage = isinstance(error, self.outages)
        if len(requests) > 1 and (is_outage or self.repeats):
            alone = [replace(pending, is_alone=True) for pending in requests]
            self.waiting.extendleft(reversed(alone))
        elif len(requests) > 1:
            for pending in requests:
                yield self._respond(pending, failed(pending.request, error, lost=True), now)
        elif not is_outage or self._is_to_blame(requests[0], error):
            yield self._respond(requests[0], failed(requests[0].request, error), now)
        else:
            yield from self._met_outage(requests[0], error, now)

    def _is_to_blame(self, pending: _Pending, error: BaseException) -> bool:
        """Whether the request is the reason for an error that says that the backend is down."""
        if pending.is_suspect and isinstance(error, ServerDied):
            return True
        is_up = math.isinf(self.down_since)
        # Then a request that began after this one had failed was answered, and this one fails again.
        return is_up and self.last_available > pending.failed_at

    def _met_outage(self, pending: _Pending, error: BaseException, now: float) -> Iterator[tuple[Any, Response]]:
        self.down_since = min(self.down_since, now)
        self.last_error = error
        if now - pending.since >= self.max_outage:
            yield self._respond(pending, failed(pending.request, error), now)
            return
        is_suspect = pending.is_suspect or isinstance(error, ServerDied)
        failed_at = min(pending.failed_at, now)
        self.waiting.append(replace(pending, failed_at=failed_at, is_alone=True, is_suspect=is_suspect))
        self.suspended_until = now + OUTAGE_PAUSE

    def _begin(self, pending: tuple[_Pending, ...]) -> None:
        future: futures.Future[Sequence[Response | BaseException]] = futures.Future()
        self.running.append(_Batch(pending, future, time.monotonic()))

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


class ToolExecutor:
    """Accepts requests at any time and returns their responses with the caller that submitted each."""

    def __init__(self, backends: Mapping[str, Backend]):
        """`backends`: of searches under "", of each tool under its name. Their requests are those of this executor.

        Tools of one server may share a backend.
        """
        own = {id(backend): replace(backend) for backend in backends.values()}
        self._by_name = {name: own[id(backend)] for name, backend in backends.items()}
        self._backends = list(own.values())
        self.latencies = self._by_name[""].latencies  # seconds from each search to its results, failures included

    @property
    def running(self) -> int:
        """Requests that are being answered."""
        return sum(len(batch.pending) for backend in self._backends for batch in backend.running)

    @property
    def pending(self) -> int:
        """Requests without a response."""
        return sum(len(backend.waiting) for backend in self._backends) + self.running

    def submit(self, caller: Any, request: Request) -> None:
        """Queues a request; `start` begins it."""
        name = request.tool if isinstance(request, Call) else ""
        self._by_name[name].waiting.append(_Pending(caller, request))

    def start(self) -> None:
        """Begins the next batches, where few enough are running and no outage suspends them."""
        for backend in self._backends:
            backend.start()

    def completed(self) -> Iterator[tuple[Any, Response]]:
        """Requests that got responses or were abandoned since the last call."""
        return itertools.chain.from_iterable(backend.completed() for backend in self._backends)

    def wait(self, timeout: float = math.inf) -> None:
        """Returns when a batch has finished or timed out, at a time that an outage sets, or after `timeout` s."""
        now = time.monotonic()
        running: list[futures.Future[Any]] = []
        wake_at = now + timeout
        for backend in self._backends:
            for batch in backend.running:
                running.append(batch.future)
                wake_at = min(wake_at, batch.began + backend.timeout)
            if backend.may_start:
                wake_at = min(wake_at, backend.suspended_until)
            wake_at = min(wake_at, backend.gives_up_at)
        remaining = max(0.0, wake_at - now)
        if not running:
            time.sleep(remaining)
        futures.wait(running, remaining, futures.FIRST_COMPLETED)


def search_backend(
    searcher: Searcher | None, timeout: float = 60.0, max_outage: float = 0.0, max_concurrency: int = 1
) -> Backend:
    """Searches: all queries of all requests that wait are one call; a search may run twice."""
    return Backend(lambda requests: _search(searcher, requests), timeout, max_outage, max_concurrency)


def tool_backends(
    tools: Sequence[Tool], timeout: float = 30.0, max_outage: float = 0.0, clip: Callable[[str], str] = str
) -> dict[str, Backend]:
    """What answers the calls of each tool, whose text `clip` bounds; tools of one server share it.

    Only a lost connection says that a tool is down. A call whose batch failed may have had an effect: it does not run
    again, unless the connection was lost.
    """

    def cut(text: str) -> str:
        return clip(encodable(text[:MAX_CHARACTERS]))

    by_name = {tool.name: tool for tool in tools}

    def answer(requests: Sequence[Call]) -> list[ToolResult | BaseException]:
        first = requests[0]
        tool = first.own if isinstance(first, OwnedCall) else by_name[first.tool]
        values = tool.answer([request.arguments for request in requests], timeout)
        results: list[ToolResult | BaseException] = []
        for request, value in zip(requests, values, strict=True):
            if isinstance(value, BaseException):
                results.append(value)
                continue
            result = value
            if not isinstance(value, ToolResult):
                result = ToolResult(request.tool, request.arguments, as_text(value))
            results.append(replace(result, text=cut(result.text), error=cut(result.error)))
        return results

    backends: dict[str, Backend] = {}
    of_server: dict[str, Backend] = {}
    for tool in tools:
        backend = of_server.get(tool.server)
        if backend is None:
            concurrency = 1 if tool.batches else MAX_TOOL_THREADS
            backend = Backend(
                answer, timeout, max_outage, concurrency, tool.batches, repeats=False, outages=(ConnectionError,)
            )
        backends[tool.name] = backend
        if tool.server:
            of_server[tool.server] = backend
    return backends


def respond(backends: Mapping[str, Backend], request: Request) -> Response:
    """The response to one request, without an executor: for a person at a keyboard, or a script."""
    backend = backends[request.tool if isinstance(request, Call) else ""]
    try:
        (response,) = backend.answer([request])
    except (Exception, SystemExit) as error:
        response = error
    return failed(request, response) if isinstance(response, BaseException) else response


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


def failed(request: Request, error: BaseException, lost: bool = False) -> Response:
    """A failure is a response too: the workflow decides what becomes of its trajectory.

    `lost`: the error says nothing about a call, as a lost connection does not.
    """
    text = encodable(described(error))
    if isinstance(request, Call):
        lost = lost or isinstance(error, ConnectionError)
        return ToolResult(request.tool, request.arguments, error=text, lost=lost)
    return (SearchResult(error=text),) * len(request.queries)
