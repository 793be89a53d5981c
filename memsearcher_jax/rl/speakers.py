"""Who speaks in contexts that are not trained: answers to questions about a memory, verdicts of a judge.

A reply that fails is an error of its own, never an empty text: whoever asked decides what that is worth.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import jax

from memsearcher_jax.agent.memalpha import say_once
from memsearcher_jax.agent.prompts import messages
from memsearcher_jax.agent.types import Problem, Prompt, Stop, Workflow
from memsearcher_jax.retrieval.breaker import CircuitBreaker
from memsearcher_jax.retrieval.cache import RecentlyUsed
from memsearcher_jax.retrieval.json_service import JsonService, Refused, Unavailable
from memsearcher_jax.rl.config import SpeakerConfig
from memsearcher_jax.rl.rollout import Job, RolloutDriver
from memsearcher_jax.rl.tokens import ChatTokenizer
from memsearcher_jax.sampling.engine import Engine
from memsearcher_jax.sampling.pool import Pool


@dataclass(frozen=True)
class Said:
    """One reply, or in one line why there is none."""

    text: str = ""
    error: str = ""


class Speaker(Protocol):
    def say(self, prompts: Sequence[Prompt], key: jax.Array) -> list[Said]:
        """One reply to each prompt, in order; `key` decides what is drawn, where anything is."""


@dataclass(frozen=True)
class SamplerSpeaker:
    """Frozen weights on a sampler: contexts of one reply through the driver that serves trajectories."""

    engine: Engine | Pool
    tokenizer: ChatTokenizer
    params: Any  # on the engine's mesh, in its compute type
    max_tokens: int

    def say(self, prompts: Sequence[Prompt], key: jax.Array) -> list[Said]:
        """Drawn with the key, or greedy, as the engine does."""
        jobs = [Job(number, Problem(str(number), "", ()), 0) for number in range(len(prompts))]

        def workflow(problem: Problem) -> Workflow:
            return say_once(prompts[int(problem.id)], self.max_tokens)

        driver = RolloutDriver(self.engine, self.tokenizer, None, workflow)
        replies = [Said()] * len(prompts)
        for job, trajectory in driver.run(jobs, self.params, key):
            outcome = trajectory.outcome
            answered = outcome.stop is Stop.ANSWERED
            replies[job.number] = Said(outcome.answer) if answered else Said(error=outcome.error or outcome.stop.value)
        return replies


@dataclass(frozen=True)
class Endpoint(JsonService):
    """A service that speaks OpenAI's chat completions."""

    setting: ClassVar[str] = "answerer.url or judge.url"

    def complete(self, body: dict[str, Any]) -> str:
        """The text of one reply. Raises Unavailable or Refused in one line; an empty reply is refused."""
        answer = self.ask("POST", "/chat/completions", body)
        try:
            text = answer["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError) as error:
            raise Refused(f"{self.url} answered with something else than a chat completion") from error
        if not isinstance(text, str) or not text.strip():
            raise Refused(f"{self.url} answered with an empty text")
        return text


@dataclass(frozen=True)
class EndpointSpeaker:
    """An endpoint, asked several things at once."""

    endpoint: Endpoint
    model: str
    max_tokens: int
    temperature: float
    at_once: int

    def say(self, prompts: Sequence[Prompt], key: jax.Array) -> list[Said]:
        """The service draws by itself: the key decides nothing here."""
        with ThreadPoolExecutor(self.at_once) as pool:
            return list(pool.map(self._say, prompts))

    def _say(self, prompt: Prompt) -> Said:
        system, user = messages(prompt)
        body = {
            "model": self.model,
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": user}],
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
        }
        try:
            return Said(self.endpoint.complete(body))
        except (Unavailable, Refused) as error:
            return Said(error=str(error))


@dataclass(frozen=True)
class RememberingSpeaker:
    """Says the same prompt once: rollouts that remember the same are asked the same. Failures are asked anew."""

    speaker: Speaker
    replies: RecentlyUsed[bytes, str] = field(compare=False)

    def say(self, prompts: Sequence[Prompt], key: jax.Array) -> list[Said]:
        """As the speaker behind it, which only hears what it has not said yet."""
        names = [_name(prompt) for prompt in prompts]
        known = {name: Said(text) for name in names if (text := self.replies.get(name)) is not None}
        fresh = {name: prompt for name, prompt in zip(names, prompts, strict=True) if name not in known}
        if fresh:
            for name, said in zip(fresh, self.speaker.say(list(fresh.values()), key), strict=True):
                known[name] = said
                if not said.error:
                    self.replies.put(name, said.text)
        return [known[name] for name in names]


def open_endpoint(config: SpeakerConfig, *, section: str, max_tokens: int, temperature: float) -> EndpointSpeaker:
    """The service that the settings name. Raises ValueError, in one line, if they are not enough to ask it."""
    if not config.url or not config.model:
        raise ValueError(f"{section}.who is endpoint: set {section}.url and {section}.model")
    headers = {}
    if config.key_variable:
        if not (secret := os.environ.get(config.key_variable)):
            # Whoever gives the key itself by mistake must not find it in a log.
            raise ValueError(f"{section}.key_variable: the environment holds no variable of that name")
        headers["Authorization"] = f"Bearer {secret}"
    # Requests that run side by side fail side by side: one slow moment must not open the circuit.
    breaker = CircuitBreaker(failures=2 * config.at_once)
    endpoint = Endpoint(config.url, config.timeout, config.attempts, breaker, headers=headers)
    return EndpointSpeaker(endpoint, config.model, max_tokens, temperature, config.at_once)


def remembering(speaker: Speaker, config: SpeakerConfig) -> RememberingSpeaker:
    """`speaker` with a memory of `config.cached` replies."""
    return RememberingSpeaker(speaker, RecentlyUsed(config.cached))


def _name(prompt: Prompt) -> bytes:
    """A digest, because the prompts themselves may be long."""
    parts = (prompt.prefix, prompt.question, prompt.bridge, prompt.memory, prompt.suffix)
    lengths = ",".join(str(len(part)) for part in parts)
    return hashlib.sha256("".join((lengths, *parts)).encode("utf-8", "surrogatepass")).digest()
