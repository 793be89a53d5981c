"""The search service, or a served agent, under load: concurrent clients over loopback, each query another one.

python benchmarks/service.py                                                # 64 clients, 60 s, synthetic encyclopedia
python benchmarks/service.py --seconds 10 --serve="--retrieval.corpus FILE"
python benchmarks/service.py --agent                                        # the agent of the package's small weights

Starts the service, sends questions from every client without a pause, and prints errors, latencies and throughput. Exit
status 1 if a request failed. The clients share the processor cores with the service: a dedicated machine has a higher
throughput.
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
from dataclasses import dataclass
from itertools import count

import common
import numpy as np
import tyro

from memsearcher_jax.data.synthetic.encyclopedia import EncyclopediaConfig, make_encyclopedia

AGENT = ["--config", "tiny", "--checkpoint", str(common.WEIGHTS), "--name", "agent"]


@dataclass(frozen=True)
class Load:
    clients: int = 64
    """Concurrent clients, each with one connection."""
    seconds: float = 60.0
    """Duration of the load."""
    agent: bool = False
    """Serve an agent; a request asks one question, and its latency is that of the whole answer."""
    serve: str = ""
    """Flags for launch/serve_search.py or launch/serve_agent.py. Default: the synthetic encyclopedia, small weights."""


def main(load: Load) -> int:
    questions = [problem.question for problem in make_encyclopedia(EncyclopediaConfig()).train]
    with serving(load) as url:
        result = measure(load, questions, url)
    for name, value in result.items():
        print(f"{name:19} {value:,.1f}" if isinstance(value, float) else f"{name:19} {value:,}")
    return int(result["errors"] > 0)


@contextmanager
def serving(load: Load) -> Iterator[str]:
    """The address of the service in a subprocess."""
    program = common.REPOSITORY / "launch" / ("serve_agent.py" if load.agent else "serve_search.py")
    flags = ["--port", "0"]
    if load.agent:
        flags += AGENT
    flags += shlex.split(load.serve)
    with subprocess.Popen([sys.executable, str(program), *flags], stderr=subprocess.PIPE, text=True) as server:
        try:
            lines = []
            while " at http://" not in (line := server.stderr.readline()):
                lines.append(line)
                if not line:
                    raise SystemExit("".join(lines).strip() or "the service did not start")
            threading.Thread(target=server.stderr.read, daemon=True).start()  # a full pipe would block the service
            yield line.split()[-1]
        finally:
            server.terminate()


def measure(load: Load, questions: Sequence[str], url: str) -> dict[str, float]:
    """Run the clients for the duration of the load. Latencies are in milliseconds."""
    started = time.monotonic()
    seconds = list[float]()
    errors = list[str]()

    def run_client(number: int) -> None:
        """Send the next question as soon as the previous response arrives: passages, or a finished answer."""
        connection = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=30)
        for row in count(number, load.clients):
            sent = time.monotonic()
            if sent >= started + load.seconds:
                connection.close()
                return
            question = questions[row % len(questions)]
            path = "/search"
            body = {"query": f"{question} {row}", "top_n": 5}  # not in the cache
            if load.agent:
                message = {"role": "user", "content": question}
                path = "/v1/chat/completions"
                body = {"model": "agent", "messages": [message], "seed": row}
            try:
                connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
                response = connection.getresponse()
                text = response.read()
                result = json.loads(text) if response.status == 200 else None
                if not (result and (result["choices"][0]["finish_reason"] if load.agent else result[0]["contents"])):
                    raise ValueError(f"status {response.status}: {text[:100]!r}")
                seconds.append(time.monotonic() - sent)
            except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
                errors.append(f"{type(error).__name__}: {error}")
                connection.close()

    with ThreadPoolExecutor(load.clients) as pool:
        list(pool.map(run_client, range(load.clients)))
    took = time.monotonic() - started
    for error in errors[:3]:
        print(f"error: {error}", file=sys.stderr)
    if not seconds:
        raise SystemExit("no request succeeded")
    p50, p90, p99, longest = (1_000 * np.percentile(seconds, (50, 90, 99, 100))).tolist()
    counts = {"requests": len(seconds) + len(errors), "errors": len(errors), "requests_per_second": len(seconds) / took}
    return counts | {"p50": p50, "p90": p90, "p99": p99, "max_latency": longest}


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Load, description=__doc__)))
