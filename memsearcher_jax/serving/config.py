"""Settings of the service. No JAX here."""

from __future__ import annotations

from dataclasses import dataclass

from memsearcher_jax.http.config import ConnectionLimits
from memsearcher_jax.ranges import LargeCount, Positive


@dataclass(frozen=True)
class AgentLimits(ConnectionLimits):
    """Limits of a served agent."""

    max_requests: LargeCount = 1_024
    """Requests that are answered or wait; further ones are rejected with status 503."""
    request_timeout: Positive = 600.0
    """Seconds after which a request is cancelled, with status 504."""
    max_memories: LargeCount = 1_024
    """Memories that the MCP tools may create."""
