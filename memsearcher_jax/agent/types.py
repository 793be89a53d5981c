"""The values that cross the agent's door: what a workflow asks for, what it is told, what it leaves behind.

Standard library only, so that the same workflow runs in training, in evaluation, at a keyboard and in a test.
"""

from __future__ import annotations

import enum
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol


@dataclass(frozen=True)
class AgentConfig:
    """What an agent may do in one trajectory. The defaults are the paper's training settings."""

    workflow: Literal["memsearcher", "react", "direct", "rag", "memalpha"] = "memsearcher"
    """Which agent runs: compact memory (memsearcher), the whole history (react), one reply without a search (direct),
    one after a search with the question (rag), or stores that are filled from a stream, then asked (memalpha)."""
    prompts: str = "memsearcher"
    """Name of a packaged template set, or a folder that holds one (see agent/prompts.py)."""
    max_turns: int = 5
    """Turns before a trajectory ends without an answer."""
    reply_tokens: int = 512
    """Most tokens that one generation may have: a think-and-act reply or a memory rewrite."""
    question_tokens: int = 695
    """Longest question, in tokens of the policy; longer ones are refused when the data is read."""
    memory_tokens: int = 1024
    """Memory budget in tokens; a rewritten memory over it is cut there and counted. Of memalpha: what a context shows
    of the memory, which itself has no bound."""
    remember: bool = True
    """Hand each turn's memory to the next; False empties it every time, to see what it is worth."""
    observation_tokens: int = 4096
    """Budget for what one turn's tool calls bring back; passages are clipped to share it."""
    max_calls: int = 5
    """Tool calls that one reply may make; the rest are ignored and counted."""
    default_top_n: int = 5
    """Passages per query when the call names no top_n."""
    max_top_n: int = 20
    """Most passages per query, whatever the call asks for."""
    on_search_error: Literal["stop", "tell"] = "stop"
    """A failed search ends the trajectory (stop) or is shown to the model as the tool's result (tell)."""


@dataclass(frozen=True)
class Problem:
    """One question with its golden answers."""

    id: str
    question: str
    golden_answers: tuple[str, ...]
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StreamQuestion:
    """What is asked about a stream once it has been read."""

    text: str
    answer: Any  # golden: a text, a list of texts, whatever JSON holds; `agent.memalpha_reward` reads it
    kind: str = ""  # what the data says of it; numbers are reported by it


@dataclass(frozen=True)
class Stream:
    """What Mem-alpha reads chunk by chunk, and is asked about afterwards."""

    source: str  # the data set, whose rule scores the answers
    chunks: tuple[str, ...]
    questions: tuple[StreamQuestion, ...]

    def problem(self, identity: str) -> Problem:
        """The stream as a problem: files, trajectories and the order of training know no other value."""
        questions = [[question.text, question.answer, question.kind] for question in self.questions]
        told = f"{len(self.chunks)} chunks of {self.source}, {len(questions)} questions"
        metadata = {"source": self.source, "chunks": list(self.chunks), "questions": questions}
        return Problem(identity, told, (), metadata)

    @classmethod
    def of(cls, problem: Problem) -> Stream:
        """The inverse of `problem`. Raises ValueError for a problem that is one question."""
        try:
            told = problem.metadata
            questions = tuple(StreamQuestion(*fields) for fields in told["questions"])
            return cls(told["source"], tuple(told["chunks"]), questions)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"problem {problem.id!r} is no stream of chunks: agent.workflow memalpha reads streams, the other "
                "workflows read questions"
            ) from error


@dataclass(frozen=True)
class Prompt:
    """The opening of a fresh context, in the parts that the sampler's buffers hold apart.

    `prefix`, `bridge` and `suffix` come from our templates and may hold chat markup; `question` and `memory` (of rag:
    the passages) come from outside and are encoded with special tokens disabled, so that they can never forge a turn.
    Mem-alpha's contexts hold what is shown of the memory in place of the question, and in place of the memory what is
    read or asked.
    """

    prefix: str
    question: str
    bridge: str
    memory: str
    suffix: str


@dataclass(frozen=True)
class Piece:
    """Text that extends the present context; only `trusted` text may hold chat markup."""

    text: str
    trusted: bool


@dataclass(frozen=True)
class Say:
    """The model should speak: after a fresh `Prompt`, or after pieces added to the present context. Answer: `Reply`."""

    text: Prompt | tuple[Piece, ...]
    max_tokens: int


@dataclass(frozen=True)
class Query:
    text: str
    top_n: int


@dataclass(frozen=True)
class Find:
    """Run these searches. Answer: a tuple of `Found`, one per query, in order."""

    queries: tuple[Query, ...]


@dataclass(frozen=True)
class Passage:
    """`contents` is the title in quotes, a newline, the text: the FlashRAG layout."""

    id: str
    contents: str
    score: float = 0.0

    @property
    def title(self) -> str:
        return self.contents.partition("\n")[0].strip().strip('"')


@dataclass(frozen=True)
class Found:
    """What one query brought back; `error` says in one line why it brought nothing."""

    passages: tuple[Passage, ...] = ()
    error: str = ""


class Finish(enum.Enum):
    """Why a generation ended."""

    END = "end"  # the policy closed its turn
    MARKUP = "markup"  # it opened a chat turn of its own
    LENGTH = "length"  # cut at the token limit
    NO_ROOM = "no_room"  # the text to add did not fit the context; nothing was generated


@dataclass(frozen=True)
class Reply:
    """What the model said, without the token that ended it."""

    text: str
    finish: Finish = Finish.END


class Stop(enum.Enum):
    """Why a trajectory ended. Only ANSWERED is scored, and REMEMBERED by the answers that a memory then allows."""

    ANSWERED = "answered"
    REMEMBERED = "remembered"  # the whole stream was read into the memory
    NO_ANSWER = "no_answer"  # neither a box outside <think> nor a tool call
    MAX_TURNS = "max_turns"
    CUT_OFF = "cut_off"  # a generation reached its token limit
    FORGED_TURN = "forged_turn"  # a generation opened a chat turn
    BAD_MEMORY = "bad_memory"  # the rewrite held no memory
    CONTEXT_FULL = "context_full"
    SEARCH_FAILED = "search_failed"
    FAULT = "fault"  # the workflow raised
    NOT_FINITE = "not_finite"  # the policy's logits were NaN or infinite


@dataclass(frozen=True)
class Turn:
    """One round as text, for metrics and for people; training uses the ids of `Context` alone."""

    memory: str  # what the turn started from
    reply: str
    calls: tuple[str, ...] = ()  # bodies of the tool calls that were run
    queries: tuple[Query, ...] = ()
    found: tuple[Found, ...] = ()
    observation: str = ""  # what the model was shown, after clipping
    rewrite: str = ""  # the model's memory reply
    new_memory: str = ""


@dataclass(frozen=True)
class Outcome:
    """What a workflow returns."""

    stop: Stop
    answer: str = ""
    turns: tuple[Turn, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)  # of calls and passages clipped, of memory cuts
    error: str = ""


Workflow = Generator[Say | Find, Any, Outcome]


@dataclass(frozen=True)
class Context:
    """One context exactly as the sampler held it; the three tuples have one entry per token."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # behaviour log-probability where sampled, 0 elsewhere
    sampled: tuple[bool, ...]  # True on the policy's own tokens: the loss mask


@dataclass(frozen=True)
class Trajectory:
    """One finished rollout of one problem."""

    problem: Problem
    rollout: int  # which of the problem's G copies
    outcome: Outcome
    contexts: tuple[Context, ...]
    transcript: str  # ChatML text of the last context; markup inside outside text is broken up


class Ruler(Protocol):
    """Measures text in the policy's tokens, so that a workflow can hold budgets without knowing the tokenizer."""

    def count(self, text: str) -> int:
        """Tokens of `text` when encoded with special tokens disabled."""

    def clip(self, text: str, limit: int) -> str:
        """A prefix of `text` that encodes to at most `limit` tokens; `text` itself if it fits."""
