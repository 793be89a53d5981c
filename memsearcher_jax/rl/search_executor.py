"""Searches next to the sampler: batched, run in threads, abandoned when they take too long."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from memsearcher_jax.retrieval.search import Searcher
from memsearcher_jax.types import Search, SearchResult

OUTAGE_PAUSE = 1.0  # seconds before searches are repeated, unless a circuit breaker asks for more
Caller = TypeVar("Caller")
Results = tuple[SearchResult, ...]


@dataclass(frozen=True)
class _Pending(Generic[Caller]):
    caller: Caller
    request: Search
    since: float = field(default_factory=time.monotonic)
    failed_at: float = math.inf  # when it first failed alone, of time.monotonic


@dataclass(frozen=True)
class _Batch(Generic[Caller]):
    """One call of the searcher, in a thread of its own."""

    pending: tuple[_Pending[Caller], ...]
    future: futures.Future[list[Results]]
    began: float  # of time.monotonic


class SearchExecutor(Generic[Caller]):
    """Accepts requests at any time and returns their results with the caller that submitted each.

    `max_concurrency` batches run at a time; requests submitted meanwhile form the next. A batch that fails, or has no
    results after `timeout` seconds, is split: each of its requests runs again alone, all of them concurrently, so that
    a bad request spoils no other. A request that fails alone gets its error as its results. A call that never returns
    keeps its daemon thread, which does not keep the process alive.

    While the search service is down, a request that fails alone is queued again, until `max_outage` seconds after it
    was submitted. A request that fails again although one that began after its first failure was answered is itself to
    blame.
    """

    def __init__(self, searcher: Searcher | None, timeout: float, max_outage: float = 0.0, max_concurrency: int = 1):
        self.latencies = deque[float](maxlen=1_000_000)  # seconds from each request to its results, failures included
        self._searcher = searcher
        self._timeout, self._max_outage, self._max_concurrency = timeout, max_outage, max_concurrency
        self._queue: list[_Pending[Caller]] = []
        self._running: list[_Batch[Caller]] = []
        self._last_available = self._suspended_until = -math.inf  # of time.monotonic

    @property
    def running(self) -> int:
        """Requests that are being searched."""
        return sum(len(batch.pending) for batch in self._running)

    @property
    def pending(self) -> int:
        """Requests without results."""
        return len(self._queue) + self.running

    def submit(self, caller: Caller, request: Search) -> None:
        """Queues a request; `start` begins it."""
        self._queue.append(_Pending(caller, request))

    @property
    def _may_start(self) -> bool:
        return bool(self._queue) and len(self._running) < self._max_concurrency

    def start(self) -> None:
        """Begins the next batch, if few enough are running and no outage suspends it."""
        if self._may_start and time.monotonic() >= self._suspended_until:
            self._running.append(self._begin(tuple(self._queue)))
            self._queue = []

    def completed(self) -> Iterator[tuple[Caller, Results]]:
        """Requests that got results or were abandoned since the last call."""
        now = time.monotonic()
        for batch in list(self._running):
            if not batch.future.done() and now < batch.began + self._timeout:
                continue
            self._running.remove(batch)
            late = TimeoutError(f"no answer in {self._timeout:g} s")
            error = batch.future.exception() if batch.future.done() else late
            if error is not None and len(batch.pending) > 1:
                self._running += [self._begin((one,)) for one in batch.pending]
                continue
            if error is not None and self._is_outage(batch, error, now):
                self._queue += [replace(one, failed_at=min(one.failed_at, now)) for one in batch.pending]
                pause = max(OUTAGE_PAUSE, getattr(error, "retry_after", 0.0))
                self._suspended_until = max(self._suspended_until, now + pause)
                continue
            if error is None:
                self._last_available = max(self._last_available, batch.began)
            results = [_failed(one.request, error) for one in batch.pending] if error else batch.future.result()
            for one, result in zip(batch.pending, results, strict=True):
                self.latencies.append(now - one.since)
                yield one.caller, result

    def wait(self, timeout: float = math.inf) -> None:
        """Returns when a batch has finished, timed out or may begin again after an outage, or after `timeout` s."""
        now = time.monotonic()
        ends = [batch.began + self._timeout for batch in self._running] + [self._suspended_until] * self._may_start
        remaining = max(0.0, min([timeout, *(end - now for end in ends)]))
        if not self._running:
            time.sleep(remaining)
        futures.wait([batch.future for batch in self._running], remaining, futures.FIRST_COMPLETED)

    def _is_outage(self, batch: _Batch[Caller], error: BaseException, now: float) -> bool:
        """Whether the search service is down rather than this request bad, and may come back in time."""
        (one,) = batch.pending
        circuit_is_open = getattr(error, "retry_after", 0.0) > 0
        blameless = circuit_is_open or self._last_available <= one.failed_at
        return isinstance(error, ConnectionError | TimeoutError) and blameless and now - one.since < self._max_outage

    def _begin(self, pending: tuple[_Pending[Caller], ...]) -> _Batch[Caller]:
        future: futures.Future[list[Results]] = futures.Future()
        batch = _Batch(pending, future, time.monotonic())

        def search() -> None:
            try:
                future.set_result(_search(self._searcher, [one.request for one in pending]))
            except Exception as error:
                future.set_exception(error)

        # An executor's threads are joined when the process ends, so that one hanging search would keep it alive.
        threading.Thread(target=search, daemon=True).start()
        return batch


def search_all(searcher: Searcher | None, requests: Sequence[Search]) -> list[Results]:
    """All queries of all requests in one batched call, at the largest top_n asked for; each keeps its own top_n.

    A failed search is a result too: the workflow decides what becomes of its trajectory.
    """
    try:
        return _search(searcher, requests)
    except Exception as error:
        return [_failed(request, error) for request in requests]


def _search(searcher: Searcher | None, requests: Sequence[Search]) -> list[Results]:
    if searcher is None:
        raise RuntimeError("the workflow searches, and there is no index")
    queries = [query for request in requests for query in request.queries]
    passages = searcher.search([query.text for query in queries], max(query.top_n for query in queries))
    results = iter(
        [SearchResult(tuple(ranked[: query.top_n])) for query, ranked in zip(queries, passages, strict=True)]
    )
    return [tuple(next(results) for _ in request.queries) for request in requests]


def _failed(request: Search, error: BaseException) -> Results:
    return (SearchResult(error=f"{type(error).__name__}: {error}"),) * len(request.queries)
