"""A client of any JSON service. Who calls it decides whether a request is repeated.

A failure may be temporary (`ServiceUnavailable`): no connection, a timeout, a truncated response, a response that is
not JSON (such as a proxy's error page), status 408, 429 and 5xx. Any other status is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import re
import ssl
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import httpx2


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
            if proxy_of(self.url):
                reason += " (through the proxy that the environment names)"
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
        content = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **self.headers}
        async with asyncio.timeout(self.timeout):
            async with async_client(self.url, headers) as client:
                response = await client.request(method, self.url.rstrip("/") + path, content=content)
        return response.status_code, response.content

    def _excerpt(self, text: bytes, max_bytes: int = 200) -> str:
        """The first bytes of a response on one line, without secrets: some services repeat the key they reject."""
        for value in self.headers.values():
            secrets = {value, *value.split()} - {"Bearer"}
            for secret in secrets:
                text = text.replace(secret.encode(), b"***")
        return " ".join(text[:max_bytes].decode("utf-8", "replace").split())


def async_client(
    url: str,
    headers: Mapping[str, str],
    event_hooks: Mapping[str, list[Any]] | None = None,
    app: Any = None,
) -> httpx2.AsyncClient:
    """A client for requests to `url`, through the proxy that the environment names for it; without time-outs.

    `app`: an ASGI application of this process that answers what goes to the host and port of `url`. Its errors are
    responses of status 500, as they are over a connection.
    """
    import httpx2

    proxy = proxy_of(url)
    mounts = {}
    if app is not None:
        parts = urllib.parse.urlsplit(url)
        mounts[f"{parts.scheme}://{parts.netloc}"] = httpx2.ASGITransport(app, raise_app_exceptions=False)
    try:
        return httpx2.AsyncClient(
            headers=dict(headers),
            timeout=None,
            trust_env=False,  # with it, a key of ~/.netrc would replace the one in `headers`
            proxy=proxy,
            verify=_certificates(),
            event_hooks=event_hooks,
            mounts=mounts,
        )
    except (ValueError, ImportError) as error:
        if proxy is None:
            raise
        # The address of a proxy may hold a password.
        raise ConnectionError(
            "the proxy in HTTP_PROXY, HTTPS_PROXY or ALL_PROXY cannot be used: use http://"
        ) from error


def is_unreachable(error: BaseException) -> bool:
    """Whether there was no connection, so that no request has reached the service."""
    import httpx2

    return isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.ProxyError)


def proxy_of(url: str) -> str | None:
    """The proxy for an address, of HTTP_PROXY, HTTPS_PROXY or ALL_PROXY; None where NO_PROXY excludes it.

    NO_PROXY lists names, of which it excludes subdomains too, addresses, and networks such as 10.0.0.0/8. This machine
    is never reached through a proxy.
    """
    proxies = urllib.request.getproxies_environment()
    parts = urllib.parse.urlsplit(url)
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    host = parts.hostname or ""
    if not proxy or host == "localhost" or urllib.request.proxy_bypass(parts.netloc):
        return None
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a name
        return proxy
    networks = []
    for entry in proxies.get("no", "").split(","):
        with contextlib.suppress(ValueError):  # a name, which was compared above
            networks.append(ipaddress.ip_network(entry.strip(), strict=False))
    if address.is_loopback or any(address in network for network in networks):
        return None
    return proxy


@cache
def _certificates() -> ssl.SSLContext:
    return ssl.create_default_context()
