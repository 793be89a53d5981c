"""The Mem-alpha workflow: a stream is read chunk by chunk, and a memory of three stores is all that stays of it.

Every chunk is a fresh context that shows the memory as it is, and one reply, whose tool calls change the memory.
Nothing comes back from them: there is no second turn. What is asked afterwards is answered in contexts of their own,
which are not part of the trajectory and are not trained. (Mem-alpha, arXiv 2509.25911, section 3.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from memsearcher_jax.agent.memalpha_config import MemalphaConfig
from memsearcher_jax.agent.memalpha_memory import Memory, Result, Status
from memsearcher_jax.agent.memalpha_prompts import MemalphaPrompts
from memsearcher_jax.agent.memalpha_tools import OFFERED, Call, kept_reply, run_calls, tool_calls
from memsearcher_jax.agent.memalpha_view import shown_memory
from memsearcher_jax.agent.types import AgentConfig, Finish, Outcome, Prompt, Ruler, Say, Stop, Stream, Turn, Workflow


@dataclass(frozen=True)
class Memorised(Outcome):
    """What is left of a stream; the tuples have one entry per chunk that was read."""

    memory: Memory = field(default_factory=Memory)
    calls_C: tuple[tuple[Call, ...], ...] = ()
    results_C: tuple[tuple[Result, ...], ...] = ()  # what became of each call


def memalpha(
    stream: Stream, *, agent: AgentConfig, config: MemalphaConfig, prompts: MemalphaPrompts, ruler: Ruler
) -> Workflow:
    """Yields one `Say` per chunk, returns a `Memorised`. Does no I/O; raises nothing, whatever the policy says.

    A reply that was cut off, or that opened a chat turn of its own, counts as far as it goes.
    """
    memory = Memory(core_budget=config.core_tokens)
    turns: list[Turn] = []
    calls_C: list[tuple[Call, ...]] = []
    results_C: list[tuple[Result, ...]] = []
    replies = Counter(replies_cut_off=0, replies_forged=0, replies_without_calls=0)

    def ended(stop: Stop) -> Memorised:
        counts = {**replies, **operations(calls_C, results_C), **sizes(memory, stream, ruler)}
        return Memorised(stop, "", tuple(turns), counts, "", memory, tuple(calls_C), tuple(results_C))

    # The readers that are compared with the memory look at the stream itself, so that there is nothing to memorise.
    for chunk in stream.chunks if config.reader == "memory" else ():
        shown = shown_memory(memory, config.shown_items, agent.memory_tokens, ruler)
        reply = yield Say(prompts.chunk(shown, chunk), agent.reply_tokens)
        if reply.finish is Finish.NO_ROOM:
            return ended(Stop.CONTEXT_FULL)
        calls = tool_calls(kept_reply(reply.text))
        memory, results = run_calls(memory, calls, ruler)
        replies["replies_cut_off"] += reply.finish is Finish.LENGTH
        replies["replies_forged"] += reply.finish is Finish.MARKUP
        replies["replies_without_calls"] += not calls
        written = tuple(f"{call.name} {call.arguments}" for call in calls)
        turns.append(Turn(shown, reply.text, calls=written, observation="\n".join(map(told, results))))
        calls_C.append(calls)
        results_C.append(results)
    return ended(Stop.REMEMBERED)


def say_once(prompt: Prompt, max_tokens: int) -> Workflow:
    """One context with one reply, which is the outcome's answer however it ended: for questions and for judges."""
    reply = yield Say(prompt, max_tokens)
    if reply.finish is Finish.NO_ROOM:
        return Outcome(Stop.CONTEXT_FULL, error="the prompt does not fit the context")
    return Outcome(Stop.ANSWERED, reply.text)


def told(result: Result) -> str:
    """One line on what became of a call, for people: a policy never sees it."""
    if result.fault:
        return f"{result.status.value}: {result.fault.kind.value}: {result.fault.message}"
    return f"{result.status.value} [{result.item.id}]" if result.item else result.status.value


def operations(calls_C: Sequence[Sequence[Call]], results_C: Sequence[Sequence[Result]]) -> dict[str, int]:
    """How often each tool was called, and how calls ended: by tool, by status, errors by their kind."""
    counts = Counter({"calls": 0, "calls_ok": 0, "calls_skipped": 0, "calls_failed": 0, "calls_idle": 0})
    counts.update({f"calls/{name}": 0 for name in OFFERED})
    for call, result in zip(
        (call for calls in calls_C for call in calls),
        (result for results in results_C for result in results),
        strict=True,
    ):
        counts["calls"] += 1
        counts[f"calls/{call.name if call.name in OFFERED else 'unknown'}"] += 1
        counts[
            {Status.OK: "calls_ok", Status.SKIPPED: "calls_skipped", Status.ERROR: "calls_failed"}[result.status]
        ] += 1
        counts["calls_idle"] += result.idle
        counts["core_tokens_cut"] += result.tokens_cut
        if result.fault:
            counts[f"calls_failed/{result.fault.kind.value}"] += 1
    return dict(counts)


def sizes(memory: Memory, stream: Stream, ruler: Ruler) -> dict[str, int]:
    """Tokens of the memory, store by store, and of the stream, and the number of items."""
    semantic, episodic = (sum(item.tokens for item in items) for items in (memory.semantic, memory.episodic))
    return {
        "memory_tokens": memory.core_tokens + semantic + episodic,
        "memory_tokens/core": memory.core_tokens,
        "memory_tokens/semantic": semantic,
        "memory_tokens/episodic": episodic,
        "memory_items": len(memory.semantic) + len(memory.episodic),
        "stream_tokens": sum(ruler.count(chunk) for chunk in stream.chunks),
        "chunks": len(stream.chunks),
    }
