"""The endpoint inside a rollout: OpenAI's chat completions on the loopback address, and the harnesses that ask it.

The API key of a request names its trajectory, and every request is a generation. One whose messages continue a reply
extends the context of that reply: its ids stay as they were sampled, and only the new messages are rendered. Any other
request opens a context. So a harness that compacts its history, edits its messages or asks from sub-agents has several
contexts, all of which carry the advantage of its trajectory.
"""

from __future__ import annotations

import asyncio
import json
import queue
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent import futures
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import uvicorn
from pydantic import BaseModel, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from memsearcher_jax.agent.harness import HarnessOutcome, outcome_of
from memsearcher_jax.chat_template import ChatMessage, ChatTemplate, ToolCall, parse_tool_calls
from memsearcher_jax.http import chat
from memsearcher_jax.http.client import async_client
from memsearcher_jax.http.listener import listen
from memsearcher_jax.python_files import described
from memsearcher_jax.rl.harness_programs import MODEL, HarnessClient, ProcessError, runner_of
from memsearcher_jax.rl.harness_sessions import OpenContext, Session
from memsearcher_jax.rl.rollout import Job
from memsearcher_jax.rl.tool_executor import Backend, respond
from memsearcher_jax.sampling.config import SamplingParams
from memsearcher_jax.sampling.scheduler import FinishedGeneration, Scheduler
from memsearcher_jax.tokenizer import ChatTokenizer
from memsearcher_jax.types import Completion, FinishReason, Query, Search, StopReason, Turn

KEPT_CONNECTION_SECONDS = 86_400  # without a request: a client may reuse a connection at the moment of its end
SWITCH_SECONDS = 2e-4
"""After which a thread of Python lets others run. By default a busy harness keeps the engine's thread waiting for 5 ms
each time that it has a call to dispatch."""
UNSUPPORTED = tuple(name for name in chat.UNSUPPORTED if name != "seed")


@dataclass(frozen=True)
class HarnessSettings:
    """How a harness runs, and what its requests may choose."""

    harness: str
    """FILE.py, or a command."""
    timeout: float = 600.0
    """Seconds after which a trajectory has failed."""
    max_tokens: int = 512
    """Of a reply, unless the request asks for less."""
    fixed_sampling: bool = True
    """In training: a request cannot choose another temperature."""


class HarnessRequest(chat.ChatRequest):
    """A chat completion as harnesses ask for it."""

    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    stop: str | list[str] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def stops(self) -> list[str]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in stops if text]

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools that the reply may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    def conversation(self) -> tuple[ChatMessage, ...]:
        """The messages; a developer's are the system's."""
        messages = []
        for message in self.messages:
            role = "system" if message.role == "developer" else message.role
            parts = tuple(part.text for part in message.content)
            calls = tuple(ToolCall(call.function.name, call.function.arguments) for call in message.tool_calls or [])
            messages.append(ChatMessage(role, parts, calls))
        return tuple(messages)


class SearchRequest(BaseModel):
    query: str
    top_n: int = Field(default=5, ge=1, le=100)


@dataclass(frozen=True)
class HarnessGeneration:
    """A request that waits for a slot, or for its tokens."""

    session: Session
    context: OpenContext  # with the ids that its reply follows
    max_tokens: int
    params: SamplingParams
    find_stop: Callable[[Sequence[int]], int | None]
    result: futures.Future[FinishedGeneration]


@dataclass(frozen=True)
class EndedHarness:
    """A harness that returned, or failed."""

    session: Session
    outcome: HarnessOutcome


Events = queue.SimpleQueue[HarnessGeneration | EndedHarness]
"""What the endpoint sends to the driver."""


class Endpoint:
    """The HTTP service of one rollout, and the harnesses that ask it; each has a thread with an event loop."""

    def __init__(
        self,
        settings: HarnessSettings,
        tokenizer: ChatTokenizer,
        scheduler: Scheduler,
        params: SamplingParams,
        backends: Mapping[str, Backend],
        events: Events,
    ):
        self._settings = settings
        self._tokenizer = tokenizer
        self._scheduler = scheduler  # read only: the engine's thread changes it
        self._sampling = params
        self._backends = backends
        self._events = events
        self._template = ChatTemplate(tokenizer)
        self._sessions: dict[str, Session] = {}  # by key
        self._run = runner_of(settings.harness)
        self._harnesses = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    def __enter__(self) -> Endpoint:
        listener = listen("127.0.0.1", 0)
        self.base_url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        app = self._app()
        self.http_client = async_client(self.base_url, {}, app=app)
        quiet = {"log_level": "critical", "access_log": False, "date_header": False, "server_header": False}
        config = uvicorn.Config(app, lifespan="off", ws="none", timeout_keep_alive=KEPT_CONNECTION_SECONDS, **quiet)
        self._server = uvicorn.Server(config)
        self._server_thread = threading.Thread(target=self._serve, args=(listener,), daemon=True)
        self._server_thread.start()
        self._harness_thread = threading.Thread(target=self._harnesses.run_forever, daemon=True)
        self._harness_thread.start()
        self._switch_seconds = sys.getswitchinterval()
        sys.setswitchinterval(min(SWITCH_SECONDS, self._switch_seconds))
        return self

    def __exit__(self, *_: Any) -> None:
        sys.setswitchinterval(self._switch_seconds)
        for session in self._sessions.values():
            session.is_ended = True
        self._harnesses.call_soon_threadsafe(lambda: [task.cancel() for task in self._tasks])
        deadline = time.monotonic() + 5.0
        while self._tasks and time.monotonic() < deadline:
            time.sleep(0.01)
        asyncio.run_coroutine_threadsafe(self._close_harnesses(), self._harnesses)
        self._server.should_exit = True
        self._server.force_exit = True
        self._server_thread.join(timeout=5.0)

    def _serve(self, listener: socket.socket) -> None:
        asyncio.run(self._server.serve([listener]))

    async def _close_harnesses(self) -> None:
        await self.http_client.aclose()
        self._harnesses.stop()

    def begin(self, job: Job) -> None:
        """Starts the harness on the problem of a job."""
        session = Session(job)
        self._sessions[session.key] = session
        self._harnesses.call_soon_threadsafe(self._start, session)

    def _start(self, session: Session) -> None:
        task = self._harnesses.create_task(self._play(session))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _play(self, session: Session) -> None:
        """Runs the harness to its end, and reports its outcome."""
        client = HarnessClient(self.base_url, session.key, self.http_client)
        limit = self._settings.timeout
        answer: str | None = None
        reward: float | None = None
        error = ""
        try:
            answer, reward = await asyncio.wait_for(self._run(session.job.problem, client), limit)
        except TimeoutError:
            error = f"the harness did not return within {limit:g} s (agent.harness_timeout)"
        except asyncio.CancelledError:
            return  # the rollout ends
        except (Exception, SystemExit) as failure:
            error = str(failure) if isinstance(failure, ProcessError) else described(failure)
        session.is_ended = True
        if not error and not session.requests:
            error = "the harness returned without a request to the model"
        outcome = outcome_of(answer, reward, session.counts(), tuple(session.turns))
        if not session.is_finite:
            outcome = replace(outcome, stop=StopReason.NOT_FINITE, error="the policy's logits were not finite")
        elif error and session.context_full:  # the policy's doing, which the harness did not handle
            outcome = replace(outcome, stop=StopReason.CONTEXT_FULL, error=error)
        elif error:
            outcome = replace(outcome, stop=StopReason.FAULT, error=error)
        self._events.put(EndedHarness(session, outcome))

    def _app(self) -> Starlette:
        """The routes, without FastAPI: its handling of a request takes as long as a token of a small model."""
        routes = [
            Route("/v1/models", self._list_models),
            Route("/v1/models/{name}", self._show_model),
            Route("/v1/search", self._search, methods=["POST"]),
            Route("/v1/chat/completions", self._answer_chat, methods=["POST"]),
        ]
        return Starlette(routes=routes, exception_handlers={ValidationError: _invalid, HTTPException: _refused})

    async def _list_models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_about_model()]})

    async def _show_model(self, request: Request) -> Response:
        _check_model(request.path_params["name"])
        return JSONResponse(_about_model())

    async def _search(self, request: Request) -> Response:
        self._session(request)
        body = SearchRequest.model_validate_json(await request.body())
        wanted = Search((Query(body.query, body.top_n),))
        response: Any = await asyncio.to_thread(respond, self._backends, wanted)
        (result,) = response
        if result.error:
            raise HTTPException(502, result.error)
        return JSONResponse({"passages": [asdict(passage) for passage in result.passages]})

    async def _answer_chat(self, request: Request) -> Response:
        session = self._session(request)
        body = HarnessRequest.model_validate_json(await request.body())
        _check_model(body.model)
        reply = await self._complete(session, body)
        head = chat.head_of(MODEL)
        usage = chat.usage_body(reply.prompt_tokens, reply.completion_tokens)
        message = reply.message()
        if not body.stream:
            return JSONResponse(chat.completion_body(head, message, reply.finish_reason, usage))
        events = _stream(head, message, reply.finish_reason, usage if body.includes_usage else None)
        return StreamingResponse(events, media_type="text/event-stream")

    def _session(self, request: Request) -> Session:
        """The trajectory that the API key names."""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        session = self._sessions.get(key.strip()) if scheme.lower() == "bearer" else None
        if session is None:
            raise HTTPException(401, "the API key names no trajectory: use the one that the harness was given")
        if session.is_ended:
            raise HTTPException(410, "the trajectory has ended: the harness had returned before this request")
        return session

    def _params(self, body: HarnessRequest) -> SamplingParams:
        """How the request samples. Raises HTTPException where it asks for what is not supported."""
        unsupported = chat.unsupported_parameter(body.model_extra or {}, UNSUPPORTED)
        if unsupported:
            raise HTTPException(400, f"{unsupported}: the endpoint does not support it")
        params = self._sampling
        given = {"temperature": body.temperature, "top_p": body.top_p}
        changed = {name: value for name, value in given.items() if value not in (None, getattr(params, name))}
        if self._settings.fixed_sampling:
            if changed:
                name, value = next(iter(changed.items()))
                ours = getattr(params, name)
                raise HTTPException(400, f"{name} {value:g}: training samples with {ours:g}; leave it out")
            if body.seed is not None:
                raise HTTPException(400, "seed: training draws by the run's seed; leave it out")
        return replace(params, **changed)

    async def _complete(self, session: Session, body: HarnessRequest) -> _Reply:
        """Generates the reply to a request, in the context that it continues or in a new one."""
        params = self._params(body)
        messages = body.conversation()
        tools = body.offered_tools
        prefill = ""
        if body.continue_final_message:
            *rest, last = messages
            if last.role != "assistant":
                raise HTTPException(400, "continue_final_message: the last message must have the role assistant")
            messages = tuple(rest)
            prefill = last.text
        if not messages:
            raise HTTPException(400, "messages: there is none to reply to")
        with session.lock:
            context = self._extended(session, messages, tools, prefill)
        finished = await self._generate(session, context, body, params)
        return self._reply(session, context, body, messages, prefill, finished)

    def _extended(
        self,
        session: Session,
        messages: tuple[ChatMessage, ...],
        tools: list[dict[str, Any]],
        prefill: str,
    ) -> OpenContext:
        """The context that the messages continue, or a new one, with the ids that their reply follows.

        Raises HTTPException where they cannot be rendered or do not fit.
        """
        tools_json = json.dumps(tools, sort_keys=True)
        context = session.find(messages, tools_json)
        try:
            if context is None:
                ids = self._template.prompt_ids(messages, tools, prefill)
            else:
                new = len(messages) - len(context.messages)
                ended = context.ids[-1] in self._tokenizer.end_ids
                ids = self._template.continuation_ids(messages, tools, new, ended=ended, prefill=prefill)
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        length = len(ids) + (0 if context is None else len(context.ids))
        if not self._scheduler.fits(None, length):
            session.context_full = True
            limit = self._scheduler.settings.context_tokens
            reason = f"the messages have {length} tokens, and sampling.context_tokens is {limit}"
            raise HTTPException(400, f"context_length_exceeded: {reason}")
        if context is None:
            empty = np.zeros(0, np.float32)
            context = OpenContext(len(session.contexts), (), tools_json, empty.astype(np.int32), empty, empty > 0)
            session.contexts.append(context)
        context.can_be_extended = False
        context.ids = np.concatenate([context.ids, np.array(ids, np.int32)])
        context.logprobs = np.concatenate([context.logprobs, np.zeros(len(ids), np.float32)])
        context.sampled = np.concatenate([context.sampled, np.zeros(len(ids), bool)])
        session.requests += 1
        return context

    async def _generate(
        self, session: Session, context: OpenContext, body: HarnessRequest, params: SamplingParams
    ) -> FinishedGeneration:
        pattern = "|".join(map(re.escape, body.stops))
        stop_at = partial(self._tokenizer.find_stop, pattern) if pattern else None

        def find_stop(ids: Sequence[int]) -> int | None:
            if session.is_ended:
                return len(ids)
            return stop_at(ids) if stop_at else None

        max_tokens = min(body.token_limit or self._settings.max_tokens, self._settings.max_tokens)
        result: futures.Future[FinishedGeneration] = futures.Future()
        self._events.put(HarnessGeneration(session, context, max_tokens, params, find_stop, result))
        try:
            # A harness that is cancelled must not cancel the result, which the engine's thread will set.
            finished = await asyncio.shield(asyncio.wrap_future(result))
        except asyncio.CancelledError:
            if not result.cancelled():
                raise
            raise HTTPException(503, "the rollout ends") from None
        if not finished.finite:
            session.is_finite = False
            raise HTTPException(500, "the policy's logits are not finite")
        return finished

    def _reply(
        self,
        session: Session,
        context: OpenContext,
        body: HarnessRequest,
        messages: tuple[ChatMessage, ...],
        prefill: str,
        finished: FinishedGeneration,
    ) -> _Reply:
        completion = self._tokenizer.completion(finished.ids, found_stop=finished.found_stop)
        text = completion.text
        for stop in body.stops:
            text = text.partition(stop)[0]
        content = text
        calls: tuple[ToolCall, ...] = ()
        if body.offered_tools:
            content, calls = parse_tool_calls(text)
        given = ChatMessage("assistant", (prefill + content,) if prefill else (content,), calls)
        context.messages = (*messages, given)
        # What follows a reply that opened a turn of its own would follow that turn.
        context.can_be_extended = completion.finish is not FinishReason.FORGED_TURN
        session.turns.append(Turn("", text, observation=messages[-1].text))
        return _Reply(content, calls, completion, len(context.ids) - len(finished.ids), len(finished.ids))


@dataclass(frozen=True)
class _Reply:
    """A reply as the harness gets it."""

    content: str
    calls: tuple[ToolCall, ...]
    completion: Completion
    prompt_tokens: int
    completion_tokens: int

    @property
    def finish_reason(self) -> str:
        if self.calls:
            return "tool_calls"
        return "length" if self.completion.finish is FinishReason.LENGTH else "stop"

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": f"call-{secrets.token_hex(8)}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.calls
            ]
        return message


async def _stream(
    head: Mapping[str, Any], message: Mapping[str, Any], finish_reason: str, usage: Mapping[str, int] | None
) -> AsyncIterator[str]:
    """A reply as server-sent events. It is complete before the first: tool calls are parsed out of the whole text."""
    yield chat.chunk_event(head, {"role": "assistant", "content": message["content"]})
    for index, call in enumerate(message.get("tool_calls", ())):
        yield chat.chunk_event(head, {"tool_calls": [{"index": index, **call}]})
    yield chat.chunk_event(head, {}, finish_reason)
    if usage:
        yield chat.usage_event(head, usage)
    yield chat.STREAM_END


def _invalid(request: Request, error: Any) -> Response:
    """The answer to a body that is no request: the first field that is wrong."""
    first = error.errors(include_url=False)[0]
    field_name = ".".join(map(str, first["loc"]))
    return JSONResponse(chat.error_body(400, f"{field_name or 'body'}: {first['msg']}", field_name or None), 400)


def _refused(request: Request, error: Any) -> Response:
    return JSONResponse(chat.error_body(error.status_code, error.detail), error.status_code)


def _check_model(name: str) -> None:
    if name != MODEL:
        raise HTTPException(404, f"model: {name[:100]!r} is not served: use {MODEL!r}")


def _about_model() -> dict[str, Any]:
    return {"id": MODEL, "object": "model", "created": 0, "owned_by": "memsearcher_jax"}
