"""What workflows do with tool calls: parse, search, and show the results within a token budget."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from memsearcher_jax.agent.prompts import Prompts
from memsearcher_jax.agent.protocol import parse_call
from memsearcher_jax.agent.types import AgentConfig, Find, Found, Piece, Query, Ruler


@dataclass(frozen=True)
class ToolUse:
    """One reply's tool calls and what came of them."""

    calls: tuple[str, ...]  # bodies of the calls that were run
    queries: tuple[Query, ...]  # of those that could be parsed
    found: tuple[Found, ...]  # one for each query
    message: tuple[Piece, ...]  # the user message that shows the results
    counts: dict[str, int]  # calls_ignored, calls_clipped, passages_clipped

    @property
    def error(self) -> str:
        """Why the first failed search failed; "" if none did. A call that can not be parsed is no failed search."""
        return next((found.error for found in self.found if found.error), "")

    @property
    def observation(self) -> str:
        return "".join(piece.text for piece in self.message)


def use_tools(
    bodies: Sequence[str], *, config: AgentConfig, prompts: Prompts, ruler: Ruler
) -> Generator[Find, tuple[Found, ...], ToolUse]:
    """Runs the first `config.max_calls` calls; their echoes and results share `config.observation_tokens`."""
    calls = tuple(bodies[: config.max_calls])
    parsed = [parse_call(body, default_top_n=config.default_top_n, max_top_n=config.max_top_n) for body in calls]
    queries = tuple(query for query in parsed if isinstance(query, Query))
    found = (yield Find(queries)) if queries else ()
    answers = iter(found)
    results = [next(answers) if isinstance(query, Query) else Found(error=query) for query in parsed]
    shown, clipped = fit_results(calls, results, config.observation_tokens, prompts, ruler)
    counts = {"calls_ignored": len(bodies) - len(calls), **clipped}
    return ToolUse(calls, queries, tuple(found), prompts.message(shown), counts)


def fair_shares(demands: Sequence[int], budget: int) -> list[int]:
    """Splits `budget` so that the smallest share that was cut is as large as can be (max-min fairness).

    Nobody gets more than its demand, and what the short ones leave goes to the long ones.
    """
    shares = [0] * len(demands)
    left = budget
    for rank, index in enumerate(sorted(range(len(demands)), key=demands.__getitem__)):
        shares[index] = min(demands[index], left // (len(demands) - rank))
        left -= shares[index]
    return shares


def fit_results(
    calls: Sequence[str], results: Sequence[Found], budget: int, prompts: Prompts, ruler: Ruler
) -> tuple[list[tuple[str, str]], dict[str, int]]:
    """(call, result) pairs of at most `budget` tokens together, and how many calls and passages were clipped."""
    whole = [[_Part(call), *_parts(result, prompts)] for call, result in zip(calls, results, strict=True)]
    shares = iter(fair_shares([part.demand(ruler) for parts in whole for part in parts], budget))
    clipped = [[part.clip(next(shares), ruler) for part in parts] for parts in whole]
    texts = [text for call, *rest in clipped for text in (call.text, "".join(map(str, rest)).strip())]
    # Joined passages may encode to a few tokens more than the same passages apart, so the joined text counts too.
    shares = fair_shares([ruler.count(text) for text in texts], budget)
    texts = [ruler.clip(text, share) for text, share in zip(texts, shares, strict=True)]
    cut = [[new != old for new, old in zip(*parts, strict=True)] for parts in zip(clipped, whole, strict=True)]
    counts = {
        "calls_clipped": sum(call for call, *_ in cut),
        "passages_clipped": sum(passage for _, *passages in cut for passage in passages),
    }
    return list(zip(texts[::2], texts[1::2], strict=True)), counts


@dataclass(frozen=True)
class _Part:
    """Outside text that shares the budget, with what a template puts around it."""

    text: str
    before: str = ""
    after: str = ""

    def frame(self, ruler: Ruler) -> int:
        return ruler.count(self.before) + ruler.count(self.after)

    def demand(self, ruler: Ruler) -> int:
        return ruler.count(self.text) + self.frame(ruler)

    def clip(self, share: int, ruler: Ruler) -> _Part:
        return _Part(ruler.clip(self.text, max(0, share - self.frame(ruler))), self.before, self.after)

    def __str__(self) -> str:
        return self.before + self.text + self.after


def _parts(found: Found, prompts: Prompts) -> list[_Part]:
    if found.error:
        return [_Part(" ".join(found.error.split()))]
    return [_Part(passage.contents, *prompts.passage) for passage in found.passages]
