"""The trajectories of harnesses: their contexts, and which context a request continues."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from memsearcher_jax.chat_template import ChatMessage
from memsearcher_jax.rl.rollout import Job
from memsearcher_jax.types import Turn


@dataclass
class OpenContext:
    """A context that later requests may extend."""

    number: int
    messages: tuple[ChatMessage, ...]  # with the last reply, as it was given; empty before the first reply
    tools: str  # JSON
    ids: np.ndarray  # int32
    logprobs: np.ndarray  # float32, 0 where not sampled
    sampled: np.ndarray  # bool
    can_be_extended: bool = False  # while it generates, and after a reply that opened another turn, it cannot

    @property
    def ends_with_reply(self) -> bool:
        return bool(len(self.sampled)) and bool(self.sampled[-1])


@dataclass
class Session:
    """One trajectory.

    The threads of the endpoint and of the harnesses change it; the engine's thread reads it when the harness has ended.
    """

    job: Job
    key: str = field(default_factory=lambda: f"trajectory-{secrets.token_hex(16)}")
    contexts: list[OpenContext] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    requests: int = 0
    altered_replies: int = 0
    is_ended: bool = False
    context_full: bool = False
    is_finite: bool = True
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)  # held while a request finds its context

    def find(self, messages: Sequence[ChatMessage], tools: str) -> OpenContext | None:
        """The context with the longest conversation that the messages continue.

        Counts requests that continue none because a reply came back altered.
        """
        found: OpenContext | None = None
        is_altered = False
        for context in self.contexts:
            length = len(context.messages)
            if not length or len(messages) <= length or context.tools != tools:
                continue
            *earlier, reply = context.messages
            if not all(map(_same_message, earlier, messages)):
                continue
            if not _same_reply(reply, messages[length - 1]):
                is_altered = True
            elif context.can_be_extended and (found is None or length > len(found.messages)):
                found = context
        if found is None and is_altered:
            self.altered_replies += 1
        return found

    def counts(self) -> dict[str, int]:
        return {
            "requests": self.requests,
            "contexts": len(self.contexts),
            "altered_replies": self.altered_replies,
        }


def _same_message(earlier: ChatMessage, echoed: ChatMessage) -> bool:
    """Whether two messages render alike; parts may be divided in another way."""
    return earlier.role == echoed.role and earlier.text == echoed.text and _calls(earlier) == _calls(echoed)


def _same_reply(reply: ChatMessage, echoed: ChatMessage) -> bool:
    """Whether a reply came back as it was given.

    These differences change nothing for the reader of the messages, whose ids stay as they were sampled: white space at
    the ends of the text, a text in parts, and the white space and order of names in the arguments of a call.
    """
    return reply.role == echoed.role and reply.text.strip() == echoed.text.strip() and _calls(reply) == _calls(echoed)


def _calls(message: ChatMessage) -> list[tuple[str, Any]]:
    return [(call.name, call.arguments_object) for call in message.tool_calls]
