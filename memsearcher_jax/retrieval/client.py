"""Search by a service over HTTP, ours or any that speaks MemSearcher's `/batch_search`.

What may pass by itself is tried again: no connection, no answer in time, an answer that breaks off, status 429 or 5xx.
The pauses grow and are drawn at random, so that many clients do not come back all at once. A service that fails again
and again is left alone for a while. What will not pass, a refusal with its reason, is an error at once.
"""

from __future__ import annotations

import http.client
import json
import random
import socket
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from memsearcher_jax.agent.types import Passage
from memsearcher_jax.retrieval.breaker import CircuitBreaker

QUERY_CHARACTERS = 4_000  # what is beyond is cut: no encoder reads that far, and a service may refuse the whole batch
ANSWER_BYTES = 1 << 28  # of one answer; no batch comes near it
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 10.0  # seconds, before jitter


class SearchUnavailable(ConnectionError):
    """The service did not answer, or answered that it cannot now."""


class SearchRefused(ValueError):
    """The service refused the request, or answered something else than passages."""


@dataclass(frozen=True)
class SearchService:
    """A `Source` at `url`, such as http://host:8000. `timeout` is in seconds and for one attempt as a whole."""

    url: str
    timeout: float = 10.0
    attempts: int = 4
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker, compare=False)
    sleep: Callable[[float], None] = field(default=time.sleep, repr=False, compare=False)
    draw: Callable[[], float] = field(default=random.random, repr=False, compare=False)  # from [0, 1)

    def __post_init__(self) -> None:
        try:
            parts = urllib.parse.urlsplit(self.url)
            usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # of the port
            usable = False
        if not usable:
            raise ValueError(f"retrieval.url {self.url!r} is no address: write it like http://host:8000")

    def find(self, queries: list[str], top_n: int) -> list[list[Passage]]:
        """Raises SearchUnavailable (after all attempts) or SearchRefused, each in one line with the address."""
        texts = [_plain(query) for query in queries]
        answer = self._persistent("POST", "/batch_search", {"query": texts, "top_n": top_n, "return_score": True})
        try:
            return _passages(answer, len(queries))
        except (KeyError, TypeError, ValueError) as error:
            raise SearchRefused(f"{self.url} answered with something else than passages ({error})") from error

    def check(self) -> dict[str, Any]:
        """What the service tells of itself. Raises SearchUnavailable or SearchRefused if it is not well, at once."""
        told = self._attempt("GET", "/health", None)
        return told if isinstance(told, dict) else {}

    def _persistent(self, method: str, path: str, body: Any) -> Any:
        if wait := self.breaker.refuses():
            raise SearchUnavailable(f"{self.url} kept failing and is left alone for another {wait:.0f} s")
        last = 1 if self.breaker.tripped else self.attempts
        for attempt in range(1, last + 1):
            try:
                answer = self._attempt(method, path, body)
            except SearchUnavailable as error:
                if attempt == last:
                    self.breaker.failed()
                    raise SearchUnavailable(f"{error} (attempt {attempt} of {last})") from error
                self.sleep(self.draw() * min(LONGEST_PAUSE, FIRST_PAUSE * 2**attempt))
            except SearchRefused:
                self.breaker.succeeded()  # whoever gives reasons is alive
                raise
            else:
                self.breaker.succeeded()
                return answer

    def _attempt(self, method: str, path: str, body: Any) -> Any:
        """One request and the JSON of its answer."""
        parts = urllib.parse.urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname, parts.port, timeout=self.timeout)
        deadline = time.monotonic() + self.timeout
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, parts.path.rstrip("/") + path, data, {"Content-Type": "application/json"})
            status, text = _receive(connection, deadline)
        except (OSError, http.client.HTTPException) as error:
            raise SearchUnavailable(f"{self.url} does not answer: {_reason(error)}") from error
        finally:
            connection.close()
        if status == 429 or status >= 500:
            raise SearchUnavailable(f"{self.url} answered with status {status}: {_shortened(text)}")
        if status != 200:
            raise SearchRefused(f"{self.url} refused with status {status}: {_shortened(text)}")
        try:
            return json.loads(text)
        except ValueError as error:
            raise SearchRefused(f"{self.url} answered with something else than JSON: {_shortened(text)}") from error


def _receive(connection: http.client.HTTPConnection, deadline: float) -> tuple[int, bytes]:
    """Status and body. Raises TimeoutError at the deadline, however slowly the bytes drip until then."""
    response = connection.getresponse()
    parts, size = [], 0
    while part := response.read1():
        parts.append(part)
        size += len(part)
        if size > ANSWER_BYTES:
            raise http.client.HTTPException(f"more than {ANSWER_BYTES:,} bytes")
        if (left := deadline - time.monotonic()) <= 0:
            raise TimeoutError
        if connection.sock is not None:  # closed already where the answer ends with the connection
            connection.sock.settimeout(left)
    if response.length:
        raise http.client.IncompleteRead(b"".join(parts), response.length)
    return response.status, b"".join(parts)


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


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, socket.gaierror):
        return "no such host"
    return str(error) or type(error).__name__


def _shortened(text: bytes, most: int = 200) -> str:
    return " ".join(text[:most].decode("utf-8", "replace").split())
