"""The search service of a rehearsal, which can be taken away; it searches the world of a preset."""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import cli
import serve_search

from memsearcher_jax.data.world import make_world
from memsearcher_jax.retrieval.client import SearchService

TORN = ('{"id": "torn", "question": "Who', '{"id": "empty", "question": "", "golden_answers": ["x"]}')
PATIENCE = ("--retrieval.attempts", "60", "--rl.search_seconds", "900")  # longer than any outage of a rehearsal


def write_questions(config: str, file: Path, *, torn: bool = False) -> list[str]:
    """Writes the training questions of the preset's world, with two that are none if `torn`; the flags for them."""
    world = make_world(cli.load_preset(config).data.world)
    rows = [json.dumps(dataclasses.asdict(one)) for one in world.train]
    if torn:
        rows[3:3] = TORN
    file.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return ["--data.train", str(file), "--data.malformed", "skip" if torn else "refuse"]


class Retriever:
    """launch/serve_search.py in a process of its own, for the passages of the preset's world."""

    def __init__(self, config: str, folder: Path, port: int):
        self._command = [sys.executable, serve_search.__file__, "--config", config, "--port", str(port)]
        self._command += ["--out", str(folder / "retriever")]
        self._port, self._log = port, folder / "retriever.log"
        self._process = self._start()

    @property
    def flags(self) -> list[str]:
        """With which a trainer searches here, and waits for it."""
        return ["--retrieval.url", f"http://127.0.0.1:{self._port}", *PATIENCE]

    def disturb(self, kind: str, seconds: float) -> None:
        """For so long it is gone (cut), does not answer (slow), or answers nonsense (garbage). Returns at once."""
        threading.Thread(target=self._disturb, args=(kind, seconds), daemon=True).start()

    def wait(self) -> None:
        """Returns when it answers. Raises ConnectionError if it does not in two minutes."""
        for _ in range(240):
            with contextlib.suppress(ConnectionError, ValueError):
                SearchService(f"http://127.0.0.1:{self._port}").check()
                return
            time.sleep(0.5)
        raise ConnectionError(f"the search service does not answer: see {self._log}")

    def close(self) -> None:
        """Ends the service."""
        self._process.kill()
        self._process.wait()

    def _start(self) -> subprocess.Popen:
        with open(self._log, "a") as log:
            return subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT)

    def _disturb(self, kind: str, seconds: float) -> None:
        over = threading.Event()
        if kind == "slow":
            self._process.send_signal(signal.SIGSTOP)
            over.wait(seconds)
            self._process.send_signal(signal.SIGCONT)
            return
        self.close()
        if kind == "garbage":
            with http.server.ThreadingHTTPServer(("127.0.0.1", self._port), Nonsense) as server:
                threading.Thread(target=server.serve_forever, daemon=True).start()
                over.wait(seconds)
                server.shutdown()
        else:
            over.wait(seconds)
        self._process = self._start()


class Nonsense(http.server.BaseHTTPRequestHandler):
    """Answers everything with status 200 and what is no answer."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'[[{"id": 1}], "<html>\xff')

    do_GET = do_POST

    def log_message(self, *_: object) -> None:
        """Says nothing: the service's own log tells of the outage."""
