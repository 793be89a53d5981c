"""Search in a process of its own: a search that hangs in a library or on a disk ends only with its process.

The child opens the index and searches 64 queries at a time. Its answers are its heartbeat: when one does not come in
time, or the child dies, the search fails once another child has opened the index. The text encoder stays in the parent,
which has the accelerators, and the child gets vectors. A child ends when its parent does. Messages are lines of JSON
over a socket, whose number is the child's argument.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
import weakref
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from memsearcher_jax.retrieval.config import RetrievalConfig
from memsearcher_jax.retrieval.hashing_encoder import TextEncoder
from memsearcher_jax.types import Passage

# -P: a module in the working directory must not replace one of the libraries.
COMMAND = (sys.executable, "-P", "-m", "memsearcher_jax.retrieval.search_process")
QUERIES_PER_MESSAGE = 64
REOPEN_TIMEOUT = 600.0  # seconds in which a child that replaces another must have opened the index
ERRORS = {"OSError": OSError, "ValueError": ValueError}  # whose messages are for users

log = logging.getLogger(__name__)


class SearchProcess:
    """A `Source` over the corpus or index that `config` names. Thread-safe; one batch is searched at a time.

    Args:
      model: embeds the queries, unless the encoder is the hashing encoder.
      timeout: seconds between two answers of the child, after which it is killed and replaced.

    Raises OSError or ValueError, in one line with the corpus or index that cannot be used, and the reason.
    """

    def __init__(
        self, config: RetrievalConfig, directory: Path, model: TextEncoder | None = None, timeout: float = 30.0
    ):
        self._request = {"config": asdict(config), "directory": str(directory), "encoder": model.name if model else ""}
        self._model = model
        self._timeout = timeout
        self._working_dir = Path.cwd()  # to which paths of the settings are relative
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen] = []
        self._end = weakref.finalize(self, _kill, self._processes)  # called at the end of the parent, too
        self._open(None)

    @property
    def is_healthy(self) -> bool:
        return self._is_open and self._child.process.poll() is None

    def close(self) -> None:
        """Kill the child. A search in progress fails, and so does every later one."""
        self._end()

    def search(self, queries: list[str], top_n: int) -> list[list[Passage]]:
        """As `Source.search`. Raises ConnectionError while the child is busy with another search, or being replaced.

        Raises TimeoutError if the child did not answer in time, or died; another one has opened the index.
        """
        vectors_QD = self._model.queries(queries) if self._model else None
        if not self._lock.acquire(timeout=self._timeout):
            raise ConnectionError(f"the search process has been busy for {self._timeout:g} s")
        try:
            if not self.is_healthy:
                self._open(REOPEN_TIMEOUT)
            found: list[list[Passage]] = []
            for start in range(0, len(queries), QUERIES_PER_MESSAGE):
                part = slice(start, start + QUERIES_PER_MESSAGE)
                vectors = None if vectors_QD is None else vectors_QD[part].tolist()
                message = {"queries": queries[part], "top_n": top_n, "vectors": vectors}
                for ranking in self._child.call(message, self._timeout):
                    found.append([Passage(*passage) for passage in ranking])
            return found
        except TimeoutError:
            self._open(REOPEN_TIMEOUT)
            raise
        except KeyboardInterrupt:  # the answer, which still comes, would be taken for that of the next search
            _kill(self._processes)
            raise
        finally:
            self._lock.release()

    def _open(self, timeout: float | None) -> None:
        """Start a child that opens the index, in place of the one there is."""
        self._is_open = False
        _kill(self._processes)
        if not self._end.alive:
            raise ConnectionError("the search is closed")
        self._child = _Child(self._working_dir)
        self._processes[:] = [self._child.process]
        self.info: dict[str, Any] = self._child.call(self._request, timeout)
        self._is_open = True


class _Child:
    def __init__(self, working_dir: Path):
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = (*COMMAND, str(theirs.fileno()))
            # A session of its own: the parent decides when the child ends, not Ctrl-C of a terminal.
            options = {"stdout": 2, "cwd": working_dir, "start_new_session": True}
            self.process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), **options)
        self._lines = self._socket.makefile("rb")

    def call(self, message: dict[str, Any], timeout: float | None) -> Any:
        """Send a request, and return its result. Raises TimeoutError, or the error that the child reports."""
        self._socket.settimeout(timeout)
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
            line = self._lines.readline()
        except TimeoutError:
            raise TimeoutError(f"the search has no answer within {timeout:g} s") from None
        except ConnectionError:
            line = b""
        if not line.endswith(b"\n"):
            raise TimeoutError(f"the search process ended with status {self.process.wait()} (-9: was memory short?)")
        answer = json.loads(line)
        if "error" in answer:
            raise ERRORS.get(answer["error"], RuntimeError)(answer["message"])
        return answer["result"]


def _kill(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it waits for a disk, which no signal interrupts
            process.wait(1.0)


def main() -> None:
    # bm25s imports JAX if it is installed, which takes seconds and claims accelerators, and searches with it.
    sys.modules["jax"] = None  # pyright: ignore[reportArgumentType]
    from memsearcher_jax.retrieval.local_source import open_source

    parent = socket.socket(fileno=int(sys.argv[1]))
    requests = queue.SimpleQueue[bytes]()
    threading.Thread(target=_receive, args=(parent, requests), daemon=True).start()
    request: dict[str, Any] = {}

    def sent_vectors(texts: list[str]) -> np.ndarray:
        return np.array(request["vectors"], np.float32)

    source = None
    while True:
        request = json.loads(requests.get())
        try:
            if source is None:
                model = TextEncoder(request["encoder"], sent_vectors, sent_vectors) if request["encoder"] else None
                source = open_source(RetrievalConfig(**request["config"]), Path(request["directory"]), model)
                result: Any = source.info
            else:
                result = []
                for ranking in source.search(request["queries"], request["top_n"]):
                    result.append([(passage.id, passage.contents, passage.score) for passage in ranking])
            answer = {"result": result}
        except Exception as fault:
            error = OSError(f"memory is short: {fault}") if isinstance(fault, MemoryError) else fault
            answer = _error_message(error)
            if not answer["error"]:
                log.exception("the search failed")
        parent.sendall(json.dumps(answer).encode() + b"\n")


def _error_message(error: Exception) -> dict[str, str]:
    """The answer of a search that failed: the name in ERRORS, "" for an error that is not for users, and the text."""
    for name, kind in ERRORS.items():
        if isinstance(error, kind):
            return {"error": name, "message": str(error)}
    return {"error": "", "message": f"{type(error).__name__}: {error}"}


def _receive(parent: socket.socket, requests: queue.SimpleQueue[bytes]) -> None:
    for line in parent.makefile("rb"):
        requests.put(line)
    os._exit(0)  # the parent ended, and the search may hang


if __name__ == "__main__":
    main()
