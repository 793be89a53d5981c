"""Searches beside the sampler: gathered into batches, run in threads, given up when they take too long."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from memsearcher_jax.agent.types import Find, Found
from memsearcher_jax.retrieval.search import Searcher

Asker = TypeVar("Asker")
Answer = tuple[Found, ...]


@dataclass(frozen=True)
class _Request(Generic[Asker]):
    asker: Asker
    find: Find
    since: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class _UnderWay(Generic[Asker]):
    """One call of the searcher, in a thread of its own."""

    asked: tuple[_Request[Asker], ...]
    future: futures.Future[list[Answer]]
    deadline: float  # of time.monotonic


class SearchDesk(Generic[Asker]):
    """Takes requests at any time and hands the answers back to whoever asked.

    One batch runs at a time, and what is asked meanwhile makes the next. A batch that fails, or has no answer in
    `seconds`, is asked again, each request alone and all at once: so a bad request spoils no other. What fails then
    is answered with its error. A call that never returns keeps its thread, which does not keep the process.
    """

    def __init__(self, searcher: Searcher | None, seconds: float, waited: list[float] | None = None):
        """`waited` is added to: seconds from each question to its answer, failures included."""
        self._searcher = searcher
        self._seconds = seconds
        self._waited = [] if waited is None else waited
        self._waiting: list[_Request[Asker]] = []
        self._under_way: list[_UnderWay[Asker]] = []

    @property
    def asking(self) -> int:
        """How many wait for an answer."""
        return len(self._waiting) + sum(len(call.asked) for call in self._under_way)

    def ask(self, asker: Asker, find: Find) -> None:
        self._waiting.append(_Request(asker, find))

    def start(self) -> None:
        """Begins the next batch, if none is under way."""
        if self._waiting and not self._under_way:
            self._under_way.append(self._begin(tuple(self._waiting)))
            self._waiting = []

    def answers(self) -> Iterator[tuple[Asker, Answer]]:
        """What has been answered, or given up, since the last time."""
        now = time.monotonic()
        for call in list(self._under_way):
            if not call.future.done() and now < call.deadline:
                continue
            self._under_way.remove(call)
            error = call.future.exception() if call.future.done() else _late(self._seconds)
            if error is not None and len(call.asked) > 1:
                self._under_way += [self._begin((one,)) for one in call.asked]
                continue
            found = [_failed(one.find, error) for one in call.asked] if error else call.future.result()
            for one, answer in zip(call.asked, found, strict=True):
                self._waited.append(now - one.since)
                yield one.asker, answer

    def wait(self, most: float = math.inf) -> None:
        """Returns when `answers` has something to look at, or after so many seconds."""
        left = min([most, *(call.deadline - time.monotonic() for call in self._under_way)])
        futures.wait([call.future for call in self._under_way], max(0.0, left), futures.FIRST_COMPLETED)

    def _begin(self, asked: tuple[_Request[Asker], ...]) -> _UnderWay[Asker]:
        future: futures.Future[list[Answer]] = futures.Future()

        def work() -> None:
            try:
                future.set_result(_search(self._searcher, [one.find for one in asked]))
            except Exception as error:
                future.set_exception(error)

        # An executor's threads are joined when the process ends, so that one hanging search would keep it alive.
        threading.Thread(target=work, daemon=True).start()
        return _UnderWay(asked, future, time.monotonic() + self._seconds)


def search_all(searcher: Searcher, finds: Sequence[Find]) -> list[Answer]:
    """All queries of all `finds` in one batched call, at the largest top_n asked for; each gets its own share back.

    A failed search is an answer too: the workflow decides what becomes of its trajectory.
    """
    try:
        return _search(searcher, finds)
    except Exception as error:
        return [_failed(find, error) for find in finds]


def _search(searcher: Searcher, finds: Sequence[Find]) -> list[Answer]:
    queries = [query for find in finds for query in find.queries]
    passages = searcher.search([query.text for query in queries], max(query.top_n for query in queries))
    found = iter([Found(tuple(ranked[: query.top_n])) for query, ranked in zip(queries, passages, strict=True)])
    return [tuple(next(found) for _ in find.queries) for find in finds]


def _late(seconds: float) -> Exception:
    return TimeoutError(f"no answer in {seconds:g} s")


def _failed(find: Find, error: BaseException) -> Answer:
    return (Found(error=f"{type(error).__name__}: {error}"),) * len(find.queries)
