"""Searches in a process of its own: the same results, and what happens when it hangs, dies or loses its parent."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest

from memsearcher_jax.retrieval.builder.index_builder import build_index
from memsearcher_jax.retrieval.config import HASHING, RetrievalConfig
from memsearcher_jax.retrieval.hashing_encoder import TextEncoder
from memsearcher_jax.retrieval.local_source import open_source
from memsearcher_jax.retrieval.search import open_searcher
from memsearcher_jax.retrieval.search_process import QUERIES_PER_MESSAGE, SearchProcess
from memsearcher_jax.types import Passage

TOWNS = ["Oslo", "Turin", "Lyon", "Bari"]


@pytest.fixture
def config(tmp_path):
    """Of an index of words."""
    passages = [Passage(str(row), f'"{town}"\n{town} lies by the sea.') for row, town in enumerate(TOWNS)]
    config = RetrievalConfig(index=str(tmp_path / "index"), index_type="exact", method="bm25")
    build_index(config, passages, tmp_path / "index")
    return config


def embed(texts):
    return np.eye(4, dtype=np.float32)[[next((TOWNS.index(t) for t in TOWNS if t in text), 0) for text in texts]]


@pytest.mark.parametrize(
    ("method", "model"), [("bm25", None), ("hybrid", None), ("hybrid", TextEncoder("model", embed, embed))]
)
def test_results_are_those_of_a_search_in_this_process(tmp_path, method, model):
    rows = [{"id": str(row), "contents": f'"{town}"\n{town} lies by the sea.'} for row, town in enumerate(TOWNS)]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = RetrievalConfig(index_type="exact", method=method, encoder="folder" if model else HASHING)
    queries = [f"{town} {number} \ud800" for number in range(QUERIES_PER_MESSAGE) for town in TOWNS]
    given = replace(config, corpus=str(tmp_path / "corpus.jsonl"))
    searcher = open_searcher(given, tmp_path / "index", (), lambda _: model)
    assert isinstance(searcher.source, SearchProcess)
    expected = open_source(replace(config, index=str(tmp_path / "index")), tmp_path / "index", model)
    assert searcher.search(queries, 3) == expected.search(queries, 3)
    assert searcher.source.info == expected.info
    searcher.source.close()
    with pytest.raises(ConnectionError, match="the search is closed"):
        searcher.search(["Rome"], 1)


def test_a_process_that_hangs_dies_or_is_interrupted_is_replaced(config, tmp_path, monkeypatch):
    source = SearchProcess(config, tmp_path / "index", timeout=30.0)
    found = source.search(["Oslo"], 1)
    os.kill(source._child.process.pid, signal.SIGSTOP)
    source._timeout = 0.3
    with pytest.raises(TimeoutError, match=r"no answer within 0\.3 s"):
        source.search(["Oslo " * 100_000], 1)  # more than a socket holds
    assert source.is_healthy
    source._timeout = 30.0
    assert source.search(["Oslo"], 1) == found
    source._child.process.kill()
    source._child.process.wait()
    assert not source.is_healthy
    assert source.search(["Oslo"], 1) == found and source.is_healthy
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(source._child, "_lines", Mock(**{"readline.side_effect": KeyboardInterrupt}))
        source.search(["Turin"], 1)
    assert source.search(["Oslo"], 1) == found


def test_errors_of_opening_are_those_of_this_process(config, tmp_path):
    (tmp_path / "index" / "passages.arrow").write_bytes(b"")
    with pytest.raises(ValueError, match=r"index: is damaged or of another version \(passages\.arrow has 0 bytes"):
        open_searcher(config, tmp_path / "index", ())
    build_index(RetrievalConfig(), [Passage("0", "Oslo")], tmp_path / "large")
    manifest = tmp_path / "large" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"size": 1024', f'"size": {10**13}'))
    with pytest.raises(OSError, match="memory is short: Unable to allocate"):
        open_searcher(RetrievalConfig(index=str(tmp_path / "large")), tmp_path / "large", ())


def test_a_bug_in_a_search_is_reported_and_the_process_goes_on(config, tmp_path):
    source = SearchProcess(config, tmp_path / "index")
    with pytest.raises(RuntimeError, match="TypeError"):
        source.search(["Oslo"], "many")
    assert source.is_healthy and source.search(["Oslo"], 1)[0][0].title == "Oslo"


PARENT = """
import contextlib, os, signal, sys, threading, time
from pathlib import Path
from memsearcher_jax.retrieval.config import RetrievalConfig
from memsearcher_jax.retrieval.search_process import SearchProcess

source = SearchProcess(RetrievalConfig(index=sys.argv[1], method="bm25"), Path(sys.argv[1]))
child = source._child.process.pid
print(child, flush=True)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
os.kill(child, signal.SIGSTOP)
def search():
    with contextlib.suppress(OSError):
        source.search(["Oslo"], 1)
threading.Thread(target=search, daemon=True).start()
time.sleep(0.2)
"""


@pytest.mark.parametrize(("end", "status"), [("abandons", 0), ("killed", -9)])
def test_a_child_ends_with_its_parent_and_does_not_delay_it(config, end, status):
    command = [sys.executable, "-c", PARENT, config.index, end]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        started = time.monotonic()
        assert parent.wait(20) == status
        assert time.monotonic() - started < 5
        while is_alive(child):
            assert time.monotonic() - started < 20
            time.sleep(0.02)
        assert "Traceback" not in parent.stderr.read()


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
