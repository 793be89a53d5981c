"""Parts of a corpus, searched as one: in this process, and in processes of their own over HTTP."""

import contextlib
import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsearcher_jax.agent.types import Passage
from memsearcher_jax.retrieval.client import SearchService, SearchUnavailable
from memsearcher_jax.retrieval.config import RetrievalConfig
from memsearcher_jax.retrieval.corpus import corpus_of
from memsearcher_jax.retrieval.index import ExactIndex
from memsearcher_jax.retrieval.ranking import DenseRanker
from memsearcher_jax.retrieval.search import LocalSource, open_searcher
from memsearcher_jax.retrieval.sharded import ShardedSource, merge

ROWS = 60
QUERIES = [f"question {number}" for number in range(12)]


def encode(texts):
    """Vectors of few different values, so that many scores are equal."""
    return np.stack([np.random.default_rng(len(text) * 7 + ord(text[-1])).integers(-1, 2, 8) for text in texts]).astype(
        np.float32
    )


def part(start, stop):
    """The rows `start` to `stop` of one corpus."""
    corpus = corpus_of(Passage(str(row), f"text {row % 23} {'x' * (row % 5)}") for row in range(start, stop))
    return LocalSource(corpus, DenseRanker(encode, ExactIndex(encode(corpus.texts(0, stop - start)))), "dense/test")


@pytest.mark.parametrize("cuts", [(0, 60), (0, 20, 40, 60), (0, 1, 59, 60)])
@pytest.mark.parametrize("top_n", [1, 5, 60])
def test_parts_give_what_the_whole_gives(cuts, top_n):
    parts = ShardedSource(tuple(part(*span) for span in itertools.pairwise(cuts)))
    whole = part(0, ROWS).find(QUERIES, ROWS)
    for found, ranked in zip(parts.find(QUERIES, top_n), whole, strict=True):
        assert [hit.score for hit in found] == [hit.score for hit in ranked[:top_n]]
        assert all(hit in ranked for hit in found) and len({hit.id for hit in found}) == top_n
    assert parts.find(QUERIES, ROWS) == whole, "ties are in the order of the corpus"


scores = st.lists(st.integers(-3, 3).map(float), max_size=8).map(lambda some: sorted(some, reverse=True))


@given(st.lists(scores, max_size=5), st.integers(1, 12))
def test_merging_is_sorting_all(rankings, top_n):
    parts = [[Passage(f"{p}.{n}", "", score) for n, score in enumerate(some)] for p, some in enumerate(rankings)]
    merged = merge(parts, top_n)
    assert [hit.score for hit in merged] == sorted(itertools.chain(*rankings), reverse=True)[:top_n]
    for before, after in itertools.pairwise(merged):
        if before.score == after.score:
            assert tuple(map(int, before.id.split("."))) < tuple(map(int, after.id.split(".")))


def test_a_part_that_fails_fails_the_search():
    class Broken:
        def find(self, queries, top_n):
            raise SearchUnavailable("gone")

    with pytest.raises(SearchUnavailable, match="gone"):
        ShardedSource((part(0, 9), Broken())).find(QUERIES, 2)


SERVE = """
import socket, sys
sys.path.insert(0, sys.argv[3])
import uvicorn
from test_sharded import part
from memsearcher_jax.retrieval.config import ServiceLimits
from memsearcher_jax.retrieval.search import Searcher
from memsearcher_jax.retrieval.service import make_app

source = part(int(sys.argv[1]), int(sys.argv[2]))
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
app = make_app(Searcher(source).search, ServiceLimits(), {"scale": source.scale})
uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listener])
"""


@pytest.mark.slow
def test_parts_in_processes_of_their_own(tmp_path, request):
    """Three services, each over a third: the config names them, and a search finds what one over all would."""
    here = str(request.path.parent)
    with contextlib.ExitStack() as stack:
        processes = []
        for start in (0, 20, 40):
            command = [sys.executable, "-c", SERVE, str(start), str(start + 20), here]
            processes.append(stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)))
            stack.callback(processes[-1].kill)
        urls = tuple(f"http://127.0.0.1:{process.stdout.readline().strip()}" for process in processes)
        for url in urls:  # the port is open before the service answers
            SearchService(url, timeout=30.0).check()
        searcher = open_searcher(RetrievalConfig(url=urls), tmp_path, ())
        assert searcher.search(QUERIES, ROWS) == part(0, ROWS).find(QUERIES, ROWS)
        assert [len(hits) for hits in searcher.search(QUERIES, 5)] == [5] * len(QUERIES)
        processes[1].kill()
        with pytest.raises(SearchUnavailable, match=urls[1]):
            open_searcher(RetrievalConfig(url=urls, attempts=1), tmp_path, ())
