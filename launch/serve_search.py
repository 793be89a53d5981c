"""Serves search over HTTP to this project's runs (--retrieval.url) and to clients of MemSearcher and Search-R1.

python launch/serve_search.py --retrieval.corpus FILE --out DIR          # builds an index in DIR, or finds it there
python launch/serve_search.py --retrieval.index DIR --port 8001          # an index that is built already
python launch/serve_search.py --checkpoint runs/NAME                     # what that run searches
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import cli

from memsearcher_jax.data.world import make_world
from memsearcher_jax.retrieval.config import HASHING, ServiceLimits
from memsearcher_jax.retrieval.search import Searcher, open_searcher
from memsearcher_jax.rl.run_folder import INDEX

DRAIN = 30  # seconds that requests under way have to end when the service is stopped


@dataclass(frozen=True)
class Serve(cli.Command):
    """Serve search over HTTP."""

    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0: all of this machine's. Whoever can reach it may search."""
    port: int = 8_000
    """Port to listen at; 0: any that is free."""
    limits: ServiceLimits = field(default_factory=ServiceLimits)


def main(argv: Sequence[str]) -> None:
    with contextlib.ExitStack() as open_things:
        with cli.one_line_errors():
            flags = cli.parse(Serve, argv)
            cli.refuse_resume(flags, "a service")
            check(flags)
            listener = open_things.enter_context(listen(flags.host, flags.port))
            scratch = open_things.enter_context(tempfile.TemporaryDirectory())
            searcher = searcher_of(flags, Path(scratch))
        serve(searcher, flags, listener)


def check(flags: Serve) -> None:
    """Raises ValueError for what is known to fail before anything is opened."""
    for name in ("fastapi", "uvicorn"):
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"{name} is not installed: pip install 'memsearcher_jax[serve]'")
    if flags.run.retrieval.url:
        raise ValueError("retrieval.url is for clients: leave it out, or point the clients there")
    if not 0 <= flags.port < 65_536:
        raise ValueError(f"--port {flags.port} is no port: choose one from 0 to 65535")
    for name, value in vars(flags.limits).items():
        if not value > 0:
            raise ValueError(f"--limits.{name} is {value}: it must be above 0")


def listen(host: str, port: int) -> socket.socket:
    """Takes the port before an index is built for it. Raises OSError, in one line, if it cannot be had."""
    try:
        return socket.create_server((host, port), backlog=2_048)
    except OSError as error:
        # The errors of a name carry negative numbers and words of their own.
        reason = os.strerror(error.errno) if (error.errno or 0) > 0 else error.strerror
        raise OSError(f"cannot listen at {host}:{port} ({reason}): choose another --host or --port") from error


def searcher_of(flags: Serve, scratch: Path) -> Searcher:
    """What the settings search. An index that must be built is kept in --out, or thrown away at the end."""
    config = flags.run.retrieval
    directory = cli.standing_index(flags.run) or (flags.out or scratch) / INDEX
    if config.encoder == HASHING or config.encoder_device == "cpu":
        # bm25s imports JAX in any case, which would take this host's accelerators; nothing here needs them.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if config.encoder == HASHING:
        return open_searcher(config, directory, make_world(flags.run.data.world).passages)
    from memsearcher_jax.rl import embedder

    return open_searcher(config, directory, (), partial(embedder.load, config))


def serve(searcher: Searcher, flags: Serve, listener: socket.socket) -> None:
    """Answers until it is told to stop by SIGTERM or Ctrl-C; requests under way are answered first."""
    import uvicorn

    from memsearcher_jax.retrieval.service import make_app

    source, method = searcher.source, flags.run.retrieval.method
    passages = len(source.corpus)
    app = make_app(searcher.search, flags.limits, {"method": method, "passages": passages, "scale": source.scale})
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=DRAIN))
    # uvicorn hands the signal on when all is answered: that is the end that was asked for, and no failure.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    host, port = listener.getsockname()[:2]
    print(f"{passages:,} passages, searched by {method}, at http://{host}:{port}", file=sys.stderr, flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
    print("stopped", file=sys.stderr)


if __name__ == "__main__":
    cli.run(main)
