"""Serves search over HTTP to runs of this project (--retrieval.url) and to clients of MemSearcher and Search-R1.

python launch/serve_search.py --retrieval.corpus FILE --out DIR          # builds the index in DIR, or reuses it
python launch/serve_search.py --retrieval.index DIR --port 8001          # an existing index
python launch/serve_search.py --checkpoint runs/NAME                     # the corpus of that run
"""

from __future__ import annotations

if __name__ == "__main__":
    import memsearcher_jax.launch.__main__  # noqa: F401  (runs `main` below)

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from memsearcher_jax.data.synthetic.encyclopedia import make_encyclopedia
from memsearcher_jax.http.listener import listen
from memsearcher_jax.launch import cli, preconditions
from memsearcher_jax.logs.progress import announced
from memsearcher_jax.ranges import Port
from memsearcher_jax.retrieval.config import HASHING, ConnectionLimits, ServiceLimits
from memsearcher_jax.retrieval.local_source import LocalSource
from memsearcher_jax.retrieval.search import Searcher, open_searcher
from memsearcher_jax.retrieval.search_process import SearchProcess
from memsearcher_jax.runs import hub
from memsearcher_jax.runs.run_dir import INDEX

DRAIN_SECONDS = 4  # for requests in flight when the service is stopped; a search that hangs is killed then


@dataclass(frozen=True)
class Serve(cli.Command):
    """Serve search over HTTP."""

    has_result: ClassVar[bool] = False

    out: cli.Directory = None
    """Directory for an index that has to be built. Default: a temporary one."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 or :: for all interfaces. Any client that can reach it may search."""
    port: Port = 8_000
    """Port to listen on; 0 for any free one."""
    limits: ServiceLimits = field(default_factory=ServiceLimits)


def main(argv: Sequence[str]) -> None:
    with contextlib.ExitStack() as resources:
        with cli.one_line_errors():
            flags = cli.parse(Serve, argv)
            preconditions.require_extra("serve", "fastapi", "uvicorn")
            retrieval = flags.run.retrieval
            if retrieval.url:
                raise ValueError("retrieval.url is for clients of a service: omit it")
            if flags.run.published_model and not (retrieval.corpus or retrieval.index):
                raise ValueError("--retrieval.index or --retrieval.corpus is missing: give passages, or --smoke_test")
            listener = resources.enter_context(listen(flags.host, flags.port))
            scratch = resources.enter_context(tempfile.TemporaryDirectory())
            with announced("opening the index"):
                searcher = make_searcher(flags, Path(scratch))

        from memsearcher_jax.retrieval.server.app import make_app

        source = searcher.source
        assert isinstance(source, LocalSource | SearchProcess), "retrieval.url is rejected"
        process = source if isinstance(source, SearchProcess) else None
        info = {"method": retrieval.method, **source.info}
        app = make_app(searcher.search, flags.limits, info, process)
        what = f"{source.info['passages']:,} passages by {retrieval.method}"
        run_server(app, flags.limits, listener, what, DRAIN_SECONDS, end=lambda: None)


def make_searcher(flags: Serve, scratch: Path) -> Searcher:
    """Opens the index that the settings name, or builds it in --out or `scratch`."""
    config = hub.local(flags.run).retrieval
    directory = preconditions.reusable_index(flags.run) or (flags.out or scratch) / INDEX
    if config.encoder == HASHING:
        # bm25s imports JAX, which would otherwise claim this host's accelerators.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    passages = make_encyclopedia(flags.run.data.encyclopedia).passages
    timeout = flags.limits.search_timeout
    return open_searcher(config, directory, passages, preconditions.load_encoder, search_timeout=timeout)


def run_server(
    app: Any, limits: ConnectionLimits, listener: socket.socket, what: str, drain_seconds: int, end: Callable[[], None]
) -> None:
    """Serves the app until SIGTERM, or Ctrl-C, which is raised; requests in flight are answered first, in time.

    `end` is called a second before those that are left are cancelled.
    """
    import uvicorn

    from memsearcher_jax.http.server import limited_protocol

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            asyncio.get_running_loop().call_later(drain_seconds - 1, end)
            await super().shutdown(sockets)

    protocol = limited_protocol(limits.max_connections, limits.read_timeout)
    # Python's HTTP clients reuse a connection within 5 seconds; uvicorn's default of 5 would close it under them.
    settings: dict[str, Any] = {"timeout_keep_alive": limits.read_timeout, "timeout_graceful_shutdown": drain_seconds}
    server = Server(uvicorn.Config(app, http=protocol, log_level="warning", access_log=False, **settings))
    # uvicorn re-raises SIGTERM after a graceful shutdown; the process should then exit with status 0.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    host, port = listener.getsockname()[:2]
    if ":" in host:
        host = f"[{host}]"
    print(f"serving {what} at http://{host}:{port}", file=sys.stderr, flush=True)
    server.run(sockets=[listener])
    print("stopped", file=sys.stderr)
