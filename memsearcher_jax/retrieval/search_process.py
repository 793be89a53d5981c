"""Search in a process of its own: a search that hangs in a library or on a disk ends only with its process.

The child opens the index and searches one batch at a time. It answers after every 64 queries, which is its heartbeat:
when no answer comes in time, or the child dies, the search fails, and another child opens the index. The text encoder
stays in the parent, which has the accelerators, and the child gets vectors. A child ends when its parent does. Messages
are lines of JSON.

python -m memsearcher_jax.retrieval.search_process    # the child; requests come on stdin
"""

from __future__ import annotations

import base64
import json
import logging
import os
import queue
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from memsearcher_jax.retrieval.config import RetrievalConfig
from memsearcher_jax.retrieval.hashing_encoder import TextEncoder
from memsearcher_jax.types import Passage

COMMAND = (sys.executable, "-m", "memsearcher_jax.retrieval.search_process")
QUERIES_PER_ANSWER = 64
REOPEN_TIMEOUT = 600.0  # seconds in which a child that replaces another must have opened the index
ERRORS = {"OSError": OSError, "ValueError": ValueError}  # whose messages are for users

log = logging.getLogger(__name__)


class SearchRestarting(ConnectionError):
    """The search process is not ready, through no fault of this search."""


class SearchProcess:
    """A `Source` over the corpus or index that `config` names. Thread-safe; one batch is searched at a time.

    Args:
      model: embeds the queries, unless the encoder is the hashing encoder.
      timeout: seconds between two answers of the child, after which it is killed and replaced.

    Raises:
      OSError, ValueError: one line with the corpus or index that cannot be used, and the reason.
    """

    def __init__(
        self,
        config: RetrievalConfig,
        directory: Path,
        model: TextEncoder | None = None,
        timeout: float = 30.0,
        command: Sequence[str] = COMMAND,
    ):
        self._request = {"config": asdict(config), "directory": str(directory), "encoder": model.name if model else ""}
        self._model, self._timeout, self._command = model, timeout, command
        self._lock = threading.Lock()
        self._opening: threading.Thread | None = None
        self._processes: list[subprocess.Popen] = []
        self._end = weakref.finalize(self, _kill, self._processes)  # called at the end of the parent, too
        self._open(None)

    @property
    def is_healthy(self) -> bool:
        """Whether the child lives and has the index open."""
        return self._child.process.poll() is None

    def close(self) -> None:
        """Kill the child. A search in progress fails, and so does every later one."""
        self._end()

    def search(self, queries: list[str], top_n: int) -> list[list[Passage]]:
        """As `Source.search`.

        Raises:
          TimeoutError: the child did not answer in time, or died.
          SearchRestarting: the child is being replaced, or is busy with another search.
        """
        message: dict[str, Any] = {"queries": queries, "top_n": top_n}
        if self._model:
            vectors_QD = self._model.queries(queries)
            message |= {"vectors": base64.b64encode(vectors_QD.tobytes()).decode(), "size": vectors_QD.shape[1]}
        if not self._lock.acquire(timeout=self._timeout):
            raise SearchRestarting(f"the search process has been busy for {self._timeout:g} s")
        try:
            if not self.is_healthy:
                self._replace().join(self._timeout)
                if not self.is_healthy:
                    raise SearchRestarting("the search process is being restarted")
            answers = self._child.call(message, -(-len(queries) // QUERIES_PER_ANSWER), self._timeout)
            return [[Passage(*passage) for passage in ranking] for answer in answers for ranking in answer["results"]]
        except TimeoutError:
            self._child.process.kill()
            self._child.process.wait()
            self._replace()
            raise
        finally:
            self._lock.release()

    def _open(self, timeout: float | None) -> None:
        child = _Child(self._command)
        self._processes[:] = [child.process]
        (answer,) = child.call(self._request, 1, timeout)
        self.info: dict[str, Any] = answer["info"]
        self._child = child

    def _replace(self) -> threading.Thread:
        """Start another child, unless one is starting, and return the thread that waits for it."""
        if not self._end.alive:
            raise SearchRestarting("the search is closed")
        if self._opening is None or not self._opening.is_alive():
            self._opening = threading.Thread(target=self._reopen, daemon=True)
            self._opening.start()
        return self._opening

    def _reopen(self) -> None:
        try:
            self._open(REOPEN_TIMEOUT)
        except (OSError, ValueError, RuntimeError) as error:  # the next search tries again
            log.error("the search process did not open the index: %s", error)
            _kill(self._processes)


class _Child:
    """A process and the lines that it writes."""

    def __init__(self, command: Sequence[str]):
        # Ctrl-C of a terminal reaches all processes of a session, and the parent decides when this one ends.
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)
        self._lines = queue.SimpleQueue[bytes]()
        threading.Thread(target=self._read, daemon=True).start()

    def call(self, message: dict[str, Any], answers: int, timeout: float | None) -> list[dict[str, Any]]:
        """Send a request, and return its answers. Raises TimeoutError, or the error that the child reports."""
        # A child that hangs does not read, and then a write blocks.
        line = json.dumps(message).encode() + b"\n"
        threading.Thread(target=self._write, args=(line,), daemon=True).start()
        received = []
        for _ in range(answers):
            try:
                line = self._lines.get(timeout=timeout)
            except queue.Empty:
                raise TimeoutError(f"the search has no answer within {timeout:g} s") from None
            if not line.endswith(b"\n"):
                raise TimeoutError(f"the search process ended with status {self.process.wait()}")
            received.append(answer := json.loads(line))
            if "error" in answer:
                raise ERRORS.get(answer["error"], RuntimeError)(answer["message"])
        return received

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(b"")

    def _write(self, line: bytes) -> None:
        assert self.process.stdin
        try:
            self.process.stdin.write(line)
            self.process.stdin.flush()
        except OSError:  # the child died, which `call` notices
            pass


def _kill(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        process.kill()
        process.wait()


def main() -> None:
    """The child."""
    stdout = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries that print must not disturb the messages
    # bm25s imports JAX if it is installed, which takes seconds and claims accelerators, and searches with it.
    sys.modules["jax"] = None  # pyright: ignore[reportArgumentType]
    requests = queue.SimpleQueue[bytes]()
    threading.Thread(target=_receive, args=(requests,), daemon=True).start()

    def answer(value: dict[str, Any]) -> None:
        stdout.write(json.dumps(value).encode() + b"\n")
        stdout.flush()

    vectors = [np.zeros((0, 0), np.float32)]  # of the queries that are being searched
    try:
        source = _open_source(json.loads(requests.get()), vectors)
        answer({"info": source.info})
    except Exception as error:
        answer(_report(error))
        return
    while True:
        try:
            for found in _search(source, json.loads(requests.get()), vectors):
                answer({"results": found})
        except Exception as error:
            answer(_report(error))


def _report(error: Exception) -> dict[str, str]:
    kind = next((name for name, known in ERRORS.items() if isinstance(error, known)), "")
    if not kind:
        log.error("the search failed", exc_info=error)
    return {"error": kind, "message": str(error) if kind else f"{type(error).__name__}: {error}"}


def _receive(requests: queue.SimpleQueue[bytes]) -> None:
    for line in sys.stdin.buffer:
        requests.put(line)
    os._exit(0)  # the parent ended, and the search may hang


def _open_source(request: dict[str, Any], vectors: list[np.ndarray]) -> Any:
    from memsearcher_jax.retrieval.search import open_source  # that imports this module

    def sent(texts: list[str]) -> np.ndarray:
        return vectors[0]

    model = TextEncoder(request["encoder"], sent, sent) if request["encoder"] else None
    return open_source(RetrievalConfig(**request["config"]), Path(request["directory"]), (), model)


def _search(source: Any, request: dict[str, Any], vectors: list[np.ndarray]) -> Iterator[list]:
    queries = request["queries"]
    for start in range(0, len(queries), QUERIES_PER_ANSWER):
        part = slice(start, start + QUERIES_PER_ANSWER)
        if "vectors" in request:
            all_QD = np.frombuffer(base64.b64decode(request["vectors"]), np.float32).reshape(-1, request["size"])
            vectors[0] = all_QD[part]
        found = source.search(queries[part], request["top_n"])
        yield [[(passage.id, passage.contents, passage.score) for passage in ranking] for ranking in found]


if __name__ == "__main__":
    main()
