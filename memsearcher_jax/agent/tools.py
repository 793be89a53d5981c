"""Runs tool calls: parses them, searches, and fits the results into a token budget."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.agent.prompts import Prompts
from memsearcher_jax.agent.protocol import parse_call
from memsearcher_jax.types import Query, Search, SearchResult, TextSpan, TokenCounter, Turn


@dataclass(frozen=True)
class ToolUse:
    """The tool calls of one reply and their results."""

    calls: tuple[str, ...]  # bodies of the calls that were run
    queries: tuple[Query, ...]  # of the calls that could be parsed
    results: tuple[SearchResult, ...]  # one per query
    message: tuple[TextSpan, ...]  # the user message that shows the results
    counts: dict[str, int]  # calls_ignored, calls_clipped, passages_clipped

    @property
    def error(self) -> str:
        """The error of the first failed search; "" if none failed. An unparsable call is not a failed search."""
        return next((result.error for result in self.results if result.error), "")

    def add_to(self, turn: Turn) -> Turn:
        observation = "".join(span.text for span in self.message)
        return replace(turn, calls=self.calls, queries=self.queries, results=self.results, observation=observation)


def run_tool_calls(
    bodies: Sequence[str], *, config: AgentConfig, prompts: Prompts, token_counter: TokenCounter
) -> Generator[Search, tuple[SearchResult, ...], ToolUse]:
    """Runs the first `config.max_calls` calls; calls and results share `config.observation_tokens`."""
    calls = tuple(bodies[: config.max_calls])
    parsed = [parse_call(body, default_top_n=config.default_top_n, max_top_n=config.max_top_n) for body in calls]
    queries = tuple(query for query in parsed if isinstance(query, Query))
    results = tuple((yield Search(queries)) if queries else ())
    remaining = iter(results)
    shown = [next(remaining) if isinstance(query, Query) else SearchResult(error=query) for query in parsed]
    pairs, clipped = fit_results(calls, shown, config.observation_tokens, prompts, token_counter)
    counts = {"calls_ignored": len(bodies) - len(calls), **clipped}
    return ToolUse(calls, queries, results, prompts.tool_message(pairs), counts)


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
    complete = [[_Part(call), *_parts(result, prompts)] for call, result in zip(calls, results, strict=True)]
    shares = iter(fair_shares([part.tokens(token_counter) for parts in complete for part in parts], budget))
    clipped = [[part.clip(next(shares), token_counter) for part in parts] for parts in complete]
    texts = [text for call, *passages in clipped for text in (call.text, "".join(map(str, passages)).strip())]
    # Joined passages may encode to a few tokens more than the same passages apart, so the joined text is clipped too.
    shares = fair_shares([token_counter.count(text) for text in texts], budget)
    texts = [token_counter.clip(text, share) for text, share in zip(texts, shares, strict=True)]
    changed = [[new != old for new, old in zip(*parts, strict=True)] for parts in zip(clipped, complete, strict=True)]
    counts = {
        "calls_clipped": sum(call for call, *_ in changed),
        "passages_clipped": sum(passage for _, *passages in changed for passage in passages),
    }
    return list(zip(texts[::2], texts[1::2], strict=True)), counts


@dataclass(frozen=True)
class _Part:
    """Outside text that shares the budget, and the template text around it."""

    text: str
    before: str = ""
    after: str = ""

    def template_tokens(self, token_counter: TokenCounter) -> int:
        return token_counter.count(self.before) + token_counter.count(self.after)

    def tokens(self, token_counter: TokenCounter) -> int:
        return token_counter.count(self.text) + self.template_tokens(token_counter)

    def clip(self, share: int, token_counter: TokenCounter) -> _Part:
        limit = max(0, share - self.template_tokens(token_counter))
        return replace(self, text=token_counter.clip(self.text, limit))

    def __str__(self) -> str:
        return self.before + self.text + self.after


def _parts(result: SearchResult, prompts: Prompts) -> list[_Part]:
    if result.error:
        return [_Part(" ".join(result.error.split()))]
    shown = (prompts.show_passage(number, passage) for number, passage in enumerate(result.passages, start=1))
    return [_Part(text, before, after) for before, text, after in shown]
