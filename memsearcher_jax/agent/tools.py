"""Runs tool calls: parses them, searches, calls tools of the run's own, and fits the results into a token budget."""

from __future__ import annotations

import operator
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

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
    parsed = [
        parse_call(body, default_top_n=config.default_top_n, max_top_n=config.max_top_n, tools=prompts.tools)
        for body in calls
    ]
    queries = tuple(request for request in parsed if isinstance(request, Query))
    results: tuple[SearchResult, ...] = ()
    if queries:
        results = tuple((yield Search(queries)))
    error = next((result.error for result in results if result.error), "")
    shown: list[SearchResult] = []  # one for each call
    found = iter(results)
    for request in parsed:
        if isinstance(request, Query):
            shown.append(next(found))
        elif isinstance(request, Call):
            answer: ToolResult = yield request
            shown.append(SearchResult((Passage("", answer.text),), answer.error))
            if answer.lost:
                error = error or answer.error
        else:
            shown.append(SearchResult(error=request))
    fitted = fit_results(calls, shown, config.observation_tokens, prompts, token_counter)
    message = prompts.tool_message(fitted.pairs)
    observation = "".join(span.text for span in message)
    turn = replace(turn, calls=calls, queries=queries, results=results, observation=observation)
    counts = {
        "calls_ignored": len(bodies) - len(calls),
        "calls_clipped": fitted.calls_clipped,
        "passages_clipped": fitted.passages_clipped,
    }
    return ToolUse(turn, message, counts, error)


def fair_shares(demands: Sequence[int], budget: int) -> list[int]:
    """Splits `budget` by max-min fairness: no share exceeds its demand, and the smallest cut share is maximal."""
    shares = [0] * len(demands)
    remaining = budget
    smallest_first = sorted(range(len(demands)), key=demands.__getitem__)
    for rank, index in enumerate(smallest_first):
        equal_share = remaining // (len(demands) - rank)
        shares[index] = min(demands[index], equal_share)
        remaining -= shares[index]
    return shares


@dataclass(frozen=True)
class FittedResults:
    """What a message shows of tool calls and their results."""

    pairs: list[tuple[str, str]]  # (call, result)
    calls_clipped: int
    passages_clipped: int


class _Part(NamedTuple):
    """Text of a message: only `text` may be clipped, the texts around it are of the template."""

    before: str
    text: str
    after: str


def fit_results(
    calls: Sequence[str], results: Sequence[SearchResult], budget: int, prompts: Prompts, token_counter: TokenCounter
) -> FittedResults:
    """(call, result) pairs of at most `budget` tokens together, and how many calls and passages were clipped."""
    parts: list[_Part] = []  # of each call: the call, then what its result shows
    first_parts: list[int] = []  # of each call, where its parts begin
    for call, result in zip(calls, results, strict=True):
        first_parts.append(len(parts))
        parts.append(_Part("", call, ""))
        parts += _show(result, prompts)
    clipped = _clip_parts(parts, budget, token_counter)

    texts: list[str] = []
    calls_clipped = 0
    passages_clipped = 0
    for first, end in pairwise([*first_parts, len(parts)]):
        result_parts = clipped[first + 1 : end]
        texts += [clipped[first].text, "".join(map("".join, result_parts)).strip()]
        calls_clipped += clipped[first] != parts[first]
        passages_clipped += sum(map(operator.ne, result_parts, parts[first + 1 : end]))
    # Joined passages may encode to a few tokens more than the same passages apart, so the joined text is clipped too.
    limits = fair_shares([token_counter.count(text) for text in texts], budget)
    texts = [token_counter.clip(text, limit) for text, limit in zip(texts, limits, strict=True)]
    pairs = list(zip(texts[::2], texts[1::2], strict=True))
    return FittedResults(pairs, calls_clipped, passages_clipped)


def _clip_parts(parts: Sequence[_Part], budget: int, token_counter: TokenCounter) -> list[_Part]:
    """The parts, whose texts are clipped so that all have at most `budget` tokens, those of the template included."""
    count = token_counter.count
    shares = fair_shares([sum(map(count, part)) for part in parts], budget)
    clipped = []
    for part, share in zip(parts, shares, strict=True):
        limit = max(0, share - count(part.before) - count(part.after))
        clipped.append(part._replace(text=token_counter.clip(part.text, limit)))
    return clipped


def _show(result: SearchResult, prompts: Prompts) -> list[_Part]:
    """Each passage, or the error."""
    if result.error:
        return [_Part("", " ".join(result.error.split()), "")]
    return [_Part(*prompts.show_passage(number, passage)) for number, passage in enumerate(result.passages, start=1)]
