"""The Mem-alpha workflow: reads a stream chunk by chunk into a memory of three stores.

Every chunk has a fresh context, which shows the current memory, and one reply, whose tool calls change the memory. The
results of the calls are not shown: there is no second turn. Questions are answered afterwards in contexts of their own,
which are not part of the trajectory and are not trained. (Mem-alpha, arXiv 2509.25911, section 3.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.agent.memalpha.config import MemalphaConfig
from memsearcher_jax.agent.memalpha.memory import CallResult, Memory, Status
from memsearcher_jax.agent.memalpha.prompts import MemalphaPrompts
from memsearcher_jax.agent.memalpha.tools import OFFERED, Call, run_calls, tool_calls, truncate_reply
from memsearcher_jax.agent.memalpha.view import render_memory
from memsearcher_jax.types import (
    FinishReason,
    Generate,
    Outcome,
    Prompt,
    StopReason,
    Stream,
    TokenCounter,
    Turn,
    Workflow,
)

_COUNTED_AS = {Status.OK: "calls_ok", Status.SKIPPED: "calls_skipped", Status.ERROR: "calls_failed"}


@dataclass(frozen=True)
class StreamOutcome(Outcome):
    """The memory of a stream; the tuples have one entry per chunk that was read."""

    memory: Memory = field(default_factory=Memory)
    calls_C: tuple[tuple[Call, ...], ...] = ()
    results_C: tuple[tuple[CallResult, ...], ...] = ()  # one result per call


def memalpha(
    stream: Stream,
    *,
    agent: AgentConfig,
    config: MemalphaConfig,
    prompts: MemalphaPrompts,
    token_counter: TokenCounter,
    initial: Memory | None = None,
) -> Workflow:
    """Yields one `Generate` per chunk, returns a `StreamOutcome`.

    Does no I/O and never raises, whatever the policy writes. Begins with the memory `initial`, by default an empty one.
    The complete calls of a reply that was cut off, or that forged a chat turn, are run.
    """
    memory = initial or Memory(core_budget=config.core_tokens)
    turns: list[Turn] = []
    calls_C: list[tuple[Call, ...]] = []
    results_C: list[tuple[CallResult, ...]] = []
    replies = Counter(replies_cut_off=0, replies_forged=0, replies_without_calls=0)

    def outcome(stop: StopReason) -> StreamOutcome:
        counts = {**replies, **call_counts(calls_C, results_C), **size_counts(memory, stream, token_counter)}
        return StreamOutcome(
            stop,
            turns=tuple(turns),
            counts=counts,
            memory=memory,
            calls_C=tuple(calls_C),
            results_C=tuple(results_C),
        )

    # The baselines answer from the stream itself and write no memory.
    chunks = stream.chunks if config.answer_from == "memory" else ()
    for chunk in chunks:
        shown = render_memory(memory, config.shown_items, agent.memory_tokens, token_counter, tags=prompts.tags)
        completion = yield Generate(prompts.chunk_prompt(shown, chunk), agent.completion_tokens, kind="memory")
        if completion.finish is FinishReason.CONTEXT_FULL:
            return outcome(StopReason.CONTEXT_FULL)
        calls = tool_calls(truncate_reply(completion.text))
        memory, results = run_calls(memory, calls, token_counter)
        replies["replies_cut_off"] += completion.finish is FinishReason.LENGTH
        replies["replies_forged"] += completion.finish is FinishReason.FORGED_TURN
        replies["replies_without_calls"] += not calls
        written = tuple(f"{name} {arguments}" for name, arguments in calls)
        observation = "\n".join(map(describe_result, results))
        turns.append(Turn(shown, completion.text, written, observation=observation))
        calls_C.append(calls)
        results_C.append(results)
    return outcome(StopReason.STREAM_READ)


def generate_once(prompt: Prompt, max_tokens: int) -> Workflow:
    """One context with one completion, whose text is the answer, also if it was cut off: for questions and judges."""
    completion = yield Generate(prompt, max_tokens)
    if completion.finish is FinishReason.CONTEXT_FULL:
        return Outcome(StopReason.CONTEXT_FULL, error="the prompt does not fit the context")
    is_cut_off = completion.finish is FinishReason.LENGTH
    return Outcome(StopReason.CUT_OFF if is_cut_off else StopReason.ANSWERED, completion.text)


def describe_result(result: CallResult) -> str:
    """One line on the result of a call, for people; the policy never sees it."""
    if result.error:
        return f"{result.status.value}: {result.error.value}: {result.message}"
    return f"{result.status.value} [{result.item.id}]" if result.item else result.status.value


def call_counts(calls_C: Sequence[Sequence[Call]], results_C: Sequence[Sequence[CallResult]]) -> dict[str, int]:
    """The number of calls by tool, by status, and of errors by their kind."""
    counts = Counter(dict.fromkeys(("calls", *_COUNTED_AS.values(), "calls_idle"), 0))
    counts.update({f"calls/{name}": 0 for name in OFFERED})
    for call, result in zip(chain.from_iterable(calls_C), chain.from_iterable(results_C), strict=True):
        counts["calls"] += 1
        counts[f"calls/{call.name if call.name in OFFERED else 'unknown'}"] += 1
        counts[_COUNTED_AS[result.status]] += 1
        counts["calls_idle"] += result.idle
        counts["core_tokens_cut"] += result.tokens_cut
        if result.error:
            counts[f"calls_failed/{result.error.value}"] += 1
    return dict(counts)


def size_counts(memory: Memory, stream: Stream, token_counter: TokenCounter) -> dict[str, int]:
    """Tokens of the memory, of each of its stores and of the stream; the number of items and of chunks."""
    return {
        "memory_tokens": memory.tokens,
        "memory_tokens/core": memory.core_tokens,
        "memory_tokens/semantic": sum(item.tokens for item in memory.semantic),
        "memory_tokens/episodic": sum(item.tokens for item in memory.episodic),
        "memory_items": len(memory.semantic) + len(memory.episodic),
        "stream_tokens": sum(map(token_counter.count, stream.chunks)),
        "chunks": len(stream.chunks),
    }
