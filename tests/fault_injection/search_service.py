"""A search service that can be disturbed; it serves the synthetic encyclopedia of a preset."""

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

from memsearcher_jax.data.synthetic.encyclopedia import make_encyclopedia
from memsearcher_jax.launch import cli, serve_search
from memsearcher_jax.retrieval.server.client import SearchClient

MALFORMED_ROWS = ('{"id": "torn", "question": "Who', '{"id": "empty", "question": "", "golden_answers": ["x"]}')
RETRY_FLAGS = ("--retrieval.max_attempts", "60", "--rl.search_timeout", "900")  # longer than any injected outage


def write_questions(config: str, file: Path, *, malformed: bool = False) -> list[str]:
    """Writes the preset's training questions, with MALFORMED_ROWS if asked; returns the flags that read them."""
    encyclopedia = make_encyclopedia(cli.load_preset(config).data.encyclopedia)
    rows = [json.dumps(dataclasses.asdict(problem)) for problem in encyclopedia.train]
    if malformed:
        rows[3:3] = MALFORMED_ROWS
    file.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return ["--data.train", str(file), "--data.malformed", "skip" if malformed else "error"]


class FaultySearchService:
    """launch/serve_search.py in a process of its own."""

    def __init__(self, config: str, folder: Path, port: int):
        self._command = [sys.executable, serve_search.__file__, "--config", config, "--port", str(port)]
        self._command += ["--out", str(folder / "search_service")]
        self._port, self._log = port, folder / "search_service.log"
        self._process = self._start()

    @property
    def flags(self) -> list[str]:
        """Flags of a trainer that searches here and survives outages."""
        return ["--retrieval.url", f"http://127.0.0.1:{self._port}", *RETRY_FLAGS]

    def disturb(self, kind: str, seconds: float) -> None:
        """Starts a search_outage, search_hang or search_garbage that ends after `seconds`."""
        threading.Thread(target=self._disturb, args=(kind, seconds), daemon=True).start()

    def wait(self) -> None:
        """Waits until it answers. Raises ConnectionError after two minutes."""
        for _ in range(240):
            with contextlib.suppress(ConnectionError, ValueError):
                SearchClient(f"http://127.0.0.1:{self._port}").check()
                return
            time.sleep(0.5)
        raise ConnectionError(f"the search service does not answer: see {self._log}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _start(self) -> subprocess.Popen:
        with open(self._log, "a") as log:
            return subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT)

    def _disturb(self, kind: str, seconds: float) -> None:
        if kind == "search_hang":
            self._process.send_signal(signal.SIGSTOP)
            time.sleep(seconds)
            self._process.send_signal(signal.SIGCONT)
            return
        self.close()
        if kind == "search_garbage":
            with http.server.ThreadingHTTPServer(("127.0.0.1", self._port), GarbageHandler) as server:
                threading.Thread(target=server.serve_forever, daemon=True).start()
                time.sleep(seconds)
                server.shutdown()
        else:
            time.sleep(seconds)
        self._process = self._start()


class GarbageHandler(http.server.BaseHTTPRequestHandler):
    """Answers every request with status 200 and invalid JSON."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'[[{"id": 1}], "<html>\xff')

    do_GET = do_POST

    def log_message(self, *_: object) -> None:
        """The trainer's log reports the outage."""
