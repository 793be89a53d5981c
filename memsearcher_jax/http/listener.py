"""The socket on which a service listens."""

from __future__ import annotations

import os
import socket


def listen(host: str, port: int) -> socket.socket:
    """Binds the port, 0 for any free one. Raises OSError in one line."""
    try:
        # An address with a colon is one of IPv6; "::" listens on all interfaces, also for IPv4.
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        dualstack = host == "::" and socket.has_dualstack_ipv6()
        listener = socket.create_server((host, port), family=family, backlog=2_048, dualstack_ipv6=dualstack)
    except OSError as error:
        reason = error.strerror
        if error.errno is not None and error.errno > 0:  # errors of name resolution have negative numbers
            reason = os.strerror(error.errno)
        raise OSError(f"cannot listen on {host}:{port} ({reason}): choose another --host or --port") from error
    # Accepted connections inherit it. asyncio sets it on sockets that it opens itself; without it, the body of a
    # response waits for the client to acknowledge the headers, on a kept connection for 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
