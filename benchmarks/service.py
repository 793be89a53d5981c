"""The search service, or a served agent, under load: concurrent clients over loopback, without the query cache.

python benchmarks/service.py                                                # 64 clients, 60 s, synthetic encyclopedia
python benchmarks/service.py --seconds 10 --serve="--retrieval.corpus FILE"
python benchmarks/service.py --agent                                        # the agent of the package's small weights

Starts the service, sends questions from every client without a pause, and prints errors, latencies, throughput and the
memory of the service. Exit status 1 if a request failed or the memory grew. The clients share the processor cores with
the service: a dedicated machine has a higher throughput.
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import common
import numpy as np
import tyro

from memsearcher_jax.data.synthetic.encyclopedia import EncyclopediaConfig, make_encyclopedia

WEIGHTS = common.REPOSITORY / "memsearcher_jax" / "assets" / "tiny"
AGENT = ["--config", "tiny", "--checkpoint", str(WEIGHTS), "--name", "agent"]
NEW_SERVICE = ["--port", "0", "--retrieval.query_cache_size", "0"]
MAX_GROWTH = 1.05  # of resident memory from the middle of the run to its end; more counts as a leak


@dataclass(frozen=True)
class Load:
    """The load, and the service."""

    clients: int = 64
    """Concurrent clients, each with one connection."""
    seconds: float = 60.0
    """Duration of the load."""
    agent: bool = False
    """Serve an agent; a request asks one question, and its latency is that of the whole answer."""
    serve: str = ""
    """Flags for launch/serve_search.py or launch/serve_agent.py. Default: the synthetic encyclopedia, small weights."""
    json: Path | None = None
    """Also write the numbers to this file."""


def main(load: Load) -> int:
    questions = [problem.question for problem in make_encyclopedia(EncyclopediaConfig()).train]
    with serving(load) as (server, url):
        result = measure(load, questions, url, server.pid)
    for name, value in result.items():
        print(f"{name:19} {value:,.1f}" if isinstance(value, float) else f"{name:19} {value:,}")
    common.write_json(asdict(load) | result, load.json)
    return int(result["errors"] > 0 or result["memory_end"] > MAX_GROWTH * result["memory_middle"])


@contextmanager
def serving(load: Load) -> Iterator[tuple[subprocess.Popen, str]]:
    """The service in a subprocess, and its address."""
    program = common.REPOSITORY / "launch" / ("serve_agent.py" if load.agent else "serve_search.py")
    flags = [*NEW_SERVICE, *(AGENT if load.agent else []), *shlex.split(load.serve)]
    command = [sys.executable, str(program), *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            lines = []
            while " at http://" not in (line := server.stderr.readline()):
                lines.append(line)
                if not line:
                    raise SystemExit("".join(lines).strip() or "the service did not start")
            threading.Thread(target=server.stderr.read, daemon=True).start()  # a full pipe would block the service
            yield server, line.split()[-1]
        finally:
            server.terminate()


def measure(load: Load, questions: Sequence[str], url: str, server: int) -> dict[str, float]:
    """Run the clients for the duration of the load. Latencies are in milliseconds, memory in MB."""
    address = urllib.parse.urlsplit(url).netloc
    started = time.monotonic()
    deadline = started + load.seconds
    with ThreadPoolExecutor(load.clients) as pool:
        run = partial(run_client, address, load, questions, deadline)
        clients = [pool.submit(run, number) for number in range(load.clients)]
        time.sleep(load.seconds / 2)
        middle = memory_mb(server)
        time.sleep(max(0.0, deadline - time.monotonic()))
        end = memory_mb(server)
    took = time.monotonic() - started
    results = [result for client in clients for result in client.result()]
    seconds_R = np.array([result for result in results if isinstance(result, float)])
    failures = [result for result in results if isinstance(result, str)]
    for error in islice(failures, 3):
        print(f"error: {error}", file=sys.stderr)
    if not len(seconds_R):
        raise SystemExit("no request succeeded")
    latencies = (1_000 * np.percentile(seconds_R, (50, 90, 99, 100))).tolist()
    return {
        "requests": len(results),
        "errors": len(failures),
        "requests_per_second": len(seconds_R) / took,
        **dict(zip(("p50", "p90", "p99", "max_latency"), latencies, strict=True)),
        "memory_middle": middle,
        "memory_end": end,
    }


def memory_mb(server: int) -> float:
    """Resident memory of the service and the process that searches for it."""
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    statuses = (Path(f"/proc/{process}/status").read_text() for process in (server, *children))
    return sum(int(status.partition("VmRSS:")[2].split()[0]) for status in statuses) * 1_024 / 1e6


def run_client(address: str, load: Load, questions: Sequence[str], deadline: float, number: int) -> list[float | str]:
    """Send the next question as soon as the previous response arrives. It must contain passages, or a finished answer.

    Returns the latency in seconds of every request, or its error.
    """
    connection = http.client.HTTPConnection(address, timeout=30)
    results, row = list[float | str](), number
    while time.monotonic() < deadline:
        question = questions[row % len(questions)]
        path, body = "/search", {"query": question, "top_n": 5}
        if load.agent:
            message = {"role": "user", "content": question}
            path, body = "/v1/chat/completions", {"model": "agent", "messages": [message], "seed": row}
        row += load.clients
        started = time.monotonic()
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read()
            result = json.loads(text) if response.status == 200 else None
            if not (result and (result["choices"][0]["finish_reason"] if load.agent else result[0]["contents"])):
                raise ValueError(f"status {response.status}: {text[:100]!r}")
        except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
            results.append(f"{type(error).__name__}: {error}")
            connection.close()
        else:
            results.append(time.monotonic() - started)
    connection.close()
    return results


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Load, description=__doc__)))
