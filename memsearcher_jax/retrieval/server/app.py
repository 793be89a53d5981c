"""The search service: one searcher behind the endpoints of existing clients.

POST /search        {"query", "top_n": 10, "return_score": false} -> [{"id", "contents"}]            MemSearcher, ReCall
POST /batch_search  {"query": [...], "top_n": 10, "return_score": false} -> [[{"id", "contents"}]]   MemSearcher, ReCall
                    with return_score: a pair of that and the scores in the same shape
POST /retrieve      {"queries": [...], "topk": 3, "return_scores": false} -> {"result": ...}         Search-R1
                    [[{"id", "contents"}]], or with scores [[{"document": {"id", "contents"}, "score"}]]
GET  /health        {"status": "healthy", ...}

Errors have a 4xx status and {"detail": reason in one line}; 503 means retry later.

Concurrent requests are searched in one call. A batch does not wait for more requests: the next batch collects while the
current one is searched. An idle service responds at once, and a busy one forms larger batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.datastructures import Headers

from memsearcher_jax.retrieval.config import ConnectionLimits, ServiceLimits
from memsearcher_jax.types import Passage

log = logging.getLogger(__name__)

BUSY = "too many requests are being received; retry later"
DRAINED_BODIES = 16  # times the allowed size, which are read from a client whose body is refused

# Defaults are those of the original servers, which also ignore unknown fields.
Count = Annotated[int, Field(ge=1, strict=True)]


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
    topk: Count | None = None  # Search-R1 sends null for its default
    return_scores: bool = False


def make_app(search_fn: SearchFn, limits: ServiceLimits, info: Mapping[str, Any]) -> FastAPI:
    """The service over `search_fn`; /health returns `info`."""
    batcher = MicroBatcher(search_fn, limits.max_batch_queries, limits.max_waiting_queries, limits.request_timeout)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker = asyncio.create_task(batcher.run())
        yield
        worker.cancel()  # the server has completed all requests by now
        with contextlib.suppress(asyncio.CancelledError):
            await worker

    app = FastAPI(title="search", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.exception_handler(RequestValidationError)(_invalid_body)
    app.add_middleware(BodyLimit, limits=limits)

    async def search(queries: Sequence[str], top_n: int) -> list[list[Passage]]:
        _check_limits(queries, top_n, limits)
        try:
            return await batcher.search(queries, top_n)
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
        return JSONResponse([_documents(passages), _scores(passages)] if body.return_score else _documents(passages))

    @app.post("/batch_search")
    async def search_batch(body: BatchSearchBody) -> JSONResponse:
        for number, query in enumerate(body.query):
            if not query.strip():
                raise HTTPException(400, f"query {number} is empty")
        results = await search(body.query, body.top_n)
        documents = [_documents(passages) for passages in results]
        return JSONResponse([documents, list(map(_scores, results))] if body.return_score else documents)

    @app.post("/retrieve")
    async def retrieve(body: RetrieveBody) -> JSONResponse:
        """Search-R1 sends the text of its policy: an empty query has no results and does not fail the others."""
        results = await search(body.queries, body.topk or 3)
        if not body.return_scores:
            return JSONResponse({"result": [_documents(passages) for passages in results]})
        return JSONResponse(
            {"result": [[{"document": _document(p), "score": p.score} for p in passages] for passages in results]}
        )

    @app.get("/health")
    async def health() -> JSONResponse:
        return JSONResponse({"status": "healthy", **info, "limits": vars(limits)})

    return app


def _check_limits(queries: Sequence[str], top_n: int, limits: ServiceLimits) -> None:
    """Raises HTTPException with the reason for a request beyond the limits."""
    if not queries:
        raise HTTPException(400, "there is no query")
    if len(queries) > (maximum := limits.max_queries_per_request):
        raise HTTPException(400, f"{len(queries)} queries in one request: at most {maximum} are allowed")
    if top_n > limits.max_top_n:
        raise HTTPException(400, f"{top_n} passages per query: at most {limits.max_top_n} are allowed")
    for number, query in enumerate(queries):
        if (length := len(query)) > (maximum := limits.max_query_chars):
            raise HTTPException(400, f"query {number} has {length} characters: at most {maximum} are allowed")
        try:
            query.encode()
        except UnicodeEncodeError as error:
            reason = f"query {number} is not valid Unicode (lone surrogate at {error.start})"
            raise HTTPException(400, reason) from error


def _document(passage: Passage) -> dict[str, str]:
    return {"id": passage.id, "contents": passage.contents}


def _documents(passages: Sequence[Passage]) -> list[dict[str, str]]:
    return list(map(_document, passages))


def _scores(passages: Sequence[Passage]) -> list[float]:
    return [passage.score for passage in passages]


async def _invalid_body(request: Request, error: RequestValidationError) -> JSONResponse:
    """Report the first error without repeating the body, which may not be valid text."""
    first = error.errors()[0]
    location, reason = ".".join(map(str, first["loc"][1:])), first["msg"]
    if first["type"] == "json_invalid":
        location = ""  # a position in the text
    elif not location:
        reason = "a JSON object is needed, with Content-Type: application/json"
    return JSONResponse({"detail": f"{location or 'body'}: {reason}"}, 422)


class BodyLimit:
    """ASGI middleware: rejects bodies that are too large (413), too slow (408), or too many at a time (503).

    A body whose Content-Length is too large is never stored.
    """

    def __init__(
        self,
        app: Callable,
        limits: ConnectionLimits,
        error: Callable[[int, str], Any] = lambda status, reason: {"detail": reason},
    ):
        self.app, self.limits, self.error, self.reserved = app, limits, error, 0  # bytes of all bodies

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, limits, loop = Headers(scope=scope), self.limits, asyncio.get_running_loop()
        length, too_large = headers.get("content-length", ""), f"the body is larger than {limits.max_body_bytes} bytes"
        received, reserved = 0, int(length) if length.isdecimal() else 0
        complete, deadline = False, loop.time() + limits.read_timeout

        async def read() -> dict:
            nonlocal received, complete
            try:
                async with asyncio.timeout_at(None if complete else deadline):
                    message = await receive()
            except TimeoutError:
                reason = f"the body did not arrive within {limits.read_timeout:g} s"
                raise HTTPException(408, reason, {"Connection": "close"}) from None
            received, complete = received + len(message.get("body", b"")), not message.get("more_body", False)
            return message

        async def drain() -> None:
            """A client that is still sending when the connection closes does not read the response."""
            while not complete and received < DRAINED_BODIES * limits.max_body_bytes:
                await read()

        async def limited() -> dict:
            nonlocal reserved
            message = await read()
            if received > reserved:  # the length was not declared
                self.reserved, reserved = self.reserved + received - reserved, received
            if received > limits.max_body_bytes:
                await drain()
                raise HTTPException(413, too_large, {"Connection": "close"})
            if self.reserved > limits.max_buffered_bytes:
                raise HTTPException(503, BUSY, {"Connection": "close", "Retry-After": "1"})
            return message

        async def refuse(status: int, reason: str) -> None:
            if headers.get("expect", "").lower() != "100-continue":  # such a client has not sent the body yet
                with contextlib.suppress(HTTPException):
                    await drain()
            response_headers = {"Connection": "close"} | ({"Retry-After": "1"} if status == 503 else {})
            await JSONResponse(self.error(status, reason), status, response_headers)(scope, receive, send)

        if reserved > limits.max_body_bytes:
            await refuse(413, too_large)
            return
        if self.reserved + reserved > limits.max_buffered_bytes:
            await refuse(503, BUSY)
            return
        self.reserved += reserved
        try:
            await self.app(scope, limited, send)
        finally:
            self.reserved -= reserved


SearchFn = Callable[[list[str], int], list[list[Passage]]]


class Overloaded(Exception):
    """More queries wait than can be searched in time."""


@dataclass(frozen=True, eq=False)
class _Request:
    queries: Sequence[str]
    top_n: int
    future: asyncio.Future[list[list[Passage]]]


@dataclass(eq=False)
class MicroBatcher:
    """Batches requests for `search_fn`, which runs in a separate thread. Use it from one event loop only."""

    search_fn: SearchFn
    max_batch_queries: int = 256  # a single request may have more
    max_waiting_queries: int = 8_192  # requests beyond this are rejected
    timeout: float = 30.0  # seconds until a request fails
    _waiting: deque[_Request] = field(default_factory=deque, init=False)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    async def search(self, queries: Sequence[str], top_n: int) -> list[list[Passage]]:
        """Return what `search_fn` returns for these queries, or raise its error. Raises Overloaded if the queue is full
        or the timeout expires."""
        waiting = sum(len(request.queries) for request in self._waiting)
        if waiting and waiting + len(queries) > self.max_waiting_queries:
            raise Overloaded(f"{waiting} queries are already waiting")
        request = _Request(queries, top_n, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self._arrived.set()
        try:
            async with asyncio.timeout(self.timeout):
                return await request.future
        except TimeoutError:
            raise Overloaded(f"no result within {self.timeout:g} s") from None

    async def run(self) -> None:
        """Process requests until cancelled."""
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, thread_name_prefix="search") as pool:
            while True:
                await self._arrived.wait()
                batch = self._next_batch()
                if not self._waiting:
                    self._arrived.clear()
                for request, result in await loop.run_in_executor(pool, self._search_batch, batch):
                    if request.future.done():  # it timed out during the search
                        continue
                    if isinstance(result, Exception):
                        request.future.set_exception(result)
                    else:
                        request.future.set_result(result)

    def _next_batch(self) -> list[_Request]:
        """Pop the oldest requests that fit into one batch and share a `top_n`. Requests that timed out are dropped."""
        batch: list[_Request] = []
        size = 0
        while self._waiting:
            request = self._waiting[0]
            if not request.future.done():
                if batch and (request.top_n != batch[0].top_n or size + len(request.queries) > self.max_batch_queries):
                    break
                batch.append(request)
                size += len(request.queries)
            self._waiting.popleft()
        return batch

    def _search_batch(self, batch: list[_Request]) -> list[tuple[_Request, list[list[Passage]] | Exception]]:
        if not batch:
            return []
        try:
            results = iter(self.search_fn([query for request in batch for query in request.queries], batch[0].top_n))
            return [(request, list(islice(results, len(request.queries)))) for request in batch]
        except Exception as error:
            if len(batch) == 1:
                return [(batch[0], error)]
            # One bad request must not fail the others.
            return [result for request in batch for result in self._search_batch([request])]
