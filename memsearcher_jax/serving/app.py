"""The agent over HTTP: OpenAI's chat completions, MCP, and a page in the browser. docs/serve.md describes the fields.

GET  /                      the page                GET, HEAD  /health    no key needed, as for the page
POST /v1/chat/completions   streamed or whole       GET  /v1/models, /v1/models/NAME
POST /mcp                   the tools of serving/tools.py, as streamable HTTP
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import math
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from mcp.server.transport_security import TransportSecuritySettings
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.routing import Route

from memsearcher_jax.http.chat import (
    NEUTRAL_VALUES,
    STREAM_END,
    UNSUPPORTED,
    ChatRequest,
    chunk_event,
    completion_body,
    error_body,
    head_of,
    server_sent_event,
    unsupported_parameter,
    usage_body,
    usage_event,
)
from memsearcher_jax.http.server import BodyLimit, Overloaded, first_error
from memsearcher_jax.report.sources import sources_of
from memsearcher_jax.rl.rollout import Rollout
from memsearcher_jax.serving.agent import AgentService, Event, RequestParams, check_text
from memsearcher_jax.serving.tools import make_tools
from memsearcher_jax.types import StopReason

WEB = {"/": "agent.html", "/agent.js": "agent.js", "/agent.css": "agent.css"}
FOLDER = Path(__file__).with_name("web")
PAGE_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:"

LOOPBACK = ["127.0.0.1", "localhost", "[::1]"]

REFUSED_PARAMETERS = (*UNSUPPORTED, "continue_final_message", "stop", "tools")
NEUTRAL = NEUTRAL_VALUES | {"tool_choice": ("none", "auto")}


def request_params(body: ChatRequest) -> RequestParams:
    """How the request samples."""
    seed = secrets.randbits(32) if body.seed is None else body.seed
    return RequestParams(seed, body.temperature, body.top_p, body.token_limit)


def make_app(
    agent: AgentService, name: str, key: str = "", host: str = "127.0.0.1", cors_origins: Sequence[str] = ()
) -> FastAPI:
    """The service of `agent` under the model's `name`. With a `key`, requests must carry it as their bearer token.

    `host` is the address to listen on. On a loopback address requests for other host names are refused: they may come
    from a web page whose name was made to resolve to this machine. Web pages of `cors_origins`, such as
    https://host, or "*" for all, may use the service from a browser.
    """
    limits = agent.limits
    tools = make_tools(agent)
    # The SDK's own check knows no other origins; hosts and origins are checked by the middleware below.
    security = TransportSecuritySettings(enable_dns_rebinding_protection=False) if cors_origins else None
    tools_app = tools.streamable_http_app(
        stateless_http=True, host=host, max_request_body_size=limits.max_body_bytes, transport_security=security
    )

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with tools.session_manager.run():
            yield

    app = FastAPI(title=name, lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.router.routes.extend(tools_app.routes)
    app.add_middleware(RequireKey, key=key)
    app.add_middleware(BodyLimit, limits=limits, error=error_body)
    if cors_origins:
        options: Any = {"allow_origins": cors_origins, "allow_methods": ["GET", "POST"], "allow_headers": ["*"]}
        app.add_middleware(CORSMiddleware, **options)
    if host in (*LOOPBACK, "::1"):
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=LOOPBACK)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        """Reports the first error without repeating the body, which may not be valid text."""
        location, reason = first_error(error)
        return JSONResponse(error_body(400, f"{location or 'body'}: {reason}", location or None), 400)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse(error_body(error.status_code, error.detail), error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse(error_body(500, f"{type(error).__name__}; see the server's log"), 500)

    for path, file in WEB.items():
        response = FileResponse(FOLDER / file, headers={"Content-Security-Policy": PAGE_POLICY})
        app.router.routes.append(Route(path, response, methods=["GET"]))  # a response is an ASGI application

    about = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "memsearcher_jax"}
    about |= {"workflow": agent.run.config.agent.workflow, "reads_texts": agent.reader is not None}

    def require_served(model: str) -> None:
        if model != name:
            raise HTTPException(404, f"model: {model[:100]!r} is not served: use {name!r}")

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> JSONResponse:
        return JSONResponse({"status": "healthy", "model": name, "requests": agent.active, "limits": asdict(limits)})

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [about]})

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> JSONResponse:
        require_served(model)
        return JSONResponse(about)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        require_served(body.model)
        if unsupported := unsupported_parameter(body.model_extra or {}, REFUSED_PARAMETERS, NEUTRAL):
            raise HTTPException(400, f"{unsupported}: the agent does not support it")
        *earlier, last = body.messages
        try:
            if last.role != "user":
                raise ValueError("the last message must have the role user: it is the question")
            await agent.check_question(last.text)
            texts = [message.text for message in earlier if message.text.strip()]
            if agent.reader:
                check_text("\n".join(texts), "what the agent is to read, the messages before the question,")
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        ignored = 0 if agent.reader else len(earlier)
        answer = _ChatCompletion(agent, name, request_params(body), ignored)
        events = answer.events(texts, last.text)
        if not body.stream:
            return JSONResponse(await _unless_disconnected(request, answer.whole(events)))
        # Awaited here, so that an error before the first event has a status of its own.
        first = await _unless_disconnected(request, anext(events))
        return StreamingResponse(answer.streamed(first, events, body.includes_usage), media_type="text/event-stream")

    return app


async def _unless_disconnected(request: Request, work: Awaitable[Event]) -> Event:
    """The result of `work`. Raises HTTPException if the client disconnects first, which cancels it."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HTTPException(499)  # as in nginx's log; nobody reads the answer
        return task.result()
    finally:
        task.cancel()
        watch.cancel()


@dataclass
class _ChatCompletion:
    """One completion in OpenAI's format."""

    agent: AgentService
    model: str
    params: RequestParams
    ignored: int  # messages that the agent is not shown

    def __post_init__(self) -> None:
        self._head = head_of(self.model)

    async def events(self, texts: list[str], question: str) -> AsyncGenerator[Event]:
        """The events, the last of which has the type `end`. Raises HTTPException for what failed."""
        if self.agent.reader:
            events = self.agent.memorize(texts, None, self.params)
        else:
            events = self.agent.ask(question, self.params)
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    yield await self._end(event, question) if isinstance(event, Rollout) else event
        except Overloaded as error:
            raise HTTPException(503, f"overloaded: {error}; retry later", {"Retry-After": "1"}) from None
        except TimeoutError:
            raise HTTPException(504, f"no answer within {self.agent.limits.request_timeout:g} s") from None
        except (RuntimeError, ConnectionError) as error:
            raise HTTPException(500, str(error)) from None

    async def _end(self, finished: Rollout, question: str) -> Event:
        outcome = finished.outcome
        assert outcome is not None, "nothing pauses requests"
        tokens = sum(len(context.ids) for context in finished.contexts)
        sampled = sum(int(context.sampled.sum()) for context in finished.contexts)
        recalled = ""  # the answer from a memory, which is no part of the contexts
        reader = self.agent.reader
        if outcome.stop is StopReason.STREAM_READ and sampled >= (self.params.max_tokens or math.inf):
            outcome = replace(outcome, stop=StopReason.CUT_OFF)  # nothing is left for an answer
        if reader and outcome.stop is StopReason.STREAM_READ:
            completion = await self.agent.recall(question, reader.remembered(outcome))
            recalled = completion.text
            stop = StopReason.FAULT if completion.error else StopReason.ANSWERED
            outcome = replace(outcome, stop=stop, answer=recalled, error=completion.error)
        if outcome.stop.is_fault:
            status = 502 if outcome.stop is StopReason.SEARCH_FAILED else 500
            raise HTTPException(status, outcome.error)
        prompt_tokens = tokens - sampled
        completion_tokens = sampled + self.agent.run.tokenizer.count(recalled)
        usage = usage_body(prompt_tokens, completion_tokens)
        return {
            "type": "end",
            "answer": outcome.answer,
            "stop": outcome.stop.value,
            "reason": outcome.stop.description,
            "seed": self.params.seed,
            "ignored_messages": self.ignored,
            "sources": [asdict(passage) for passage in sources_of(outcome)[0]],
            "turns": [asdict(turn) for turn in outcome.turns],
            "usage": usage,
            "finish_reason": "length" if outcome.stop.is_limit else "stop",
        }

    async def whole(self, events: AsyncGenerator[Event]) -> Event:
        """The body of a response that is not streamed."""
        thoughts: list[str] = []
        event: Event = {}
        async with contextlib.aclosing(events):
            async for event in events:
                if event["type"] in ("reply", "rewrite"):
                    thoughts.append(event["text"])
        end = event
        del end["type"]
        usage = end.pop("usage")
        message = {
            "role": "assistant",
            "content": end.pop("answer"),
            "reasoning_content": "".join(thoughts),
            "memsearcher": end,
        }
        return completion_body(self._head, message, end.pop("finish_reason"), usage)

    async def streamed(self, first: Event, events: AsyncGenerator[Event], include_usage: bool) -> AsyncGenerator[str]:
        """Server-sent events. An error that comes later is one of them, as OpenAI's clients expect it."""
        yield chunk_event(self._head, {"role": "assistant", "content": ""})
        event = first
        number = 0
        async with contextlib.aclosing(events):
            try:
                while event["type"] != "end":
                    delta: Event = {}
                    if event["type"] in ("reply", "rewrite"):
                        delta["reasoning_content"] = event.pop("text")
                    # With indices, because OpenAI's clients join the deltas of a stream.
                    yield chunk_event(self._head, {"memsearcher": [{"index": number} | event]} | delta)
                    event = await anext(events)
                    number += 1
            except HTTPException as error:
                yield server_sent_event(error_body(error.status_code, error.detail))
                return
        usage = event.pop("usage")
        finish = event.pop("finish_reason")
        content = event.pop("answer")
        del event["turns"]  # sent before, as events of their own
        yield chunk_event(self._head, {"memsearcher": [{"index": number} | event], "content": content})
        yield chunk_event(self._head, {}, finish)
        if include_usage:
            yield usage_event(self._head, usage)
        yield STREAM_END


class RequireKey:
    """ASGI middleware: /v1 and /mcp need the key as their bearer token, unless it is empty."""

    def __init__(self, app: Callable, key: str):
        self.app = app
        self.key = key.encode()

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if self.key and scope["type"] == "http" and scope["path"].startswith(("/v1", "/mcp")):
            scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
            is_right = hmac.compare_digest(given.strip().encode("latin-1"), self.key)
            if scheme.lower() != "bearer" or not is_right:
                body = error_body(401, "the API key is missing or wrong: send it as Authorization: Bearer KEY")
                await JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
                return
        await self.app(scope, receive, send)
