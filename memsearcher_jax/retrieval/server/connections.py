"""Limits that uvicorn and Starlette lack: connections, the bytes of all bodies, and the time to send a request.

Without them a client that sends half a header would keep its connection, and a process without free file descriptors
resets new connections without a word. Starlette limits the body of one request, without a JSON error.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import Callable
from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from uvicorn.protocols.http.h11_impl import H11Protocol

from memsearcher_jax.retrieval.config import ConnectionLimits

RESERVED_FILES = 64  # descriptors for the index, logs and the loop itself
TOO_MANY = b'{"detail":"too many connections; retry later"}'
BUSY = "too many requests are being received; retry later"
DRAINED_BODIES = 16  # times the allowed size, which are read from a client whose body is refused
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: %d\r\nRetry-After: 1\r\n"
    b"Connection: close\r\n\r\n%s" % (len(TOO_MANY), TOO_MANY)
)


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

        def connection_lost(self, exc: Exception | None) -> None:
            if self._deadline:
                self._deadline.cancel()
            super().connection_lost(exc)

        def _expect_request(self) -> None:
            if self._deadline:
                self._deadline.cancel()
            self._deadline = self.loop.call_later(read_timeout, self._close_without_request)

        def _close_without_request(self) -> None:
            if self.cycle is None or self.cycle.response_complete:
                self.transport.close()

    return LimitedProtocol


class BodyLimit:
    """ASGI middleware: rejects bodies that are too large (413), too slow (408), or too many at a time (503).

    A body whose Content-Length is too large is never stored.
    """

    def __init__(
        self,
        app: Callable,
        limits: ConnectionLimits,
        error: Callable[[int, str], Any] = lambda status, reason: {"detail": reason},
    ):
        self.app, self.limits, self.error, self.reserved = app, limits, error, 0  # bytes of all bodies

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, limits, loop = Headers(scope=scope), self.limits, asyncio.get_running_loop()
        length, too_large = headers.get("content-length", ""), f"the body is larger than {limits.max_body_bytes} bytes"
        received, reserved = 0, int(length) if length.isdecimal() else 0
        complete, deadline = False, loop.time() + limits.read_timeout

        async def read() -> dict:
            nonlocal received, complete
            try:
                async with asyncio.timeout_at(None if complete else deadline):
                    message = await receive()
            except TimeoutError:
                reason = f"the body did not arrive within {limits.read_timeout:g} s"
                raise HTTPException(408, reason, {"Connection": "close"}) from None
            received, complete = received + len(message.get("body", b"")), not message.get("more_body", False)
            return message

        async def drain() -> None:
            """A client that is still sending when the connection closes does not read the response."""
            while not complete and received < DRAINED_BODIES * limits.max_body_bytes:
                await read()

        async def limited() -> dict:
            nonlocal reserved
            message = await read()
            if received > reserved:  # the length was not declared
                self.reserved, reserved = self.reserved + received - reserved, received
            if received > limits.max_body_bytes:
                await drain()
                raise HTTPException(413, too_large, {"Connection": "close"})
            if self.reserved > limits.max_buffered_bytes:
                raise HTTPException(503, BUSY, {"Connection": "close", "Retry-After": "1"})
            return message

        async def refuse(status: int, reason: str) -> None:
            if headers.get("expect", "").lower() != "100-continue":  # such a client has not sent the body yet
                with contextlib.suppress(HTTPException):
                    await drain()
            response_headers = {"Connection": "close"} | ({"Retry-After": "1"} if status == 503 else {})
            await JSONResponse(self.error(status, reason), status, response_headers)(scope, receive, send)

        if reserved > limits.max_body_bytes:
            await refuse(413, too_large)
            return
        if self.reserved + reserved > limits.max_buffered_bytes:
            await refuse(503, BUSY)
            return
        self.reserved += reserved
        try:
            await self.app(scope, limited, send)
        finally:
            self.reserved -= reserved
