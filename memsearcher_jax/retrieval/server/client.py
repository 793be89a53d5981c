"""The client of the search service."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any, ClassVar
from unicodedata import normalize

from memsearcher_jax.http.client import JsonClient, RequestRejected, ServiceUnavailable
from memsearcher_jax.retrieval.config import MAX_QUERY_CHARS
from memsearcher_jax.types import Passage, encodable


@dataclass(frozen=True)
class SearchClient(JsonClient):
    """A `Source` over HTTP."""

    setting: ClassVar[str] = "retrieval.url"

    def search(self, queries: list[str], top_n: int) -> list[list[Passage]]:
        """Raises ServiceUnavailable or RequestRejected, in one line with the address."""
        body = {"query": list(map(clean_query, queries)), "top_n": top_n, "return_score": True}
        response = self.request("POST", "/batch_search", body)
        try:
            documents_QN, scores_QN = response
            if not len(documents_QN) == len(scores_QN) == len(queries):
                raise ValueError(f"{len(documents_QN)} rankings for {len(queries)} queries")
            return [_ranking(*of_query) for of_query in zip(documents_QN, scores_QN, strict=True)]
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise RequestRejected(f"{self.url} did not return passages ({error})") from error

    def check(self, max_outage: float = 0.0) -> None:
        """Request the service's /health, for `max_outage` seconds while the service is unavailable.

        Raises ServiceUnavailable or RequestRejected.
        """
        deadline = time.monotonic() + max_outage
        while True:
            try:
                return self.request("GET", "/health", None)
            except ServiceUnavailable:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(1.0)


def clean_query(query: str) -> str:
    """The part of a query that is searched."""
    return encodable(query[:MAX_QUERY_CHARS])


def _ranking(documents_N: list[dict[str, Any]], scores_N: list[float]) -> list[Passage]:
    return [_passage(document, score) for document, score in zip(documents_N, scores_N, strict=True)]


def _passage(document: dict[str, Any], score: float) -> Passage:
    contents = document["contents"]
    if not isinstance(contents, str):
        raise TypeError(f"contents of type {type(contents).__name__}")
    number = float(score)
    if not math.isfinite(number):
        raise ValueError(f"a score is {number}")
    return Passage(encodable(str(document["id"])), normalize("NFC", encodable(contents)), number)
