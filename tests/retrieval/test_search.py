import json
import subprocess
import sys
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from memsearcher_jax.retrieval import search
from memsearcher_jax.retrieval.bm25 import open_bm25
from memsearcher_jax.retrieval.builder.index_builder import build_index
from memsearcher_jax.retrieval.config import RetrievalConfig
from memsearcher_jax.retrieval.fusion import DenseRetriever
from memsearcher_jax.retrieval.hashing_encoder import TextEncoder, fit_hashing
from memsearcher_jax.retrieval.index import ExactIndex
from memsearcher_jax.retrieval.local_source import LocalSource, linked_rows, open_source
from memsearcher_jax.retrieval.search import Searcher, open_searcher
from memsearcher_jax.types import Passage
from tests.retrieval.samples import make_corpus

PASSAGES = tuple(
    Passage(str(row), f'"{name}"\n{name} lies in {land}.')
    for row, (name, land) in enumerate([("Oslo", "Norway"), ("Turin", "Italy"), ("Lyon", "France"), ("Bari", "Italy")])
)
SMALL = RetrievalConfig()


@dataclass
class RecordingEncoder:
    """An encoder that records its batches."""

    encoder: object
    batches: list = field(default_factory=list)

    def __call__(self, texts):
        self.batches.append(list(texts))
        return self.encoder(texts)


def make_searcher():
    corpus = make_corpus(PASSAGES)
    encoder = fit_hashing(corpus.texts(range(4)), 256)
    recorder = RecordingEncoder(encoder)
    retriever = DenseRetriever(recorder, ExactIndex(encoder(corpus.texts(range(4)))))
    return Searcher(LocalSource(corpus, retriever)), recorder


def test_duplicate_and_blank_queries_are_not_searched():
    searcher, recorder = make_searcher()
    found = searcher.search(["Oslo", "", "Lyon", "Oslo", " \n"], 1)
    assert [[passage.title for passage in hits] for hits in found] == [["Oslo"], [], ["Lyon"], ["Oslo"], []]
    assert recorder.batches == [["Oslo", "Lyon"]]
    found[0].clear()
    assert found[3], "equal queries must not share a list"


def test_cached_queries_are_not_searched_again(monkeypatch):
    monkeypatch.setattr(search, "CACHED_QUERIES", 3)
    searcher, recorder = make_searcher()
    first = searcher.search(["Oslo", "Lyon"], 2)
    assert searcher.search(["Lyon", "Oslo"], 2) == first[::-1]
    assert first[0][0].title == "Oslo" and first[0][0].score > first[0][1].score
    assert recorder.batches == [["Oslo", "Lyon"]]
    assert len(searcher.search(["Oslo"], 3)[0]) == 3, "the cache key contains top_n"
    searcher.search(["Bari"], 2)
    searcher.search(["Oslo"], 2)
    assert recorder.batches[1:] == [["Oslo"], ["Bari"], ["Oslo"]], "a full cache is emptied"


def test_edge_cases():
    searcher, _ = make_searcher()
    assert searcher.search([], 5) == []
    assert searcher.search(["", "?!"], 5) == [[], []], "a query without a word has no results"
    assert len(searcher.search(["Oslo"], 500)[0]) == 4
    assert searcher.search(["x" * 100_000, "\u202e\x00 Oslo"], 1)[1][0].title == "Oslo"
    with pytest.raises(ValueError, match="top_n"):
        searcher.search(["Oslo"], 0)


@pytest.mark.parametrize("index_type", ["scann", "exact"])
def test_an_index_is_built_once(tmp_path, index_type):
    config = RetrievalConfig(index_type=index_type)
    first = open_searcher(config, tmp_path / "index", PASSAGES)
    made = (tmp_path / "index" / "manifest.json").stat().st_mtime_ns
    again = open_searcher(config, tmp_path / "index", PASSAGES)
    assert (tmp_path / "index" / "manifest.json").stat().st_mtime_ns == made
    assert first.search(["Turin"], 2) == again.search(["Turin"], 2)
    assert first.search(["Turin"], 1)[0][0].title == "Turin"


@pytest.mark.parametrize("method", ["dense", "bm25"])
def test_an_index_needs_no_corpus_and_refuses_another_one(tmp_path, method):
    """So a run that is resumed with its own index does not read the file again."""
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"id": p.id, "contents": p.contents}) + "\n" for p in PASSAGES))
    given = RetrievalConfig(corpus=str(corpus), method=method)
    found = open_searcher(given, tmp_path / "index", ()).search(["Lyon"], 1)
    assert found[0][0].title == "Lyon"
    corpus.write_text(json.dumps({"id": "0", "contents": "changed"}))
    for changed in (given, replace(given, index=str(tmp_path / "index"))):
        with pytest.raises(ValueError, match="was built from another corpus"):
            open_searcher(changed, tmp_path / "index", ())
    corpus.unlink()
    with pytest.raises(FileNotFoundError, match=r"corpus\.jsonl: no such file"):
        open_searcher(given, tmp_path / "index", ())
    index = replace(given, corpus="", index=str(tmp_path / "index"))
    assert open_searcher(index, tmp_path / "unused", ()).search(["Lyon"], 1) == found
    assert not (tmp_path / "unused").exists()
    with pytest.raises(ValueError, match="was built from another corpus"):
        open_searcher(replace(given, corpus=""), tmp_path / "index", PASSAGES[:3])


SUPPORTED = {"2wikimultihopqa": 657, "hotpotqa": 60, "musique": 60}


@pytest.mark.parametrize(
    ("method", "minimum"),
    [
        ("bm25", (0.765, 0.71, 0.535)),
        pytest.param("dense", (0.755, 0.68, 0.56), marks=pytest.mark.slow),
        pytest.param("hybrid", (0.835, 0.78, 0.595), marks=pytest.mark.slow),
    ],
)
def test_supporting_passages_are_found(shared, wiki_index, method, minimum):
    """The share of supporting titles among the titles of the top five, on real questions."""
    config = RetrievalConfig(index=str(wiki_index), index_type="exact", method=method)
    searcher = open_source(config, wiki_index)
    for (name, count), bound in zip(SUPPORTED.items(), minimum, strict=True):
        lines = (shared / "data" / "wiki_mini" / name / "dev.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        assert len(rows) == count
        found = searcher.search([row["question"] for row in rows], 5)
        titles = [set(row["metadata"]["supporting_titles"]) for row in rows]
        shares = [
            len(wanted & {hit.title for hit in hits}) / len(wanted) for wanted, hits in zip(titles, found, strict=True)
        ]
        assert sum(shares) / count >= bound, name


@pytest.fixture(scope="module")
def wiki_index(shared, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wiki") / "index"
    build_index(RetrievalConfig(index_type="exact"), shared / "data" / "wiki_mini" / "corpus.jsonl", folder)
    return folder


def test_a_passage_links_to_the_first_passages_of_the_pages_that_it_names(tmp_path):
    texts = {"Oslo": "Henrik Ibsen lived in Oslo.", "Henrik Ibsen": "A writer.", "Ibsen Museum": "In Oslo."}
    corpus = make_corpus([Passage(f"{n}", f'"{title}"\n{texts[title]}') for n, title in enumerate([*texts, *texts])])
    assert linked_rows(corpus, open_bm25(corpus, tmp_path / "titles", "title"), 0).tolist() == [1, 0, 2]


@pytest.mark.parametrize("method", ["dense", "bm25", "hybrid"])
def test_results_do_not_depend_on_the_batch(tmp_path, method):
    searcher = open_searcher(replace(SMALL, method=method), tmp_path / "index", PASSAGES)
    queries = ["Lyon lies in France", "Italy", "", "zzz", "lies", "France Italy Norway"]
    together = searcher.search(queries, 3)
    assert together == [Searcher(searcher.source).search([query], 3)[0] for query in queries]
    assert together[0][0].title == "Lyon" and together[2] == []
    assert searcher.search(["France\n Italy Norway"], 3)[0] == together[5]


def test_bm25_over_an_index_needs_no_encoder(tmp_path):
    build_index(SMALL, PASSAGES, tmp_path / "theirs")
    config = RetrievalConfig(index=str(tmp_path / "theirs"), method="bm25", encoder="/no/such/folder")
    assert open_source(config, tmp_path / "index").search(["Bari"], 1)[0][0].title == "Bari"


def test_a_configured_index_is_not_changed(tmp_path):
    """A hybrid search writes its BM25 index into the run's folder, and uses one in the configured index."""
    build_index(SMALL, PASSAGES, tmp_path / "theirs")
    before = sorted(path.name for path in (tmp_path / "theirs").iterdir())
    config = RetrievalConfig(index=str(tmp_path / "theirs"), method="hybrid")
    first = open_source(config, tmp_path / "index")
    assert sorted(path.name for path in (tmp_path / "theirs").iterdir()) == before
    (tmp_path / "index" / "bm25").rename(tmp_path / "theirs" / "bm25")
    assert open_source(config, tmp_path / "index").search(["Bari"], 2) == first.search(["Bari"], 2)
    assert not (tmp_path / "index" / "bm25").exists()


def test_an_encoder_with_separate_queries_and_passages(tmp_path):
    """Its queries have the vector of the next town."""
    words = ["Oslo", "Turin", "Lyon", "Bari"]

    def load(config):
        def embed(texts, shift=0):
            places = [next((row for row, word in enumerate(words) if word in text), 0) for text in texts]
            return np.eye(4, dtype=np.float32)[[(place + shift) % 4 for place in places]]

        return TextEncoder(f"shifted:{config.encoder}", passages=embed, queries=lambda texts: embed(texts, shift=1))

    config = RetrievalConfig(encoder="folder", index_type="exact")
    searcher = open_searcher(config, tmp_path / "index", PASSAGES, load)
    assert [hits[0].title for hits in searcher.search(["Oslo", "Bari"], 1)] == ["Turin", "Oslo"]
    reasons = "encoder 'shifted:folder', not 'shifted:other'", "max_passage_tokens 512, not 9"
    for changes, reason in zip(({"encoder": "other"}, {"max_passage_tokens": 9}), reasons, strict=True):
        with pytest.raises(ValueError, match=f"was built with {reason}"):
            open_searcher(replace(config, **changes), tmp_path / "index", PASSAGES, load)
    with pytest.raises(ValueError, match=r"retrieval.encoder 'folder' .* hashing"):
        open_searcher(config, tmp_path / "index", PASSAGES)


def test_reading_the_config_imports_nothing_heavy():
    code = (
        "import sys, memsearcher_jax.retrieval.search;"
        "print([m for m in ('scann', 'bm25s', 'jax', 'tensorflow') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_without_scann_the_error_names_the_alternative(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"ScaNN is not installed .* set retrieval.index_type to exact"):
        open_searcher(SMALL, tmp_path / "index", PASSAGES)
    assert not (tmp_path / "index").exists()
    searcher = open_searcher(replace(SMALL, index_type="exact"), tmp_path / "index", PASSAGES)
    assert searcher.search(["Oslo"], 1)[0][0].title == "Oslo"
