"""launch/serve_search.py: it starts, answers requests, and stops on SIGTERM."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from memsearcher_jax.http.listener import listen
from memsearcher_jax.launch import serve_search
from memsearcher_jax.retrieval.config import RetrievalConfig
from memsearcher_jax.retrieval.search import open_searcher
from tests.http_server import until

PROGRAM = Path(serve_search.__file__)


@contextlib.contextmanager
def run_service(*flags, program=(PROGRAM,)):
    """Runs the program with these flags; gives the process and its address."""
    command, pipe = [sys.executable, *program, "--port", "0", *map(str, flags)], subprocess.PIPE
    # Whoever starts the tests in the background ignores SIGINT, and a child inherits that.
    options = {"cwd": PROGRAM.parents[1], "preexec_fn": partial(signal.signal, signal.SIGINT, signal.SIG_DFL)}
    with subprocess.Popen(command, stdin=pipe, stderr=pipe, text=True, **options) as process:
        try:
            lines = [process.stderr.readline()]
            while " at http://" not in lines[-1]:
                assert lines[-1], f"the service has ended: {lines}"
                lines.append(process.stderr.readline())
            url = lines[-1].split()[-1]
            while True:
                with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
                    break
                time.sleep(0.02)
            yield process, url
        finally:
            process.kill()


def post(url, path, body):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


# The first search for "held" waits for seven more requests, and then for a line on stdin.
HOLDING_PROGRAM = """
import sys, time
from memsearcher_jax.launch import serve_search
from memsearcher_jax.retrieval.server import app

make_app, held = app.make_app, []

def make_holding_app(search, limits, info, process):
    def hold(queries, top_n):
        if "held" in queries and not held:
            held.append(queries)
            deadline = time.monotonic() + 20
            while len(service.state.batcher._waiting) < 7 and time.monotonic() < deadline:
                time.sleep(0.01)
            print(len(service.state.batcher._waiting), "requests wait", file=sys.stderr, flush=True)
            sys.stdin.readline()
        return search(queries, top_n)

    service = make_app(hold, limits, info, process)
    return service

app.make_app = make_holding_app
serve_search.main(sys.argv[1:])
"""


def accepts(url):
    address = urllib.parse.urlsplit(url)
    try:
        socket.create_connection((address.hostname, address.port), timeout=20).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.slow
def test_sigterm_completes_pending_requests_before_the_service_stops(corpus, tmp_path):
    flags = ["--retrieval.corpus", corpus, "--retrieval.method", "hybrid", "--out", tmp_path / "served"]
    flags += ["--retrieval.index_type", "exact"]
    service = run_service(*flags, program=("-c", HOLDING_PROGRAM))
    with service as (process, url), ThreadPoolExecutor(8) as pool:
        results = post(url, "/search", {"query": "17 mills", "top_n": 2})
        assert {"id": "17", "contents": '"Town 17"\nTown 17 has 17 mills.'} in results
        searcher = open_searcher(RetrievalConfig(url=url), tmp_path / "unused", ())
        (hits,) = searcher.search(["17 mills"], 2)
        assert [hit.id for hit in hits] == [passage["id"] for passage in results]
        kept = http.client.HTTPConnection(url.removeprefix("http://"), timeout=20)
        for seconds in (0, 5.5):  # uvicorn's default closes a connection after 5, when Python's clients may reuse it
            time.sleep(seconds)
            kept.request("GET", "/health")
            assert json.load(kept.getresponse())["passages"] == 20
        assert len(post(url, "/retrieve", {"queries": ["17 mills " * 1_000] * 400})["result"]) == 400
        bodies = [{"queries": ["held", "Town 3"], "topk": number} for number in range(1, 9)]  # each a batch of its own
        responses = [pool.submit(post, url, "/retrieve", body) for body in bodies]
        assert process.stderr.readline() == "7 requests wait\n"
        process.send_signal(signal.SIGTERM)
        until(lambda: not accepts(url))
        assert not any(response.done() for response in responses)
        process.stdin.write("go on\n")
        process.stdin.flush()
        found = [response.result()["result"] for response in responses]
        assert [len(towns) for _, towns in found] == list(range(1, 9))
        assert process.wait(10) == 0
        assert process.stderr.read() == "stopped\n"
    assert (tmp_path / "served" / "index" / "bm25").is_dir(), "the index is kept for the next start"


@pytest.mark.slow
def test_a_hung_search_does_not_stop_the_service(corpus, tmp_path):
    """Its process is replaced, and /health says so. Ctrl-C ends the service within seconds, with status 130."""
    flags = ["--retrieval.corpus", corpus, "--retrieval.method", "bm25", "--out", tmp_path / "served"]
    with run_service(*flags, "--limits.search_timeout", "0.5") as (process, url), ThreadPoolExecutor(4) as pool:
        assert post(url, "/search", {"query": "17 mills", "top_n": 1})[0]["id"] == "17"
        os.kill(child_of(process.pid), signal.SIGSTOP)
        hung = [pool.submit(post, url, "/search", {"query": f"{number} mills"}) for number in range(2)]
        until(lambda: get(url, "/health")["status"] == "degraded")
        assert all(answer.exception() is None or answer.exception().code == 503 for answer in hung)
        until(lambda: get(url, "/health")["status"] == "healthy")
        assert post(url, "/search", {"query": "17 mills", "top_n": 1})[0]["id"] == "17"
    with run_service(*flags, "--limits.search_timeout", "60") as (process, url), ThreadPoolExecutor(1) as pool:
        os.kill(child_of(process.pid), signal.SIGSTOP)
        pool.submit(post, url, "/search", {"query": "17 mills"})
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
        assert process.stderr.read().endswith("stopped\n")  # uvicorn says that it cancels a task


def child_of(pid):
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def get(url, path):
    with urllib.request.urlopen(url + path, timeout=10) as response:
        return json.load(response)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6")
@pytest.mark.parametrize(("host", "reached"), [("::1", ["::1"]), ("::", ["::1", "127.0.0.1"])])
def test_ipv6_addresses(host, reached):
    try:
        listener = listen(host, 0)
    except OSError as error:
        pytest.skip(f"no IPv6: {error}")
    with listener:
        for address in reached:
            socket.create_connection((address, listener.getsockname()[1])).close()
