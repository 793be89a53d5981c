"""Runs tool calls: parses them, searches, calls tools of the run's own, and fits the results into a token budget."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.agent.prompts import Prompts
from memsearcher_jax.agent.protocol import parse_call
from memsearcher_jax.types import Call, Passage, Query, Search, SearchResult, TextSpan, TokenCounter, ToolResult, Turn


@dataclass(frozen=True)
class ToolUse:
    """The tool calls of one turn and their results."""

    turn: Turn  # with the calls that were run, the queries of those that could be parsed, and their results
    message: tuple[TextSpan, ...]  # the user message that shows the results
    counts: dict[str, int]  # calls_ignored, calls_clipped, passages_clipped
    error: str  # of the first search that failed or tool that is gone; "" if none. A call may be at fault itself


def run_tool_calls(
    turn: Turn, bodies: Sequence[str], *, config: AgentConfig, prompts: Prompts, token_counter: TokenCounter
) -> Generator[Search | Call, Any, ToolUse]:
    """Runs the first `config.max_calls` calls of a turn; calls and results share `config.observation_tokens`.

    Calls that name a tool of the run's own are `Call` requests, all others are queries of one `Search`.
    """
    calls = tuple(bodies[: config.max_calls])
    limits = {"default_top_n": config.default_top_n, "max_top_n": config.max_top_n}
    parsed = [parse_call(body, **limits, tools=prompts.tools) for body in calls]
    queries = tuple(query for query in parsed if isinstance(query, Query))
    results: tuple[SearchResult, ...] = tuple((yield Search(queries)) if queries else ())
    error, remaining, shown = next((result.error for result in results if result.error), ""), iter(results), []
    for one in parsed:
        if isinstance(one, Call):
            result: ToolResult = yield one
            error = error or (result.error if result.lost else "")
            shown.append(SearchResult((Passage("", result.text),), result.error))
        else:
            shown.append(next(remaining) if isinstance(one, Query) else SearchResult(error=one))
    pairs, clipped = fit_results(calls, shown, config.observation_tokens, prompts, token_counter)
    counts = {"calls_ignored": len(bodies) - len(calls), **clipped}
    message = prompts.tool_message(pairs)
    observation = "".join(span.text for span in message)
    turn = replace(turn, calls=calls, queries=queries, results=results, observation=observation)
    return ToolUse(turn, message, counts, error)


def fair_shares(demands: Sequence[int], budget: int) -> list[int]:
    """Splits `budget` by max-min fairness: no share exceeds its demand, and the smallest cut share is maximal."""
    shares = [0] * len(demands)
    remaining = budget
    for rank, index in enumerate(sorted(range(len(demands)), key=demands.__getitem__)):
        shares[index] = min(demands[index], remaining // (len(demands) - rank))
        remaining -= shares[index]
    return shares


def fit_results(
    calls: Sequence[str], results: Sequence[SearchResult], budget: int, prompts: Prompts, token_counter: TokenCounter
) -> tuple[list[tuple[str, str]], dict[str, int]]:
    """(call, result) pairs of at most `budget` tokens together, and how many calls and passages were clipped."""
    count, clip = token_counter.count, token_counter.clip
    complete = [[("", call, ""), *_show(result, prompts)] for call, result in zip(calls, results, strict=True)]
    shares = iter(fair_shares([sum(map(count, part)) for parts in complete for part in parts], budget))

    def clip_part(before: str, text: str, after: str) -> tuple[str, str, str]:
        return before, clip(text, max(0, next(shares) - count(before) - count(after))), after

    clipped = [[clip_part(*part) for part in parts] for parts in complete]
    texts = [text for (_, call, _), *parts in clipped for text in (call, "".join(map("".join, parts)).strip())]
    # Joined passages may encode to a few tokens more than the same passages apart, so the joined text is clipped too.
    limits = fair_shares([count(text) for text in texts], budget)
    texts = [clip(text, limit) for text, limit in zip(texts, limits, strict=True)]
    changed = [[new != old for new, old in zip(*parts, strict=True)] for parts in zip(clipped, complete, strict=True)]
    counts = {
        "calls_clipped": sum(call for call, *_ in changed),
        "passages_clipped": sum(passage for _, *passages in changed for passage in passages),
    }
    return list(zip(texts[::2], texts[1::2], strict=True)), counts


def _show(result: SearchResult, prompts: Prompts) -> list[tuple[str, str, str]]:
    """(template text before, text to clip, template text after) of each passage, or of the error."""
    if result.error:
        return [("", " ".join(result.error.split()), "")]
    return [prompts.show_passage(number, passage) for number, passage in enumerate(result.passages, start=1)]
