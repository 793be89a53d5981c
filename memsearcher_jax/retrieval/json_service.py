"""Whoever speaks JSON over HTTP, asked with patience.

What may pass by itself is tried again: no connection, no answer in time, an answer that breaks off or is no JSON, as a
proxy's page is none, status 429 or 5xx. The pauses grow and are drawn at random, so that many clients do not come back
all at once. A service that fails again and again is left alone for a while. What will not pass, a refusal with its
reason, is an error at once.
"""

from __future__ import annotations

import http.client
import json
import random
import re
import socket
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from memsearcher_jax.retrieval.breaker import CircuitBreaker

ANSWER_BYTES = 1 << 28  # of one answer; no batch comes near it
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 10.0  # seconds, before jitter


class Unavailable(ConnectionError):
    """The service did not answer, or not so that it could be read, or answered that it cannot now."""


class Refused(ValueError):
    """The service refused the request, or answered with JSON that says something else than it should."""


@dataclass(frozen=True)
class JsonService:
    """A service at `url`, such as http://host:8000. `timeout` is in seconds and for one attempt as a whole.

    Threads may share it. Raises ValueError for a `url` that is none.
    """

    setting: ClassVar[str] = "url"  # under which a user gives the address; errors name it

    url: str
    timeout: float = 10.0
    attempts: int = 4
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker, compare=False)
    sleep: Callable[[float], None] = field(default=time.sleep, repr=False, compare=False)
    draw: Callable[[], float] = field(default=random.random, repr=False, compare=False)  # from [0, 1)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Addresses stand in logs and in run.json: what must not be read there is not repeated here either.
        if re.search(r"//[^/]*@|[?#]", self.url):
            raise ValueError(
                f"{self.setting} holds a user, a password or a query, which would be stored and logged: leave it out; "
                "a key comes from an environment variable"
            )
        try:
            parts = urllib.parse.urlsplit(self.url)
            usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # of the port
            usable = False
        if not usable:
            raise ValueError(f"{self.setting} {self.url!r} is no address: write it like http://host:8000")

    def ask(self, method: str, path: str, body: Any) -> Any:
        """The answer's JSON. Raises Unavailable (after all attempts) or Refused, each in one line with the address."""
        if wait := self.breaker.refuses():
            raise Unavailable(f"{self.url} kept failing and is left alone for another {wait:.0f} s")
        last = 1 if self.breaker.tripped else self.attempts
        for attempt in range(1, last + 1):
            try:
                answer = self.ask_once(method, path, body)
            except Unavailable as error:
                if attempt == last:
                    self.breaker.failed()
                    raise Unavailable(f"{error} (attempt {attempt} of {last})") from error
                self.sleep(self.draw() * min(LONGEST_PAUSE, FIRST_PAUSE * 2**attempt))
            except Refused:
                self.breaker.succeeded()  # whoever gives reasons is alive
                raise
            else:
                self.breaker.succeeded()
                return answer

    def ask_once(self, method: str, path: str, body: Any) -> Any:
        """One request and the JSON of its answer. Raises as `ask` does, at once."""
        parts = urllib.parse.urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname, parts.port, timeout=self.timeout)
        deadline = time.monotonic() + self.timeout
        try:
            data = None if body is None else json.dumps(body).encode()
            headers = {"Content-Type": "application/json", **self.headers}
            connection.request(method, parts.path.rstrip("/") + path, data, headers)
            status, text = _receive(connection, deadline)
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"{self.url} does not answer: {_reason(error)}") from error
        finally:
            connection.close()
        if status == 429 or status >= 500:
            raise Unavailable(f"{self.url} answered with status {status}: {self._without_secrets(text)}")
        if status != 200:
            raise Refused(f"{self.url} refused with status {status}: {self._without_secrets(text)}")
        try:
            return json.loads(text)
        except ValueError as error:
            reason = self._without_secrets(text)
            raise Unavailable(f"{self.url} answered with something else than JSON: {reason}") from error

    def _without_secrets(self, text: bytes) -> str:
        """The beginning of an answer, for errors. Some services repeat the key that they refuse."""
        for value in self.headers.values():
            for secret in {value, *value.split()} - {"Bearer"}:
                text = text.replace(secret.encode(), b"***")
        return shortened(text)


def shortened(text: bytes, most: int = 200) -> str:
    """The beginning of an answer, on one line."""
    return " ".join(text[:most].decode("utf-8", "replace").split())


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


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, socket.gaierror):
        return "no such host"
    return str(error) or type(error).__name__
