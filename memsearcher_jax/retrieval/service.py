"""The search service: what existing clients send and expect, over one searcher.

POST /search        {"query", "top_n": 10, "return_score": false} -> [{"id", "contents"}]            MemSearcher, ReCall
POST /batch_search  {"query": [...], "top_n": 10, "return_score": false} -> [[{"id", "contents"}]]   likewise
                    with return_score: the pair of that and the scores in the same shape
POST /retrieve      {"queries": [...], "topk": 3, "return_scores": false} -> {"result": ...}         Search-R1
                    [[{"id", "contents"}]], or with scores [[{"document": {"id", "contents"}, "score"}]]
GET  /health        {"status": "healthy", ...}

What cannot be served is answered with a status of 4xx and {"detail": reason in one line}; 503 means come back later.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from memsearcher_jax.agent.types import Passage
from memsearcher_jax.retrieval.config import ServiceLimits
from memsearcher_jax.retrieval.microbatch import MicroBatcher, Overloaded, Search

log = logging.getLogger(__name__)


# What clients leave out has the value that the original servers give it; what they send beside is ignored, as there.
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
    topk: Count | None = None
    return_scores: bool = False


RETRIEVE_TOP_N = 3


def make_app(search: Search, limits: ServiceLimits, about: Mapping[str, Any]) -> FastAPI:
    """The service over `search`; `about` is told by /health."""
    batcher = MicroBatcher(search, limits.batch_queries, limits.waiting_queries, limits.seconds)

    @contextlib.asynccontextmanager
    async def serving(app: FastAPI) -> AsyncIterator[None]:
        worker = asyncio.create_task(batcher.serve())
        yield
        worker.cancel()  # the server has let every request under way end before
        with contextlib.suppress(asyncio.CancelledError):
            await worker

    app = FastAPI(title="search", lifespan=serving, docs_url=None, redoc_url=None)
    app.add_exception_handler(RequestValidationError, _refuse)
    app.add_middleware(BodyLimit, most_bytes=limits.body_bytes)

    async def find(queries: Sequence[str], top_n: int) -> list[list[Passage]]:
        _check(queries, top_n, limits)
        try:
            return await batcher.find(queries, top_n)
        except Overloaded as error:
            raise HTTPException(503, f"overloaded: {error}; come back later", {"Retry-After": "1"}) from error
        except Exception as error:
            log.exception("a search failed")
            raise HTTPException(
                500, f"the search failed ({type(error).__name__}); the server's log says why"
            ) from error

    @app.post("/search")
    async def search_one(body: SearchBody) -> JSONResponse:
        if not body.query.strip():
            raise HTTPException(400, "the query is empty")
        (found,) = await find([body.query], body.top_n)
        return JSONResponse([_documents(found), _scores(found)] if body.return_score else _documents(found))

    @app.post("/batch_search")
    async def search_batch(body: BatchSearchBody) -> JSONResponse:
        for number, query in enumerate(body.query):
            if not query.strip():
                raise HTTPException(400, f"query {number} is empty")
        found = await find(body.query, body.top_n)
        documents = [_documents(passages) for passages in found]
        return JSONResponse([documents, [_scores(passages) for passages in found]] if body.return_score else documents)

    @app.post("/retrieve")
    async def retrieve(body: RetrieveBody) -> JSONResponse:
        """Search-R1 sends what its policy wrote: an empty query finds nothing and does not cost the others theirs."""
        found = await find(body.queries, body.topk or RETRIEVE_TOP_N)
        if not body.return_scores:
            return JSONResponse({"result": [_documents(passages) for passages in found]})
        return JSONResponse({"result": [[_scored(passage) for passage in passages] for passages in found]})

    @app.get("/health")
    async def health() -> JSONResponse:
        return JSONResponse({"status": "healthy", **about, "limits": vars(limits)})

    return app


def _check(queries: Sequence[str], top_n: int, limits: ServiceLimits) -> None:
    """Raises HTTPException with the reason unless a request keeps the limits."""
    if not queries:
        raise HTTPException(400, "there is no query")
    if len(queries) > limits.queries:
        raise HTTPException(400, f"{len(queries)} queries in one request: at most {limits.queries} are allowed")
    if top_n > limits.top_n:
        raise HTTPException(400, f"{top_n} passages per query: at most {limits.top_n} are allowed")
    for number, query in enumerate(queries):
        if len(query) > limits.query_characters:
            characters = f"{len(query)} characters: at most {limits.query_characters} are allowed"
            raise HTTPException(400, f"query {number} has {characters}")
        try:
            query.encode()
        except UnicodeEncodeError as error:
            raise HTTPException(400, f"query {number} is no text (a lone surrogate at {error.start})") from error


def _documents(passages: Sequence[Passage]) -> list[dict[str, str]]:
    return [{"id": passage.id, "contents": passage.contents} for passage in passages]


def _scores(passages: Sequence[Passage]) -> list[float]:
    return [passage.score for passage in passages]


def _scored(passage: Passage) -> dict[str, Any]:
    return {"document": {"id": passage.id, "contents": passage.contents}, "score": passage.score}


async def _refuse(request: Request, error: RequestValidationError) -> JSONResponse:
    """The first thing that is wrong with a body, without repeating it: what came may not even be text."""
    first = error.errors()[0]
    place, reason = ".".join(map(str, first["loc"][1:])), first["msg"]
    if first["type"] == "json_invalid":
        place = ""  # it is a position in the text
    elif not place:
        reason = "a JSON object is needed, with Content-Type: application/json"
    return JSONResponse({"detail": f"{place or 'body'}: {reason}"}, 422)


class BodyLimit:
    """ASGI middleware: a body of more than `most_bytes` is refused with 413 and never whole in memory."""

    def __init__(self, app: Callable, most_bytes: int):
        self.app = app
        self.most_bytes = most_bytes

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        received = 0

        async def counted() -> dict:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received <= self.most_bytes:
                return message
            # A client that is still sending when the connection closes sees that, and not the reason.
            while message.get("more_body") and received < 16 * self.most_bytes:
                message = await receive()
                received += len(message.get("body", b""))
            raise HTTPException(413, f"the body is larger than {self.most_bytes} bytes", {"Connection": "close"})

        await self.app(scope, counted if scope["type"] == "http" else receive, send)
