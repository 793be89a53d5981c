"""An agent that answers requests as they come: one thread drives the engine, and every request gets its events.

A request runs the same workflow, on the same engine and with the same draws, as a question of an evaluation whose
place among the questions is the request's seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from memsearcher_jax.agent import protocol
from memsearcher_jax.agent.base import ReadingAgent
from memsearcher_jax.agent.memagent import chunks_of
from memsearcher_jax.agent.run import starts_turn
from memsearcher_jax.data.documents import WORD_TOKENS
from memsearcher_jax.data.sentences import split_text
from memsearcher_jax.http.server import Overloaded
from memsearcher_jax.rl import setup, state
from memsearcher_jax.rl.completers import EngineCompleter
from memsearcher_jax.rl.evaluate import evaluation_key
from memsearcher_jax.rl.rollout import Job, Rollout
from memsearcher_jax.rl.setup import Run
from memsearcher_jax.serving.config import AgentLimits
from memsearcher_jax.types import (
    Call,
    Completion,
    FinishReason,
    Generate,
    Outcome,
    Overrides,
    Problem,
    Prompt,
    Search,
    StopReason,
    Workflow,
)

log = logging.getLogger(__name__)

Event = dict[str, Any]
"""What happens in a request, as JSON: see docs/serve.md."""


def check_text(text: str, what: str) -> None:
    """Raises ValueError for a text that no agent can take."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} is not valid Unicode (lone surrogate at {error.start})") from None
    if not text.strip():
        raise ValueError(f"{what} is empty")


@dataclass(frozen=True)
class RequestParams:
    """How a request samples; by default as an evaluation does, with the draws of its first question."""

    seed: int = 0  # below 2 ** 32
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None  # over all generations of the request


@dataclass(eq=False)
class _Request:
    workflow: Workflow
    params: RequestParams
    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[Event | Rollout | Exception] = field(default_factory=asyncio.Queue)
    tokens: int = 0  # generated so far
    cancelled: bool = False

    @property
    def tokens_left(self) -> float:
        return (self.params.max_tokens or math.inf) - self.tokens

    def notify(self, event: Event | Rollout | Exception) -> None:
        """Called in the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the server has stopped
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)


class AgentService:
    """The trained agent of a run. Use its coroutines from one event loop."""

    def __init__(self, run: Run, limits: AgentLimits, notify: Callable[[str], None] = lambda line: None) -> None:
        """Loads the weights and compiles all programs; `notify` receives lines on the progress."""
        self.run = run
        self.limits = limits
        self._requests: dict[int, _Request] = {}  # not yet finished
        self._queue = deque[Job]()
        self._changed = threading.Condition()
        self._closed = False
        self._recalls = 0  # questions that wait for an answer
        # Clients wait for answers: a service that is down is an error after seconds, not minutes as in training.
        rl = replace(run.config.rl, max_search_outage=5.0)
        config = replace(run.config, rl=rl, answerer=replace(run.config.answerer, max_outage=0.0))
        run = replace(run, config=config)
        notify("loading the weights")
        self._params = setup.publish(self.run, state.initial_params(self.run))
        driver = setup.make_driver(run, evaluation=True)
        self._driver = replace(driver, start=self._observed)
        self._start = driver.start
        self._key = evaluation_key(self.run)
        self._numbers = itertools.count()
        self._reward_fn = state.open_reward_fn(run, evaluation=True)
        self._answerer = ThreadPoolExecutor(1, thread_name_prefix="answers")
        notify("compiling the programs")
        self._driver.engine.warm_up(self._params)
        if isinstance(answerer := self._reward_fn.answerer, EngineCompleter):
            answerer.driver.engine.warm_up(answerer.params)
        threading.Thread(target=self._drive, name="engine", daemon=True).start()

    @property
    def reader(self) -> ReadingAgent | None:
        """The agent, if it reads texts into a memory; otherwise it is asked questions."""
        return self.run.agent if isinstance(self.run.agent, ReadingAgent) else None

    @property
    def active(self) -> int:
        """Number of unfinished requests that were not cancelled."""
        return sum(not request.cancelled for request in list(self._requests.values()))

    def close(self) -> None:
        """Ends the engine's thread after the requests that it has."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._answerer.shutdown(wait=False)

    def end_requests(self) -> None:
        """Ends the requests under way with an error."""
        for request in list(self._requests.values()):
            request.notify(Overloaded("the service stops"))

    async def check_question(self, question: str) -> None:
        """Raises ValueError for a question that the agent cannot take."""
        check_text(question, "the question")
        limit = self.run.config.agent.question_tokens
        tokens = await asyncio.to_thread(self.run.tokenizer.count, question)
        if tokens > limit:
            raise ValueError(f"the question has {tokens} tokens: at most {limit} are allowed")

    def ask(self, question: str, params: RequestParams) -> AsyncGenerator[Event | Rollout]:
        """The events of a search agent; the last item is what its workflow returned."""
        return self._events(self._start(Problem("asked", question, ())), params)

    async def memorize(
        self, texts: Sequence[str], memory: Any, params: RequestParams
    ) -> AsyncGenerator[Event | Rollout]:
        """The events of reading the texts, in chunks, into a memory, None for a new one.

        `reader.remembered` gives the memory that the workflow has written.
        """
        agent = self.reader
        assert agent is not None, "only readers memorize"
        tokenizer = self.run.tokenizer
        max_words = max(1, agent.chunk_tokens // WORD_TOKENS)

        def chunk() -> tuple[str, ...]:
            passages = []
            for text in texts:
                passages += [text[start:end] for start, end in split_text(text, max_words)]
            return tuple(chunks_of(passages, agent.chunk_tokens, tokenizer))

        chunks = await asyncio.to_thread(chunk)  # may take seconds
        problem = agent.text_problem(chunks, "none yet")
        workflow = agent.start(problem, tokenizer, memory)
        async for event in self._events(workflow, params):
            yield event

    async def recall(self, question: str, memory: Any) -> Completion:
        """Answers a question from a memory, with the completer of evaluations.

        Raises Overloaded or TimeoutError.
        """
        if self._recalls >= self.limits.max_requests:
            raise Overloaded(f"{self.limits.max_requests} questions wait for an answer")
        self._recalls += 1
        try:
            loop = asyncio.get_running_loop()
            work = loop.run_in_executor(self._answerer, self._reward_fn.answer, [(memory, question)], self._key)
            (completion,) = await asyncio.wait_for(work, self.limits.request_timeout)
            return completion
        finally:
            self._recalls -= 1

    async def _events(self, workflow: Workflow, params: RequestParams) -> AsyncGenerator[Event | Rollout]:
        """Runs a workflow. The consumer's end, or a timeout, cancels it and frees its slot after the engine's step.

        Raises Overloaded, TimeoutError, or RuntimeError if the engine fails.
        """
        if self.active >= self.limits.max_requests:
            raise Overloaded(f"{self.limits.max_requests} requests are being answered")
        loop = asyncio.get_running_loop()
        request = _Request(workflow, params, loop)
        number = next(self._numbers)
        deadline = loop.time() + self.limits.request_timeout
        with self._changed:
            self._requests[number] = request
            self._queue.append(Job(number, request))
            self._changed.notify()
        try:
            while True:
                event = await asyncio.wait_for(request.events.get(), deadline - loop.time())
                if isinstance(event, Exception):
                    raise event
                yield event
                if isinstance(event, Rollout):
                    return
        finally:
            request.cancelled = True

    def _drive(self) -> None:
        """The engine's thread: runs requests while there are any."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
            try:
                self._driver.run(self._queue, self._params, self._key, self._finish)
            except Exception as error:  # of the device: the workflows' own are outcomes
                log.exception("the engine failed; its requests are lost, and it starts again")
                with self._changed:
                    self._queue.clear()
                    lost = self._requests
                    self._requests = {}
                for request in lost.values():
                    request.notify(RuntimeError(f"the engine failed ({type(error).__name__})"))
                with contextlib.suppress(Exception):  # a broken device may refuse this, too
                    self._driver.engine.release()

    def _finish(self, job: Job, ended: Rollout) -> None:
        self._requests.pop(job.number).notify(ended)

    def _observed(self, request: _Request) -> Workflow:
        """The request's workflow; reports what it does, and ends when the request is cancelled."""
        response: Any = None
        turn = 0
        while not request.cancelled:
            try:
                step = request.workflow.send(response)
            except StopIteration as end:
                return end.value
            if isinstance(step, Search):
                request.notify({"type": "search", "turn": turn, "queries": [query.text for query in step.queries]})
                response = yield step
                request.notify({"type": "results", "turn": turn, "results": [asdict(result) for result in response]})
                continue
            if isinstance(step, Call):
                request.notify({"type": "call", "turn": turn, "tool": step.tool, "arguments": step.arguments})
                response = yield step
                request.notify({"type": "result", "turn": turn, "text": response.text, "error": response.error})
                continue
            if request.tokens_left <= 0:  # it may end with its turns, or be closed if it goes on
                if isinstance(response, Completion) and response.finish is FinishReason.LENGTH:
                    request.workflow.close()
                    return Outcome(StopReason.CUT_OFF)
                response = Completion("", FinishReason.LENGTH)
                continue
            is_turn = starts_turn(step)
            if is_turn:
                turn += 1
                memory = step.text["memory"] if isinstance(step.text, Prompt) else ""
                request.notify({"type": "turn", "turn": turn, "memory": memory})
            event = {"type": "reply" if is_turn else "rewrite", "turn": turn}
            response = yield from self._generated(request, step, event)
            if not is_turn:
                request.notify({"type": "memory", "turn": turn, "text": protocol.memory(response.text)})
        request.workflow.close()
        return Outcome(StopReason.FAULT, error="cancelled")

    def _generated(
        self, request: _Request, step: Generate, event: Event
    ) -> Generator[Generate, Completion, Completion]:
        """One generation with the request's draws; reports its text while it grows."""
        default = self._driver.sampling
        assert default is not None, "make_driver sets it"
        earlier_tokens = request.tokens
        sent_characters = 0

        def show(text: str) -> None:
            nonlocal sent_characters
            if len(text) > sent_characters:
                request.notify(event | {"text": text[sent_characters:]})
                sent_characters = len(text)

        def progress(ids: Sequence[int]) -> bool:
            request.tokens = earlier_tokens + len(ids)
            if ids:  # an incomplete character at the end is a replacement character
                show(self.run.tokenizer.completion(ids).text.rstrip("\ufffd"))
            return request.cancelled

        params = request.params
        temperature = default.temperature if params.temperature is None else params.temperature
        top_p = default.top_p if params.top_p is None else params.top_p
        max_tokens = int(min(step.max_tokens, request.tokens_left))
        overrides = Overrides(params.seed, temperature, top_p, progress)
        completion = yield replace(step, max_tokens=max_tokens, overrides=overrides)
        show(completion.text)
        return completion
