"""Limits of every service. No FastAPI here."""

from __future__ import annotations

from dataclasses import dataclass

from memsearcher_jax.ranges import LargeCount, Positive


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of the bodies and connections of a service."""

    max_body_bytes: LargeCount = 4_194_304
    """Bytes of the body of a request. It is parsed while other requests wait, a megabyte in about 0.1 s."""
    max_buffered_bytes: LargeCount = 67_108_864
    """Total bytes of the bodies of all unanswered requests; further requests are rejected with status 503."""
    max_connections: LargeCount = 1_024
    """Open connections; further ones are rejected with status 503."""
    read_timeout: Positive = 20.0
    """Seconds in which a client must send the headers of a request, and as many for its body; and after which it must
    have read more of a response."""
