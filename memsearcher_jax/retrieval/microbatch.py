"""Requests that come at the same time are searched for together.

Nobody waits for company: while one batch is searched for, the next gathers by itself. An idle service answers at once
and a busy one makes larger batches.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

from memsearcher_jax.agent.types import Passage

Search = Callable[[list[str], int], list[list[Passage]]]


class Overloaded(Exception):
    """More waits than can be searched for in time."""


@dataclass(frozen=True, eq=False)
class _Request:
    queries: Sequence[str]
    top_n: int
    answer: asyncio.Future


@dataclass(eq=False)
class MicroBatcher:
    """Gathers requests for `search`, which runs in a thread of its own. All methods belong to one event loop."""

    search: Search
    batch_queries: int = 256  # a batch is full with so many; a single request may have more
    waiting_queries: int = 8_192  # beyond so many, requests are turned away
    timeout: float = 30.0  # seconds after which nobody is expected to wait for an answer
    _waiting: deque[_Request] = field(default_factory=deque, init=False)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    async def find(self, queries: Sequence[str], top_n: int) -> list[list[Passage]]:
        """What `search` gives for these queries alone, and what it raises. Raises Overloaded instead of queueing."""
        ahead = sum(len(request.queries) for request in self._waiting)
        if ahead and ahead + len(queries) > self.waiting_queries:
            raise Overloaded(f"{ahead} queries are waiting already")
        request = _Request(queries, top_n, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self._arrived.set()
        try:
            async with asyncio.timeout(self.timeout):
                return await request.answer
        except TimeoutError:
            raise Overloaded(f"no answer within {self.timeout:g} s") from None

    async def serve(self) -> None:
        """Answers requests until it is cancelled."""
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, thread_name_prefix="search") as pool:
            while True:
                await self._arrived.wait()
                batch = self._take()
                if not self._waiting:
                    self._arrived.clear()
                for request, answer in await loop.run_in_executor(pool, self._answers, batch):
                    if request.answer.done():  # given up while it was searched for
                        continue
                    if isinstance(answer, Exception):
                        request.answer.set_exception(answer)
                    else:
                        request.answer.set_result(answer)

    def _take(self) -> list[_Request]:
        """The oldest requests that fit one batch, all for the same number of passages. Who gave up is left out."""
        batch: list[_Request] = []
        size = 0
        while self._waiting:
            request = self._waiting[0]
            if not request.answer.done():
                if batch and (request.top_n != batch[0].top_n or size + len(request.queries) > self.batch_queries):
                    break
                batch.append(request)
                size += len(request.queries)
            self._waiting.popleft()
        return batch

    def _answers(self, batch: list[_Request]) -> list[tuple[_Request, list[list[Passage]] | Exception]]:
        if not batch:
            return []
        try:
            found = iter(self.search([query for request in batch for query in request.queries], batch[0].top_n))
            return [(request, list(islice(found, len(request.queries)))) for request in batch]
        except Exception as error:
            if len(batch) == 1:
                return [(batch[0], error)]
            # One request must not cost the others their answers.
            return [answer for request in batch for answer in self._answers([request])]
