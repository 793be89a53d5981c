"""The language model that writes questions and tries to answer them, its prompts and its replies.

Here it is any service with OpenAI's chat completions; `engine_writer` runs a checkpoint.
"""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Protocol

from memsearcher_jax.agent.prompts import ASSISTANT, END, SYSTEM, USER
from memsearcher_jax.canonical import canonical
from memsearcher_jax.questions.evidence import Evidence
from memsearcher_jax.rl.completers import OpenAICompleter, open_openai_completer
from memsearcher_jax.rl.config import CompleterConfig
from memsearcher_jax.types import Completion, Passage, Prompt, TextSpan

WRITE = """You write questions for an exam in which the examinee searches a library and sees no text at first.
Reply with one JSON object: {"question": "...", "answer": "..."}.
The answer is a name, a number, a date or another short phrase, copied from the passages.
The question can be understood alone: name what it is about, and never mention a passage, text or document.
It has one answer, and somebody who has not read the passages does not know it."""
WRITE_ONE = "Write one question that this passage answers."
WRITE_SEVERAL = """Write one question that needs all {count} passages. Each passage leads to the next one by a name:
describe that name in the question by what the passage before says of it, and do not write it. The answer is in the last
passage."""
ANSWER = """Answer the question with a short phrase and nothing else. Write unknown if you do not know it."""
ANSWER_FROM = """Answer the question from the passage alone, with a short phrase and nothing else. Write unknown if the
passage does not say it."""
JSON_OBJECT = re.compile(r"\{.*\}", re.DOTALL)
SAMPLED_TEMPERATURE = 0.7  # of answers without a passage


@dataclass(frozen=True)
class Written:
    question: str
    answer: str


class Writer(Protocol):
    """A language model, and the tokens that it counted."""

    @property
    def tokens(self) -> Counter[str]:
        """Of all prompts (prompt_tokens) and completions (completion_tokens) so far."""
        ...

    def ask(self, prompts: Sequence[Prompt], draw: int = 0) -> list[Completion]:
        """One completion of each prompt, in order. Another `draw` may sample others."""
        ...


@dataclass(frozen=True)
class ServiceWriter(OpenAICompleter):
    """A service, and the tokens that it counted."""

    setting: ClassVar[str] = "writer.url"

    tokens: Counter[str] = field(default_factory=Counter)  # prompt_tokens and completion_tokens
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def ask(self, prompts: Sequence[Prompt], draw: int = 0) -> list[Completion]:
        with ThreadPoolExecutor(self.max_concurrency) as pool:
            return list(pool.map(self._complete, prompts))

    def request(self, method: str, path: str, body: Any) -> Any:
        answer = super().request(method, path, body)
        usage = answer.get("usage") if isinstance(answer, dict) else None
        if isinstance(usage, dict):
            with self.lock:
                for name in ("prompt_tokens", "completion_tokens"):
                    if isinstance(usage.get(name), int):
                        self.tokens[name] += usage[name]
        return answer


def open_service_writers(config: CompleterConfig, max_tokens: int) -> tuple[ServiceWriter, ServiceWriter]:
    """The service that the settings name, greedy and sampled.

    Raises ValueError, in one line, if the settings do not suffice to reach it.
    """
    return _open_service(config, max_tokens, 0.0), _open_service(config, max_tokens, SAMPLED_TEMPERATURE)


def _open_service(config: CompleterConfig, max_tokens: int, temperature: float) -> ServiceWriter:
    service = open_openai_completer(config, "writer", max_tokens, temperature)
    return ServiceWriter(**{entry.name: getattr(service, entry.name) for entry in fields(service)})


def write_prompt(evidence: Evidence) -> Prompt:
    order = WRITE_ONE if evidence.hops == 1 else WRITE_SEVERAL.format(count=evidence.hops)
    return _prompt(WRITE, "\n\n".join([*map(_shown, evidence.passages), order]))


def answer_prompt(question: str, passage: Passage | None = None) -> Prompt:
    if passage is None:
        return _prompt(ANSWER, question)
    return _prompt(ANSWER_FROM, f"{_shown(passage)}\n\nQuestion: {question}")


def parse(reply: str) -> Written | None:
    """The question and the answer of a reply, which may have a thought or a fence around its JSON; None without."""
    match = JSON_OBJECT.search(reply.rpartition("</think>")[2])
    try:
        values = json.loads(match[0]) if match else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict):
        return None
    question = values.get("question")
    answer = values.get("answer")
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    if not isinstance(question, str) or not isinstance(answer, str):
        return None
    question = " ".join(canonical(question).split())
    answer = " ".join(canonical(answer).split()).rstrip(".")
    return Written(question, answer) if question and answer else None


def _shown(passage: Passage) -> str:
    return f"Title: {passage.title}\n{passage.contents.partition(chr(10))[2]}"


def _prompt(system: str, user: str) -> Prompt:
    opening = TextSpan(SYSTEM + system + END + USER, trusted=True)
    return Prompt((opening, TextSpan(user, trusted=False), TextSpan(END + ASSISTANT, trusted=True)))
