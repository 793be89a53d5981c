"""One corpus in several processes: each searches a part of it, and the best of all parts is the best of the whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from memsearcher_jax.agent.types import Passage


class Source(Protocol):
    def find(self, queries: list[str], top_n: int) -> list[list[Passage]]:
        """Return for each query, in order, up to `top_n` passages, best first. No query is blank or there twice."""


@dataclass(frozen=True)
class ShardedSource:
    """A `Source` of several, usually services, whose scores mean the same; every one is asked for every query.

    The result is that of one source with all passages, in the order of the parts. One that fails fails the search:
    half a corpus would pass for the whole.
    """

    parts: tuple[Source, ...]

    def find(self, queries: list[str], top_n: int) -> list[list[Passage]]:
        with ThreadPoolExecutor(len(self.parts)) as pool:
            found = list(pool.map(lambda part: part.find(queries, top_n), self.parts))
        return [merge(rankings, top_n) for rankings in zip(*found, strict=True)]


def merge(rankings: Iterable[Sequence[Passage]], top_n: int) -> list[Passage]:
    """The `top_n` highest scores of several rankings, best first; equal scores stay in the order of the rankings."""
    return sorted(chain.from_iterable(rankings), key=lambda passage: -passage.score)[:top_n]
