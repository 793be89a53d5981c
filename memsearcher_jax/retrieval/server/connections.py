"""uvicorn's HTTP protocol with a limit on connections, and on the time in which a client must send a request's headers.

uvicorn has neither: a client that sends half a header would keep its connection, and a process without free file
descriptors resets new connections without a word.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

RESERVED_FILES = 64  # descriptors for the index, logs and the loop itself
BUSY = b'{"detail":"too many connections; retry later"}'
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: %d\r\nRetry-After: 1\r\n"
    b"Connection: close\r\n\r\n%s" % (len(BUSY), BUSY)
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
