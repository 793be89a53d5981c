"""The search service under load: many clients at once, over loopback, with no query remembered.

python benchmarks/service.py                                                       # 64 clients, 60 s, embedded world
python benchmarks/service.py --seconds 10 --questions FILE --serve="--retrieval.corpus FILE"

Starts the service, sends it questions without pause from every client, and prints errors, latencies, throughput and
how the service's memory went. Exit status 1 if a request failed or the memory grew. The clients take their share of
the same processor cores: a service on a machine of its own answers more.
"""

from __future__ import annotations

import http.client
import json
import shlex
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import tyro

from memsearcher_jax.data.questions import read_questions
from memsearcher_jax.data.world import WorldConfig, make_world

SERVER = Path(__file__).resolve().parents[1] / "launch" / "serve_search.py"
GROWTH = 1.05  # of resident memory from the middle of the run to its end; what is more counts as a leak


@dataclass(frozen=True)
class Load:
    """How much load, on what."""

    clients: int = 64
    """Clients that ask at the same time, each over a connection of its own."""
    seconds: float = 60.0
    """Time that they ask for."""
    top_n: int = 5
    """Passages per query."""
    questions: Path | None = None
    """JSONL file of questions to ask; without it, those of the embedded world."""
    serve: str = ""
    """Flags for launch/serve_search.py; without any, it serves the embedded world."""
    json: Path | None = None
    """Also write the numbers to this file."""


@dataclass(frozen=True)
class Numbers:
    """What came of it. Latencies are in milliseconds, memory in MB."""

    requests: int
    errors: int
    per_second: float
    p50: float
    p90: float
    p99: float
    slowest: float
    memory_middle: float
    memory_end: float


def main(load: Load) -> int:
    problems = read_questions(load.questions) if load.questions else make_world(WorldConfig()).train
    with serving(shlex.split(load.serve)) as (server, url):
        numbers = measure(load, [problem.question for problem in problems], url, server.pid)
    for name, value in asdict(numbers).items():
        print(f"{name:14} {value:,.1f}" if isinstance(value, float) else f"{name:14} {value:,}")
    if load.json:
        load.json.write_text(json.dumps(asdict(load) | asdict(numbers), default=str, indent=2) + "\n")
    return int(numbers.errors > 0 or numbers.memory_end > GROWTH * numbers.memory_middle)


@contextmanager
def serving(flags: Sequence[str]) -> Iterator[tuple[subprocess.Popen, str]]:
    """The service as a process of its own, and its address."""
    command = [sys.executable, str(SERVER), "--port", "0", "--retrieval.cached_queries", "0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            said = []
            while " at http://" not in (line := server.stderr.readline()):
                said.append(line)
                if not line:
                    raise SystemExit("".join(said).strip() or "the service did not start")
            threading.Thread(target=server.stderr.read, daemon=True).start()  # or a full pipe would stop it
            yield server, line.split()[-1]
        finally:
            server.terminate()


def measure(load: Load, questions: Sequence[str], url: str, server: int) -> Numbers:
    """Lets the clients ask until the time is over."""
    address = urllib.parse.urlsplit(url).netloc
    started = time.monotonic()
    until = started + load.seconds
    latencies: list[list[float]] = [[] for _ in range(load.clients)]
    errors: list[list[str]] = [[] for _ in range(load.clients)]
    clients = [
        threading.Thread(target=ask, args=(address, load, questions, number, until, latencies[number], errors[number]))
        for number in range(load.clients)
    ]
    for client in clients:
        client.start()
    time.sleep(load.seconds / 2)
    middle = resident_megabytes(server)
    time.sleep(max(0.0, until - time.monotonic()))
    end = resident_megabytes(server)
    for client in clients:
        client.join()
    took = time.monotonic() - started
    seconds_R = np.array([seconds for one in latencies for seconds in one])
    failures = [error for one in errors for error in one]
    for error in islice(failures, 3):
        print(f"error: {error}", file=sys.stderr)
    if not len(seconds_R):
        raise SystemExit("no request was answered")
    p50, p90, p99, slowest = 1_000 * np.percentile(seconds_R, (50, 90, 99, 100))
    requests = len(seconds_R) + len(failures)
    return Numbers(requests, len(failures), len(seconds_R) / took, p50, p90, p99, slowest, middle, end)


def ask(
    address: str,
    load: Load,
    questions: Sequence[str],
    number: int,
    until: float,
    latencies: list[float],
    errors: list[str],
) -> None:
    """One client: the next question as soon as the last is answered. An answer counts if it holds passages."""
    connection = http.client.HTTPConnection(address, timeout=30)
    row = number
    while time.monotonic() < until:
        body = json.dumps({"query": questions[row % len(questions)], "top_n": load.top_n})
        row += load.clients
        started = time.monotonic()
        try:
            connection.request("POST", "/search", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
            if answer.status != 200 or not json.loads(text)[0]["contents"]:
                raise ValueError(f"status {answer.status}: {text[:100]!r}")
        except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
            errors.append(f"{type(error).__name__}: {error}")
            connection.close()
        else:
            latencies.append(time.monotonic() - started)
    connection.close()


def resident_megabytes(process: int) -> float:
    """What the process holds in memory, as Linux counts it."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1_024


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Load, description=__doc__)))
