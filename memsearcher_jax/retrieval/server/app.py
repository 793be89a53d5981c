"""The search service: one searcher behind the endpoints of existing clients.

POST /search        {"query", "top_n": 10, "return_score": false} -> [{"id", "contents"}]            MemSearcher, ReCall
POST /batch_search  {"query": [...], "top_n": 10, "return_score": false} -> [[{"id", "contents"}]]   MemSearcher, ReCall
                    with return_score: a pair of that and the scores in the same shape
POST /retrieve      {"queries": [...], "topk": 3, "return_scores": false} -> {"result": ...}         Search-R1
                    [[{"id", "contents"}]], or with scores [[{"document": {"id", "contents"}, "score"}]]
GET, HEAD  /health  {"status": "healthy", ...}, or "degraded" while the search is restarted after a failure

Errors have a 4xx status and {"detail": reason in one line}; 503 means retry later. What Search-R1 sends is the text of
its policy, and its client ends the training at an error: /retrieve answers requests without a query, for empty queries
and for 0 passages, as its server does, and reads the beginning of a long query.

Concurrent requests are searched in one call: the next batch collects while the current one is searched.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from memsearcher_jax.http.server import BodyLimit, Count, Overloaded, first_error
from memsearcher_jax.retrieval.config import MAX_TOP_N, ServiceLimits
from memsearcher_jax.retrieval.search_process import SearchProcess
from memsearcher_jax.retrieval.server.client import clean_query
from memsearcher_jax.types import Passage

log = logging.getLogger(__name__)

DEFAULT_TOPK = 3  # of /retrieve

SearchFn = Callable[[list[str], int], list[list[Passage]]]

# Defaults and types are those of the original servers, which also ignore unknown fields, and read "5" as a number.


class SearchBody(BaseModel):
    query: str
    top_n: Count = 10
    return_score: bool = False


class BatchSearchBody(BaseModel):
    query: list[str]
    top_n: Count = 10
    return_score: bool = False


class RetrieveBody(BaseModel):
    queries: list[str]
    topk: Annotated[int, Field(ge=0)] | None = None  # null or 0 for the default
    return_scores: bool = False


def make_app(
    search_fn: SearchFn, limits: ServiceLimits, info: Mapping[str, Any], process: SearchProcess | None = None
) -> FastAPI:
    """The service over `search_fn`; /health returns `info`. `process` is the one that searches, if another one does."""
    batcher = MicroBatcher(search_fn, limits)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        if process:  # the server has completed all requests by now, or given up
            process.close()

    app = FastAPI(title="search", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.batcher = batcher
    app.exception_handler(RequestValidationError)(_invalid_body)
    app.add_middleware(BodyLimit, limits=limits)

    async def search(queries: Sequence[str], top_n: int) -> list[list[Passage]]:
        if len(queries) > limits.max_waiting_queries:
            allowed = f"at most {limits.max_waiting_queries} are allowed"
            raise HTTPException(400, f"{len(queries)} queries in one request: {allowed}")
        if top_n > MAX_TOP_N:
            raise HTTPException(400, f"{top_n} passages per query: at most {MAX_TOP_N} are allowed")
        try:
            results = await batcher.search(list(map(clean_query, queries)), top_n)
            for passage in itertools.chain.from_iterable(results):
                if not math.isfinite(passage.score):
                    raise ValueError("a score is no number")  # JSON has no NaN
            return results
        except Overloaded as error:
            raise HTTPException(503, f"overloaded: {error}; retry later", {"Retry-After": "1"}) from error
        except Exception as error:
            log.exception("search failed")
            raise HTTPException(500, f"search failed ({type(error).__name__}); see the server's log") from error

    @app.post("/search")
    async def search_one(body: SearchBody) -> JSONResponse:
        if not body.query.strip():
            raise HTTPException(400, "the query is empty")
        (passages,) = await search([body.query], body.top_n)
        documents = list(map(_document, passages))
        scores = [passage.score for passage in passages]
        return JSONResponse([documents, scores] if body.return_score else documents)

    @app.post("/batch_search")
    async def search_batch(body: BatchSearchBody) -> JSONResponse:
        if not body.query:
            raise HTTPException(400, "there is no query")
        for number, query in enumerate(body.query):
            if not query.strip():
                raise HTTPException(400, f"query {number} is empty")
        results = await search(body.query, body.top_n)
        documents = [list(map(_document, passages)) for passages in results]
        scores = [[passage.score for passage in passages] for passages in results]
        return JSONResponse([documents, scores] if body.return_score else documents)

    @app.post("/retrieve")
    async def retrieve(body: RetrieveBody) -> JSONResponse:
        def hit(passage: Passage) -> dict[str, Any]:
            document = _document(passage)
            return {"document": document, "score": passage.score} if body.return_scores else document

        results = []
        if body.queries:
            results = await search(body.queries, body.topk or DEFAULT_TOPK)
        return JSONResponse({"result": [list(map(hit, passages)) for passages in results]})

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> JSONResponse:
        status = "healthy" if process is None or process.is_healthy else "degraded"
        return JSONResponse({"status": status, **info, "limits": vars(limits)})

    return app


def _document(passage: Passage) -> dict[str, str]:
    return {"id": passage.id, "contents": passage.contents}


async def _invalid_body(request: Request, error: RequestValidationError) -> JSONResponse:
    """Report the first error without repeating the body, which may not be valid text."""
    location, reason = first_error(error)
    return JSONResponse({"detail": f"{location or 'body'}: {reason}"}, 422)


class _Request(NamedTuple):
    queries: Sequence[str]
    top_n: int
    future: asyncio.Future[list[list[Passage]]]


@dataclass(eq=False)
class MicroBatcher:
    """Batches requests for `search_fn`, which runs in a separate thread. Use it from one event loop only."""

    search_fn: SearchFn
    limits: ServiceLimits  # a single request may have more queries than a batch
    _waiting: deque[_Request] = field(default_factory=deque, init=False)
    _worker: asyncio.Task[None] | None = field(default=None, init=False)

    async def search(self, queries: Sequence[str], top_n: int) -> list[list[Passage]]:
        """Return what `search_fn` returns for these queries, or raise its error.

        Raises Overloaded if the queue is full, the timeout expires, or the search does not answer.
        """
        waiting = sum(len(request.queries) for request in self._waiting)
        if waiting and waiting + len(queries) > self.limits.max_waiting_queries:
            raise Overloaded(f"{waiting} queries are already waiting")
        request = _Request(queries, top_n, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._run())
        timer = asyncio.timeout(self.limits.request_timeout)
        try:
            async with timer:
                return await request.future
        except (TimeoutError, ConnectionError) as error:
            reason = str(error)
            if timer.expired():
                reason = f"no result within {self.limits.request_timeout:g} s"
            raise Overloaded(reason) from None

    async def _run(self) -> None:
        while self._waiting:
            await self._search_batch(self._next_batch())

    def _next_batch(self) -> list[_Request]:
        """Pop the oldest requests that fit into one batch and share a `top_n`."""
        batch: list[_Request] = []
        size = 0
        while self._waiting:
            size += len(self._waiting[0].queries)
            if batch and (self._waiting[0].top_n != batch[0].top_n or size > self.limits.max_batch_queries):
                break
            batch.append(self._waiting.popleft())
        return batch

    async def _search_batch(self, batch: Sequence[_Request]) -> None:
        """Set the results of the requests, but of those that timed out."""
        batch = [request for request in batch if not request.future.done()]
        if not batch:
            return
        queries = [query for request in batch for query in request.queries]
        try:
            results = await asyncio.to_thread(self.search_fn, queries, batch[0].top_n)
            first = 0
            for request in batch:
                end = first + len(request.queries)
                if not request.future.done():
                    request.future.set_result(results[first:end])
                first = end
        except Exception as error:
            if len(batch) > 1 and not isinstance(error, ConnectionError):  # one bad request must not fail the others
                for request in batch:
                    await self._search_batch([request])
                return
            for request in batch:
                if not request.future.done():
                    request.future.set_exception(error)
