"""Completions in contexts that are not trained: answers to questions about a memory, and verdicts of a judge.

A completion that fails carries an error, never an empty text: the caller decides what that is worth.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Protocol

import jax
from jax.sharding import Mesh

from memsearcher_jax.agent.base import Agent
from memsearcher_jax.agent.memalpha.workflow import generate_once
from memsearcher_jax.agent.prompts import chat_messages
from memsearcher_jax.config import RunConfig
from memsearcher_jax.http.client import JsonClient, RequestRejected, ServiceUnavailable
from memsearcher_jax.jsonl import parse_object
from memsearcher_jax.rl.config import CompleterConfig, read_key
from memsearcher_jax.rl.rollout import Job, Params, RolloutDriver
from memsearcher_jax.sampling.engine import Engine
from memsearcher_jax.tokenizer import ChatTokenizer
from memsearcher_jax.types import Completion, FinishReason, Outcome, Prompt, StopReason


class Completer(Protocol):
    def complete(self, prompts: Sequence[Prompt], key: jax.Array) -> list[Completion]:
        """One completion of each prompt, in order; `key` decides what is sampled, where anything is."""
        ...


@dataclass(frozen=True)
class EngineCompleter:
    """Frozen weights on an engine: each prompt is a workflow of one generation."""

    driver: RolloutDriver  # whose problems are prompts
    params: Params

    def complete(self, prompts: Sequence[Prompt], key: jax.Array) -> list[Completion]:
        """The draws of a prompt depend on the key and on its text alone: not on its host, nor on the prompts around."""
        jobs = [Job(prompt_seed(prompt), prompt, index) for index, prompt in enumerate(prompts)]
        try:
            trajectories, _ = self.driver.trajectories(jobs, self.params, key, lambda line: None)
        finally:
            self.driver.engine.release()  # the update has the memory of its cache
        return [completion_of(trajectory.outcome) for trajectory in trajectories]


@dataclass(frozen=True)
class OpenAICompleter(JsonClient):
    """A service with OpenAI's chat completions, which gets up to `max_concurrency` requests at a time."""

    setting: ClassVar[str] = "answerer.url or judge.url"

    body: Mapping[str, Any] = field(default_factory=dict)  # of every request, besides its messages
    max_concurrency: int = 16
    max_outage: float = 0.0  # seconds for which a request is repeated while the service is down
    check: Callable[[], None] = lambda: None  # called before every request; what it raises ends the call

    def complete(self, prompts: Sequence[Prompt], key: jax.Array) -> list[Completion]:
        with ThreadPoolExecutor(self.max_concurrency) as pool:
            return list(pool.map(self._complete, prompts))

    def _complete(self, prompt: Prompt) -> Completion:
        contents = zip(("system", "user"), chat_messages(prompt), strict=True)
        messages = [{"role": role, "content": content} for role, content in contents if content]
        deadline = time.monotonic() + self.max_outage
        while True:
            self.check()
            try:
                answer = self.request("POST", "/chat/completions", {"messages": messages, **self.body})
                if failed := answer.get("error"):  # OpenRouter's has status 200
                    code = failed.get("code") if isinstance(failed, dict) else None
                    self.check_status(code if isinstance(code, int) else 400, json.dumps(failed).encode())
                choice = answer["choices"][0]
                text = choice["message"]["content"]
                if isinstance(text, list):  # Mistral's models that think answer in parts
                    text = "".join(part["text"] for part in text if part["type"] == "text")
            except RequestRejected as error:
                return Completion(error=str(error))
            except (AttributeError, KeyError, IndexError, TypeError):
                return Completion(error=f"{self.url} did not return a chat completion")
            except ServiceUnavailable as error:
                if time.monotonic() >= deadline:
                    return Completion(error=str(error), lost=True)
                time.sleep(1.0)
                continue
            finish = choice.get("finish_reason")
            if not isinstance(text, str) or not text.strip():
                return Completion(error=f"{self.url} answered with an empty text ({finish})")
            return Completion(text, FinishReason.LENGTH if finish == "length" else FinishReason.STOP)


def open_completers(
    config: RunConfig,
    agent: Agent,
    tokenizer: ChatTokenizer,
    mesh: Mesh,
    initial_params: Callable[[], Params],
    check: Callable[[], None] = lambda: None,
) -> tuple[Completer | None, Completer | None]:
    """The answerer and the judge that the agent's rewards may ask. `check` interrupts them by raising.

    `initial_params` returns the frozen weights on `mesh`; it is called only if a completer runs on them, and once.
    Raises ValueError if a service's settings do not suffice.
    """
    settings = config.memalpha
    engine_completer = None
    if uses_initial_policy(config):
        # An engine of its own: its contexts are longer than the policy's, and it may be greedy.
        context_tokens = agent.completer_tokens(tokenizer, judge=config.judge.backend == "initial_policy")
        sampling = replace(config.sampling, context_tokens=context_tokens, temperature=settings.answer_temperature)
        engine = Engine(config.model, sampling, tokenizer.stop_ids, mesh)
        start = partial(generate_once, max_tokens=settings.answer_tokens)
        engine_completer = EngineCompleter(RolloutDriver(engine, tokenizer, start, check=check), initial_params())

    def open_completer(section: str, backend: CompleterConfig) -> Completer | None:
        if backend.backend == "openai":
            limits = {"max_tokens": settings.answer_tokens, "temperature": settings.answer_temperature}
            return open_openai_completer(backend, section=section, check=check, **limits)
        if backend.backend == "initial_policy":
            return engine_completer
        return None

    return open_completer("answerer", config.answerer), open_completer("judge", config.judge)


def uses_initial_policy(config: RunConfig) -> bool:
    """Whether the weights that the run started from answer or judge."""
    return "initial_policy" in (config.answerer.backend, config.judge.backend)


def open_openai_completer(
    config: CompleterConfig, section: str, max_tokens: int, temperature: float, check: Callable[[], None] = lambda: None
) -> OpenAICompleter:
    """The service that the settings name. Raises ValueError, in one line, if they do not suffice to reach it."""
    if not config.url or not config.model:
        raise ValueError(f"{section}.backend is openai: set {section}.url and {section}.model")
    headers = {}
    if config.api_key_env:
        headers["Authorization"] = f"Bearer {read_key(config.api_key_env, f'{section}.api_key_env')}"
    extra = parse_object(f"{section}.extra_body", (config.extra_body or "{}").encode())
    body = {"model": config.model, "max_tokens": max_tokens, "temperature": temperature, **extra}
    body = {name: value for name, value in body.items() if value is not None}
    limits = {"max_concurrency": config.max_concurrency, "max_outage": config.max_outage}
    return OpenAICompleter(config.url, config.timeout, headers=headers, body=body, check=check, **limits)


def completion_of(outcome: Outcome) -> Completion:
    """The generation of a workflow of one generation."""
    if outcome.stop is StopReason.ANSWERED:
        return Completion(outcome.answer, FinishReason.STOP)
    if outcome.stop is StopReason.CUT_OFF:
        return Completion(outcome.answer, FinishReason.LENGTH)
    return Completion(error=outcome.error or outcome.stop.value)


def prompt_seed(prompt: Prompt) -> int:
    """32 bits of a hash of the text. The lengths keep segments apart."""
    texts = [segment.text for segment in prompt.segments]
    lengths = ",".join(str(len(text)) for text in texts)
    digest = hashlib.sha256("".join((lengths, *texts)).encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:4])
