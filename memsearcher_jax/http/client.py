"""A client of any JSON service. Who calls it decides whether a request is repeated.

A failure may be temporary (`ServiceUnavailable`): no connection, a timeout, a truncated response, a response that is
not JSON (such as a proxy's error page), status 408, 429 and 5xx. Any other status is not.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar


class ServiceUnavailable(ConnectionError):
    """The service did not respond, or its response is unreadable or reports a temporary failure."""


class RequestRejected(ValueError):
    """The service rejected the request, or its response is JSON of an unexpected form."""


@dataclass(frozen=True)
class JsonClient:
    """A thread-safe client of a service, such as http://host:8000. Raises ValueError for an invalid `url`."""

    setting: ClassVar[str] = "url"  # the setting that holds the address, for error messages

    url: str
    timeout: float = 10.0  # seconds of a request: connection, headers and body together
    headers: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if re.search(r"//[^/]*@|[?#]", self.url):  # the message must not repeat it
            raise ValueError(
                f"{self.setting} contains a user, a password or a query, which would be stored and logged: remove it; "
                "pass keys in an environment variable"
            )
        try:
            parts = urllib.parse.urlsplit(self.url)
            is_valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # raised for an invalid port
            is_valid = False
        if not is_valid:
            raise ValueError(f"{self.setting} {self.url!r} is not a valid address: write it like http://host:8000")

    def request(self, method: str, path: str, body: Any) -> Any:
        """Return the JSON of the response.

        Raises ServiceUnavailable or RequestRejected, in one line with the address.
        """
        import httpx2  # which takes a tenth of a second, and most commands send nothing

        try:
            status, text = asyncio.run(self._send(method, path, body))
        except TimeoutError as error:
            raise ServiceUnavailable(f"{self.url} does not respond within {self.timeout:g} s") from error
        except (OSError, UnicodeError, httpx2.HTTPError, httpx2.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            raise ServiceUnavailable(f"{self.url} does not respond: {reason}") from error
        self.check_status(status, text)
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ServiceUnavailable(f"{self.url} did not return JSON: {self._excerpt(text)}") from error

    def check_status(self, status: int, text: bytes) -> None:
        """Raises what a status other than 200 means, with the beginning of the response."""
        if status in (408, 429) or status >= 500:
            raise ServiceUnavailable(f"{self.url} returned status {status}: {self._excerpt(text)}")
        if status != 200:
            raise RequestRejected(f"{self.url} rejected the request with status {status}: {self._excerpt(text)}")

    async def _send(self, method: str, path: str, body: Any) -> tuple[int, bytes]:
        """Status and body of the response. Raises TimeoutError: the time-outs of httpx bound each read alone."""
        import httpx2

        content = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **self.headers}
        async with asyncio.timeout(self.timeout):
            async with httpx2.AsyncClient(timeout=None, trust_env=False, verify=_certificates()) as client:
                response = await client.request(method, self.url.rstrip("/") + path, content=content, headers=headers)
        return response.status_code, response.content

    def _excerpt(self, text: bytes, max_bytes: int = 200) -> str:
        """The first bytes of a response on one line, without secrets: some services repeat the key they reject."""
        for value in self.headers.values():
            secrets = {value, *value.split()} - {"Bearer"}
            for secret in secrets:
                text = text.replace(secret.encode(), b"***")
        return " ".join(text[:max_bytes].decode("utf-8", "replace").split())


@cache
def _certificates() -> ssl.SSLContext:
    return ssl.create_default_context()
