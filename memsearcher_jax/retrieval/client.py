"""Search by a service over HTTP, ours or any that speaks MemSearcher's `/batch_search`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from memsearcher_jax.agent.types import Passage
from memsearcher_jax.retrieval.json_service import JsonService
from memsearcher_jax.retrieval.json_service import Refused as SearchRefused
from memsearcher_jax.retrieval.json_service import Unavailable as SearchUnavailable

__all__ = ["SearchRefused", "SearchService", "SearchUnavailable"]

QUERY_CHARACTERS = 4_000  # what is beyond is cut: no encoder reads that far, and a service may refuse the whole batch


@dataclass(frozen=True)
class SearchService(JsonService):
    """A `Source` at `url`, such as http://host:8000."""

    setting: ClassVar[str] = "retrieval.url"

    def find(self, queries: list[str], top_n: int) -> list[list[Passage]]:
        """Raises SearchUnavailable (after all attempts) or SearchRefused, each in one line with the address."""
        texts = [_plain(query) for query in queries]
        answer = self.ask("POST", "/batch_search", {"query": texts, "top_n": top_n, "return_score": True})
        try:
            return _passages(answer, len(queries))
        except (KeyError, TypeError, ValueError) as error:
            raise SearchRefused(f"{self.url} answered with something else than passages ({error})") from error

    def check(self) -> dict[str, Any]:
        """What the service tells of itself. Raises SearchUnavailable or SearchRefused if it is not well, at once."""
        told = self.ask_once("GET", "/health", None)
        return told if isinstance(told, dict) else {}


def _passages(answer: Any, queries: int) -> list[list[Passage]]:
    documents_QN, scores_QN = answer
    if not len(documents_QN) == len(scores_QN) == queries:
        raise ValueError(f"{len(documents_QN)} rankings for {queries} queries")
    return [
        [
            Passage(str(document["id"]), _text(document["contents"]), float(score))
            for document, score in zip(documents_N, scores_N, strict=True)
        ]
        for documents_N, scores_N in zip(documents_QN, scores_QN, strict=True)
    ]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"contents of type {type(value).__name__}")
    return value


def _plain(query: str) -> str:
    """Cut to length, and without the halves of surrogate pairs, which no service could read."""
    return query[:QUERY_CHARACTERS].encode("utf-8", "replace").decode()
