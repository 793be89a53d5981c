"""What the services share: errors, and limits that uvicorn and Starlette lack.

The limits are of connections, of the bytes of all bodies, and of how slow a client may be.

Without them a client that sends half a header or does not read its response would keep its connection, and a process
without free file descriptors resets new connections without a word. Starlette limits the body of one request, without a
JSON error.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import Field
from starlette.datastructures import Headers
from uvicorn.protocols.http.h11_impl import H11Protocol

from memsearcher_jax.http.config import ConnectionLimits

RESERVED_FILES = 64  # descriptors for the index, logs and the loop itself
TOO_MANY = b'{"detail":"too many connections; retry later"}'
DRAINED_BODIES = 16  # times the allowed size, which are read from a client whose body is refused
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: %d\r\nRetry-After: 1\r\n"
    b"Connection: close\r\n\r\n%s" % (len(TOO_MANY), TOO_MANY)
)

Count = Annotated[int, Field(ge=1)]


def first_error(error: RequestValidationError) -> tuple[str, str]:
    """(field, reason) of the first error; no field if the whole body is wrong."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":  # whose location is a position in the text
        return "", first["msg"]
    location = ".".join(map(str, first["loc"][1:]))
    if not location:
        return "", "a JSON object is needed, with Content-Type: application/json"
    return location, first["msg"]


class Overloaded(Exception):
    """More requests wait than the limits allow."""


def limited_protocol(max_connections: int, read_timeout: float) -> type[asyncio.Protocol]:
    """The protocol class for uvicorn's setting `http`. `max_connections` is lowered to what the system allows."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY:
        max_connections = max(1, min(max_connections, files - RESERVED_FILES))

    class LimitedProtocol(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                transport.write(REFUSAL)
                transport.close()
            else:
                self._expect_request()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._expect_request()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._expect_reading()

        def connection_lost(self, exc: Exception | None) -> None:
            if self._deadline:
                self._deadline.cancel()
            super().connection_lost(exc)

        def _expect_request(self) -> None:
            if self._deadline:
                self._deadline.cancel()
            self._deadline = self.loop.call_later(read_timeout, self._close_without_request)

        def _expect_reading(self, before: int | None = None) -> None:
            """Ends a connection whose client read nothing for `read_timeout` seconds, since `before` bytes waited."""
            unsent = self.transport.get_write_buffer_size()
            has_read_nothing = before is not None and unsent >= before
            if has_read_nothing:
                self.transport.abort()  # closing it would wait for the client
            elif unsent:
                self.loop.call_later(read_timeout, self._expect_reading, unsent)

        def _close_without_request(self) -> None:
            if self.cycle is None or self.cycle.response_complete:
                self.transport.close()

    return LimitedProtocol


class _Refusal(NamedTuple):
    """Why a request is refused."""

    status: int  # of HTTP
    reason: str


@dataclass
class BodyLimit:
    """ASGI middleware: rejects bodies that are too large (413), too slow (408), or too many at a time (503).

    A body is read before the application is called, and one whose Content-Length is too large is never stored.
    """

    app: Callable
    limits: ConnectionLimits
    error: Callable[[int, str], Any] = lambda status, reason: {"detail": reason}
    reserved: int = 0  # bytes of the bodies of all unanswered requests

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        length = headers.get("content-length", "")
        reserved = int(length) if length.isdecimal() else 0
        self.reserved += reserved
        try:
            refusal = self._refusal(reserved)
            # A client reads the response after it has sent the body, unless it waits for "100 Continue" before.
            awaits_continue = headers.get("expect", "").lower() == "100-continue"
            max_drained = 0 if awaits_continue else DRAINED_BODIES * self.limits.max_body_bytes
            body = bytearray()
            received = 0
            is_complete = False
            try:
                async with asyncio.timeout(self.limits.read_timeout):
                    while not is_complete and (refusal is None or received < max_drained):
                        message = await receive()
                        if message["type"] == "http.disconnect":
                            return
                        chunk = message.get("body", b"")
                        is_complete = not message.get("more_body", False)
                        received += len(chunk)
                        undeclared = max(0, received - reserved)
                        self.reserved += undeclared
                        reserved += undeclared
                        refusal = refusal or self._refusal(received)
                        if refusal:
                            body.clear()
                        else:
                            body += chunk
            except TimeoutError:
                late = _Refusal(408, f"the body did not arrive within {self.limits.read_timeout:g} s")
                refusal = refusal or late
            if refusal:
                extra_headers = {"Connection": "close"}
                if refusal.status == 503:
                    extra_headers["Retry-After"] = "1"
                response = JSONResponse(self.error(refusal.status, refusal.reason), refusal.status, extra_headers)
                await response(scope, receive, send)
                return
            messages = [{"type": "http.request", "body": bytes(body)}]

            async def replay() -> dict:
                return messages.pop() if messages else await receive()

            await self.app(scope, replay, send)
        finally:
            self.reserved -= reserved

    def _refusal(self, size: int) -> _Refusal | None:
        """Why a body of `size` bytes is not read, or None."""
        if size > self.limits.max_body_bytes:
            return _Refusal(413, f"the body is larger than {self.limits.max_body_bytes} bytes")
        if self.reserved > self.limits.max_buffered_bytes:
            return _Refusal(503, "too many requests are being received; retry later")
        return None
