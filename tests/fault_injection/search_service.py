"""A search service that can be stopped for a while; it serves the synthetic encyclopedia of a preset."""

from __future__ import annotations

import contextlib
import dataclasses
import json
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

    def interrupt(self, seconds: float) -> None:
        """Stops the service, and starts it again after `seconds`."""

        def interrupt() -> None:
            self.close()
            time.sleep(seconds)
            self._process = self._start()

        threading.Thread(target=interrupt, daemon=True).start()

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
