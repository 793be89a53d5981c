"""Values that cross package borders: problems, a workflow's requests and responses, trajectories.

Standard library only, so that the same workflow runs in training, in evaluation, interactively and in tests.
"""

from __future__ import annotations

import enum
import json
import operator
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from html import unescape
from typing import Any, Literal, Protocol, get_args
from unicodedata import normalize

import numpy as np

# Problems: what is asked, and the golden answers.


@dataclass(frozen=True)
class StreamQuestion:
    """A question about a stream, asked after the stream has been read."""

    text: str
    answer: Any  # golden answers as the data holds them: text, a list of texts or an object
    kind: str = ""  # question type in the data; accuracy is also reported by it
    evidence: tuple[str, ...] = ()  # the texts of the stream that hold the answer, where the data names them


@dataclass(frozen=True)
class Stream:
    """Text that Mem-alpha reads chunk by chunk, and the questions asked afterwards."""

    source: str  # name of the data set; selects the rule that scores the answers
    chunks: tuple[str, ...]
    questions: tuple[StreamQuestion, ...]

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Stream:
        """The inverse of `dataclasses.asdict`, also after a JSON round trip."""
        questions = []
        for question in fields["questions"]:
            evidence = tuple(question.get("evidence", ()))
            questions.append(StreamQuestion(**question | {"evidence": evidence}))
        return cls(fields["source"], tuple(fields["chunks"]), tuple(questions))


class Objectives(tuple[tuple[str, ...], ...]):
    """Golden answers of several questions that one problem joins. Semicolons separate the answers."""


@dataclass(frozen=True)
class Problem:
    """One question with its golden answers, or one stream; `question` then describes the stream in one line."""

    id: str
    question: str
    golden_answers: tuple[str, ...]
    metadata: dict[str, Any] = field(default_factory=dict)
    stream: Stream | None = None

    @property
    def golden(self) -> tuple[str, ...] | Objectives:
        """What an answer is scored by."""
        joined = self.metadata.get("objectives")
        return Objectives(map(tuple, joined)) if joined else self.golden_answers

    @property
    def supporting_titles(self) -> tuple[str, ...]:
        """Titles of the passages that the answer needs; () where the data does not name them.

        Raises ValueError where `supporting_titles` of the metadata is not a list of strings. HotpotQA and
        2WikiMultihopQA name them in `supporting_facts`. The latter lists "Place of birth" where the question has these
        words in small letters: such a title is a phrase of the question and no page to read.
        """
        facts = self.metadata.get("supporting_facts")
        titles_of_facts = facts.get("title") if isinstance(facts, dict) else ()
        titles = self.metadata.get("supporting_titles") or titles_of_facts or ()
        if not isinstance(titles, list | tuple) or not all(isinstance(title, str) for title in titles):
            raise ValueError(
                f"problem {self.id!r}: metadata.supporting_titles must be a list of strings, not {titles!r}"
            )
        composed = dict.fromkeys(normalize("NFC", unescape(title)) for title in titles)  # as passages are
        return tuple(title for title in composed if not _is_phrase(title, self.question))

    @classmethod
    def of_stream(cls, id: str, stream: Stream) -> Problem:
        """A problem that reads one stream."""
        description = f"{len(stream.chunks)} chunks of {stream.source}, {len(stream.questions)} questions"
        return cls(id, description, (), {"source": stream.source}, stream)


def encodable(text: str) -> str:
    """The text with "?" for halves of surrogate pairs, which JSON may escape and UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()


def plain_title(title: str) -> str:
    """A page's title without the `(...)` at its end, which tells the pages of a name apart."""
    return re.sub(r"\s*\([^()]*\)\s*$", "", title)


def _is_phrase(title: str, question: str) -> bool:
    """Whether a title of several words is written like a common noun, also in the question. Names have capitals."""
    phrase = title[:1].lower() + title[1:]
    return " " in title and phrase != title and phrase.islower() and phrase in question


# What a workflow yields: `Generate`, `Search` and `Call`, with what they are made of.


@dataclass(frozen=True)
class TextSpan:
    """Text of a context.

    Only `trusted` text, which comes from a template, may contain chat markup. Other text is encoded with special tokens
    disabled, so it cannot forge a turn.
    """

    text: str
    trusted: bool
    name: str = ""  # of a prompt segment, such as "question" or "memory"


@dataclass(frozen=True)
class Prompt:
    """The beginning of a fresh context: named segments in order, each of which is encoded separately."""

    segments: tuple[TextSpan, ...]

    def __getitem__(self, name: str) -> str:
        """The text of one segment; "" in a prompt without one of this name, as an agent of a user's may make it."""
        return {segment.name: segment.text for segment in self.segments}.get(name, "")

    def __str__(self) -> str:
        return "".join(segment.text for segment in self.segments)


@dataclass(frozen=True)
class Overrides:
    """What the request of a served agent changes in a generation."""

    seed: int  # of the draws, instead of the workflow's number; below 2 ** 32
    temperature: float
    top_p: float
    progress: Callable[[Sequence[int]], bool]  # called after every step with the ids so far; True ends the generation


GenerationKind = Literal["action", "memory"]
"""What a generation is: a thought with what the agent does next, or a memory (a rewrite, a summary, a state)."""


@dataclass(frozen=True)
class Generate:
    """Generate after a fresh `Prompt`, or after spans appended to the current context. Response: `Completion`."""

    text: Prompt | tuple[TextSpan, ...]
    max_tokens: int
    stop: str = ""  # a regular expression: the generation also ends with the first token after which its text matches
    same_turn: bool = False  # the spans continue the assistant's turn: the end token before them, if any, is removed
    overrides: Overrides | None = None
    kind: GenerationKind = "action"  # what `training.train_on` selects by
    room: int = 1  # tokens that the context must still have after the text; if it has fewer, it is full

    def __post_init__(self) -> None:
        """A mistake is an error of the line that makes the request, and no later one of the sampler."""
        spans = self.text.segments if isinstance(self.text, Prompt) else self.text
        if not isinstance(spans, tuple | list) or not all(isinstance(span, TextSpan) for span in spans):
            raise TypeError(f"Generate takes a Prompt or a tuple of TextSpan, and {self.text!r:.200} is none")
        if operator.index(self.max_tokens) < 1:
            raise ValueError(f"max_tokens {self.max_tokens} leaves none to generate")
        re.compile(self.stop)
        if self.kind not in get_args(GenerationKind):
            raise ValueError(f"kind {self.kind!r} must be one of {', '.join(get_args(GenerationKind))}")


@dataclass(frozen=True)
class Query:
    text: str
    top_n: int


@dataclass(frozen=True)
class Search:
    """Run these queries. Response: a tuple of `SearchResult`, one per query, in order."""

    queries: tuple[Query, ...]

    def __post_init__(self) -> None:
        for query in self.queries:
            if not (isinstance(query, Query) and isinstance(query.text, str) and isinstance(query.top_n, int)):
                raise TypeError(f"Search takes queries of a text and a number, and {query!r:.200} is none")


@dataclass(frozen=True)
class Call:
    """Run a tool of the run's own. Response: a `ToolResult`."""

    tool: str
    arguments: dict[str, Any]

    def __post_init__(self) -> None:
        """What no file can hold is an error of the line that makes the request."""
        json.dumps(self.arguments, allow_nan=False)


# What answers these requests: `Completion`, `SearchResult` and `ToolResult`.


@dataclass(frozen=True)
class ToolResult:
    """What a tool returned for a `Call`, or the `error`, in one line, because of which it returned nothing."""

    tool: str
    arguments: dict[str, Any]
    text: str = ""
    error: str = ""
    lost: bool = False  # the tool's server is gone, which says nothing about the call


@dataclass(frozen=True)
class Passage:
    """A retrieved passage. `contents` is the title in quotes, a newline and the text: the FlashRAG format."""

    id: str
    contents: str
    score: float = 0.0

    @property
    def title(self) -> str:
        line = unescape(self.contents.partition("\n")[0].strip())  # HotpotQA has "Lilo &amp; Stitch"
        return line[1:-1] if line[:1] == line[-1:] == '"' else line  # a title may have quotes of its own


@dataclass(frozen=True)
class SearchResult:
    """The passages of one query, or the `error`, in one line, because of which there are none."""

    passages: tuple[Passage, ...] = ()
    error: str = ""


class FinishReason(enum.Enum):
    """Why a generation ended."""

    STOP = "stop"  # the policy ended its turn
    FORGED_TURN = "forged_turn"  # the policy started another chat turn
    LENGTH = "length"  # reached the token limit
    CONTEXT_FULL = "context_full"  # the prompt or appended text did not fit; nothing was generated


@dataclass(frozen=True)
class Completion:
    """The generated text without its end token, or the `error`, in one line, because of which there is none."""

    text: str = ""
    finish: FinishReason = FinishReason.STOP
    error: str = ""
    lost: bool = False  # the service is down, which says nothing about the prompt


# What a workflow returns: an `Outcome`.


class StopReason(enum.Enum):
    """Why a trajectory ended. Only ANSWERED and STREAM_READ are scored; the latter by the answers to its questions.

    Other reasons are the policy's doing, or faults of the machinery, which say nothing about the policy.
    """

    _value_: str
    description: str

    ANSWERED = "answered", "the last reply contains an answer"
    STREAM_READ = "stream_read", "the stream was read to its end"
    NO_ANSWER = "no_answer", "the last reply contains neither an answer outside <think> nor a tool call"
    MAX_TURNS = "max_turns", "all turns were used without an answer"
    CUT_OFF = "cut_off", "a generation reached its token limit"
    FORGED_TURN = "forged_turn", "a generation opened a chat turn"
    BAD_MEMORY = "bad_memory", "the rewrite contains no memory"
    CONTEXT_FULL = "context_full", "the next text did not fit the context"
    SEARCH_FAILED = "search_failed", "a search failed"  # or a tool's server is gone
    FAULT = "fault", "the workflow raised an error"
    NOT_FINITE = "not_finite", "the policy's logits were not finite"

    def __new__(cls, value: str, description: str) -> StopReason:
        reason = object.__new__(cls)
        reason._value_ = value
        reason.description = description
        return reason

    @property
    def is_limit(self) -> bool:
        """Whether a limit cut the trajectory off before the policy ended it."""
        return self in (StopReason.MAX_TURNS, StopReason.CUT_OFF, StopReason.CONTEXT_FULL)

    @property
    def is_fault(self) -> bool:
        """Whether the machinery failed. Such a trajectory is lost: it has no reward, no scores and no advantage."""
        return self in (StopReason.SEARCH_FAILED, StopReason.FAULT, StopReason.NOT_FINITE)


@dataclass(frozen=True)
class Turn:
    """One turn as text, for metrics and reports; training uses only the ids of `Context`."""

    memory: str  # at the start of the turn
    reply: str
    calls: tuple[str, ...] = ()  # bodies of the tool calls that were run
    queries: tuple[Query, ...] = ()
    results: tuple[SearchResult, ...] = ()
    observation: str = ""  # tool results as the model saw them, after clipping
    rewrite: str = ""  # the reply that rewrites the memory
    new_memory: str = ""


@dataclass(frozen=True)
class Outcome:
    """The result of a workflow."""

    stop: StopReason
    answer: str = ""
    turns: tuple[Turn, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)  # such as clipped passages and memory cuts
    error: str = ""
    tool_reward: float | None = None  # that tools of the trajectory's own add to its reward

    def __post_init__(self) -> None:
        if not isinstance(self.stop, StopReason) or not isinstance(self.answer, str):
            raise TypeError(f"Outcome takes a StopReason and a text, not {self.stop!r} and {self.answer!r:.200}")

    @property
    def passages(self) -> tuple[Passage, ...]:
        """What all searches found, in their order."""
        return tuple(passage for turn in self.turns for result in turn.results for passage in result.passages)


Workflow = Generator[Generate | Search | Call, Any, Outcome]


# Trajectories: what training, logs and reports have of a finished workflow.

# The types of arrays that files hold (`logs.typed_json`). npt.NDArray has another form in each version of numpy.
Integers = np.ndarray[Any, np.dtype[np.int32]]
Floats = np.ndarray[Any, np.dtype[np.float32]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True, eq=False)
class Context:
    """The exact tokens of one context in the sampler: arrays with one entry per token, which cannot be changed.

    Sequences are taken for arrays. Contexts are equal if all of their entries are.
    """

    ids: Integers
    logprobs: Floats  # of the sampling policy on sampled tokens, 0 elsewhere
    sampled: Flags  # True on tokens that the policy generated: the loss mask
    version: int = 0  # of the one policy that sampled it: training steps before it
    # True on sampled tokens of memories; empty if training does not tell them apart.
    memory: Flags = field(default_factory=lambda: np.zeros(0, np.bool_))

    def __post_init__(self) -> None:
        for name, dtype in (("ids", np.int32), ("logprobs", np.float32), ("sampled", np.bool_), ("memory", np.bool_)):
            array = np.array(getattr(self, name), dtype)
            array.flags.writeable = False
            object.__setattr__(self, name, array)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Context) or self.version != other.version:
            return False
        pairs = (
            (self.ids, other.ids),
            (self.sampled, other.sampled),
            (self.memory, other.memory),
            (self.logprobs, other.logprobs),
        )
        return all(np.array_equal(own, others) for own, others in pairs)

    def __hash__(self) -> int:
        return hash((self.ids.tobytes(), self.version))


@dataclass(frozen=True)
class Trajectory:
    """One finished rollout of one problem."""

    problem: Problem
    rollout: int  # index among the G rollouts of the problem
    outcome: Outcome
    contexts: tuple[Context, ...]
    transcript: str  # ChatML text of the last context, with markup in untrusted text escaped
    tool_results: tuple[ToolResult, ...] = ()  # of all its calls, in order


@dataclass(frozen=True)
class ScoredTrajectory:
    """A trajectory with its reward and scores."""

    trajectory: Trajectory
    reward: float  # NaN: none
    reason: str = ""
    scores: dict[str, float] = field(default_factory=dict)  # exact_match, token_f1, ...; empty without a reward
    context_rewards: tuple[float, ...] = ()  # one per context, for workflows with a reward per context; NaN: none


FAILURES = {
    "no_answer": "no answer",
    "repeated_search": "the same query twice",
    "misread": "all supporting pages were shown, or the data does not name them",
    "answered_early": "fewer searches than supporting pages",
    "page_not_found": "a supporting page was not found",
}
"""Why an answer is wrong, in the order in which `logs.trajectories.failure` asks, and what that means."""


@dataclass(frozen=True)
class TrajectorySummary:
    """The numbers of one trajectory that tables and plots use."""

    dataset: str  # "" if unknown
    hops: int | None  # supporting facts that the question needs; None if unknown
    turns: int
    searches: int
    stop: StopReason
    reward: float
    scores: dict[str, float]
    context_lengths: tuple[int, ...]  # tokens in the context at the end of each turn
    step: int | None = None  # training step
    counts: dict[str, int] = field(default_factory=dict)  # of `Outcome`
    versions: tuple[int, ...] = ()  # of the policy that sampled each context
    failure: str = ""  # why the answer is wrong, a key of FAILURES; "" if it is right or unscored

    @property
    def correct(self) -> bool | None:
        """Whether the answer is an exact match; None without a score."""
        return None if "exact_match" not in self.scores else self.scores["exact_match"] == 1.0


class TokenCounter(Protocol):
    """Counts the policy's tokens, so that a workflow can keep token budgets without a tokenizer."""

    def count(self, text: str) -> int:
        """Tokens of `text` when encoded with special tokens disabled."""
        ...

    def clip(self, text: str, limit: int) -> str:
        """The longest prefix of `text` that encodes to at most `limit` tokens; `text` itself if it fits."""
        ...
