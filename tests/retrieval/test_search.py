import itertools
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from memsearcher_jax.agent.types import Passage
from memsearcher_jax.retrieval import approximate as trees
from memsearcher_jax.retrieval.approximate import ScannIndex
from memsearcher_jax.retrieval.cache import RecentlyUsed
from memsearcher_jax.retrieval.config import RetrievalConfig
from memsearcher_jax.retrieval.corpus import corpus_of
from memsearcher_jax.retrieval.encode import fit_hashing
from memsearcher_jax.retrieval.index import ExactIndex
from memsearcher_jax.retrieval.ranking import DenseRanker
from memsearcher_jax.retrieval.search import LocalSource, Searcher, TextEncoder, open_searcher

PASSAGES = tuple(
    Passage(str(row), f'"{name}"\n{name} lies in {land}.')
    for row, (name, land) in enumerate([("Oslo", "Norway"), ("Turin", "Italy"), ("Lyon", "France"), ("Bari", "Italy")])
)
SMALL = RetrievalConfig(encoder_size=256)


@dataclass
class Recorder:
    """An encoder that keeps the batches it was asked for."""

    encoder: object
    batches: list = field(default_factory=list)

    def __call__(self, texts):
        self.batches.append(list(texts))
        return self.encoder(texts)


def make_searcher(batch_limit=1_024, cached_queries=0):
    corpus = corpus_of(PASSAGES)
    encoder = fit_hashing(corpus.texts(0, 4), 256)
    recorder = Recorder(encoder)
    ranker = DenseRanker(recorder, ExactIndex(encoder(corpus.texts(0, 4))))
    return Searcher(LocalSource(corpus, ranker), batch_limit, RecentlyUsed(cached_queries)), recorder


def test_best_first_with_scores():
    searcher, _ = make_searcher()
    (found,) = searcher.search(["Bari, Italy"], 3)
    assert [passage.title for passage in found[:2]] == ["Bari", "Turin"]
    assert len(found) == 3
    assert all(a.score >= b.score for a, b in itertools.pairwise(found))
    assert found[0].contents == PASSAGES[3].contents


def test_one_call_for_a_batch_and_each_query_once():
    searcher, recorder = make_searcher()
    found = searcher.search(["Oslo", "", "Lyon", "Oslo", " \n"], 1)
    assert [[passage.title for passage in hits] for hits in found] == [["Oslo"], [], ["Lyon"], ["Oslo"], []]
    assert recorder.batches == [["Oslo", "Lyon"]]
    found[0].clear()
    assert found[3], "equal queries must not share one list"


def test_what_is_remembered_is_not_searched_for_again():
    searcher, recorder = make_searcher(cached_queries=2)
    first = searcher.search(["Oslo", "Lyon"], 2)
    assert searcher.search(["Lyon", "Oslo"], 2) == first[::-1]
    assert recorder.batches == [["Oslo", "Lyon"]]
    assert len(searcher.search(["Oslo"], 3)[0]) == 3, "another top_n is another question"
    searcher.search(["Bari"], 2)  # "Oslo" for 3 and "Bari" for 2 remain
    searcher.search(["Oslo", "Bari"], 2)
    assert recorder.batches[1:] == [["Oslo"], ["Bari"], ["Oslo"]]
    searcher.search(["x" * 1_001], 1)
    searcher.search(["x" * 1_001], 1)
    assert recorder.batches[4:] == [["x" * 1_001]] * 2, "long queries are not worth their memory"


def test_a_query_that_finds_nothing_is_remembered_too():
    searcher, recorder = make_searcher(cached_queries=2)
    assert searcher.search(["?!"], 1) == searcher.search(["?!"], 1) == [[]]
    assert recorder.batches == [["?!"]]


def test_batches_are_bounded_and_change_nothing():
    queries = [f"{passage.title} {number}" for passage in PASSAGES for number in range(5)]
    whole, _ = make_searcher()
    parts, recorder = make_searcher(batch_limit=6)
    expected = [[(p.id, pytest.approx(p.score, abs=1e-6)) for p in hits] for hits in whole.search(queries, 2)]
    assert [[(p.id, p.score) for p in hits] for hits in parts.search(queries, 2)] == expected
    assert [len(batch) for batch in recorder.batches] == [6, 6, 6, 2]


def test_edges():
    searcher, _ = make_searcher()
    assert searcher.search([], 5) == []
    assert searcher.search(["", "?!"], 5) == [[], []], "a query without a word finds nothing"
    assert len(searcher.search(["Oslo"], 500)[0]) == 4
    assert searcher.search(["x" * 100_000, "\u202e\x00 Oslo"], 1)[1][0].title == "Oslo"
    with pytest.raises(ValueError, match="top_n"):
        searcher.search(["Oslo"], 0)


@pytest.mark.parametrize("kind", ["scann", "exact"])
def test_embedded_passages_are_indexed_once(tmp_path, kind):
    config = RetrievalConfig(encoder_size=256, kind=kind)
    first = open_searcher(config, tmp_path / "index", PASSAGES)
    made = (tmp_path / "index" / "manifest.json").stat().st_mtime_ns
    again = open_searcher(config, tmp_path / "index", PASSAGES)
    assert (tmp_path / "index" / "manifest.json").stat().st_mtime_ns == made
    assert first.search(["Turin"], 2) == again.search(["Turin"], 2)
    assert first.search(["Turin"], 1)[0][0].title == "Turin"


def test_a_run_refuses_the_index_of_another_corpus(tmp_path):
    open_searcher(SMALL, tmp_path / "index", PASSAGES)
    with pytest.raises(ValueError, match="another corpus"):
        open_searcher(SMALL, tmp_path / "index", PASSAGES[:3])


def test_corpus_file_and_built_index(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"id": p.id, "contents": p.contents}) + "\n" for p in PASSAGES))
    open_searcher(RetrievalConfig(corpus=str(corpus), encoder_size=256), tmp_path / "index", ())
    built = RetrievalConfig(index=str(tmp_path / "index"), encoder_size=256)
    searcher = open_searcher(built, tmp_path / "unused", ())
    assert searcher.search(["Lyon"], 1)[0][0].title == "Lyon"
    assert not (tmp_path / "unused").exists()
    corpus.write_text(json.dumps({"id": "0", "contents": "changed"}))
    both = RetrievalConfig(corpus=str(corpus), index=str(tmp_path / "index"), encoder_size=256)
    with pytest.raises(ValueError, match="another corpus"):
        open_searcher(both, tmp_path / "unused", ())


SUPPORTED = {"2wikimultihopqa": 657, "hotpotqa": 60, "musique": 60}


@pytest.mark.parametrize(
    ("method", "least"),
    [
        ("bm25", (0.76, 0.72, 0.52)),
        pytest.param("dense", (0.75, 0.67, 0.55), marks=pytest.mark.slow),
        pytest.param("hybrid", (0.81, 0.75, 0.58), marks=pytest.mark.slow),
    ],
)
def test_supporting_passages_are_found(shared, wiki_index, method, least):
    """The share of supporting titles among the titles of the top five, on real questions."""
    config = RetrievalConfig(corpus=str(shared / "data" / "wiki_mini" / "corpus.jsonl"), kind="exact", method=method)
    searcher = open_searcher(config, wiki_index, ())
    for (name, count), bound in zip(SUPPORTED.items(), least, strict=True):
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
def wiki_index(tmp_path_factory):
    """One folder for all methods: each adds what it needs and finds what is there."""
    return tmp_path_factory.mktemp("wiki") / "index"


def test_words_alone_need_no_vectors(tmp_path):
    config = replace(SMALL, method="bm25", encoder="/no/such/folder")
    searcher = open_searcher(config, tmp_path / "index", PASSAGES)
    assert [p.title for p in searcher.search(["in Italy, surely"], 4)[0]] == ["Turin", "Bari"]
    assert [path.name for path in (tmp_path / "index").iterdir()] == ["bm25"]


def test_vectors_come_to_words_that_were_there_first(tmp_path):
    words = replace(SMALL, method="bm25")
    found = open_searcher(words, tmp_path / "index", PASSAGES).search(["Lyon"], 2)
    made = (tmp_path / "index" / "bm25" / "manifest.json").stat().st_mtime_ns
    hybrid = open_searcher(replace(SMALL, method="hybrid"), tmp_path / "index", PASSAGES)
    assert hybrid.search(["Lyon"], 1)[0][0].title == "Lyon"
    assert (tmp_path / "index" / "bm25" / "manifest.json").stat().st_mtime_ns == made, "not built again"
    assert open_searcher(words, tmp_path / "index", PASSAGES).search(["Lyon"], 2) == found
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


def test_words_survive_a_build_of_vectors_that_fails(tmp_path, monkeypatch):
    words = replace(SMALL, method="bm25")
    open_searcher(words, tmp_path / "index", PASSAGES)
    made = next(tmp_path.rglob("manifest.json")).stat().st_mtime_ns
    with monkeypatch.context() as patched:
        patched.setattr("memsearcher_jax.retrieval.search.build", lambda *args, **more: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            open_searcher(SMALL, tmp_path / "index", PASSAGES)
    open_searcher(SMALL, tmp_path / "index", PASSAGES)
    assert (tmp_path / "index" / "bm25" / "manifest.json").stat().st_mtime_ns == made


@pytest.mark.parametrize("method", ["dense", "bm25", "hybrid"])
def test_every_method_gives_the_same_in_any_batch(tmp_path, method):
    searcher = open_searcher(replace(SMALL, method=method), tmp_path / "index", PASSAGES)
    queries = ["Lyon lies in France", "Italy", "", "zzz", "lies", "France Italy Norway"]
    together = searcher.search(queries, 3)
    alone = [
        open_searcher(replace(SMALL, method=method), tmp_path / "index", PASSAGES).search([q], 3)[0] for q in queries
    ]
    assert [[p.id for p in hits] for hits in together] == [[p.id for p in hits] for hits in alone]
    assert together[0][0].title == "Lyon" and together[2] == []


def test_words_over_a_built_index_need_neither_its_encoder_nor_its_vectors(tmp_path):
    open_searcher(SMALL, tmp_path / "theirs", PASSAGES)
    shutil.rmtree(tmp_path / "theirs" / "embeddings")
    config = RetrievalConfig(index=str(tmp_path / "theirs"), method="bm25", encoder="/no/such/folder")
    assert open_searcher(config, tmp_path / "index", ()).search(["Bari"], 1)[0][0].title == "Bari"
    (tmp_path / "theirs" / "contents.bin").write_bytes(b"cut")
    with pytest.raises(ValueError, match="theirs: is damaged"):
        open_searcher(config, tmp_path / "index", ())


def test_scores_are_compared_only_where_they_mean_the_same(tmp_path):
    """Those of words hang on the whole corpus, those of a model on the model alone."""

    def load(folder):
        def embed(texts):
            return np.ones((len(texts), 2), np.float32)

        return TextEncoder(f"model:{folder}", embed, embed)

    def scale(passages, **changes):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        return open_searcher(replace(SMALL, kind="exact", **changes), folder, passages, load).source.scale

    parts = PASSAGES[:2], PASSAGES[2:]
    assert scale(parts[0], encoder="x") == scale(parts[1], encoder="x") == "dense/model:x"
    for changes in ({}, {"method": "bm25"}, {"method": "hybrid"}, {"method": "hybrid", "encoder": "x"}):
        assert scale(parts[0], **changes) == scale(parts[0], **changes) != scale(parts[1], **changes)


def test_an_index_of_the_users_is_left_as_it_is(tmp_path):
    """The words of a hybrid search are then kept in the run's folder; those that stand beside the vectors are used."""
    open_searcher(SMALL, tmp_path / "theirs", PASSAGES)
    before = sorted(path.name for path in (tmp_path / "theirs").iterdir())
    config = RetrievalConfig(index=str(tmp_path / "theirs"), encoder_size=256, method="hybrid")
    first = open_searcher(config, tmp_path / "index", ())
    assert sorted(path.name for path in (tmp_path / "theirs").iterdir()) == before
    (tmp_path / "index" / "bm25").rename(tmp_path / "theirs" / "bm25")
    assert open_searcher(config, tmp_path / "index", ()).search(["Bari"], 2) == first.search(["Bari"], 2)
    assert not (tmp_path / "index" / "bm25").exists()


def test_an_encoder_that_tells_questions_from_passages(tmp_path):
    """It is loaded by whoever knows models; here, one whose questions are about the town one row further on."""
    words = ["Oslo", "Turin", "Lyon", "Bari"]

    def load(folder):
        def embed(texts, shift=0):
            places = [next((row for row, word in enumerate(words) if word in text), 0) for text in texts]
            return np.eye(4, dtype=np.float32)[[(place + shift) % 4 for place in places]]

        return TextEncoder(f"shifted:{folder}", passages=embed, queries=lambda texts: embed(texts, shift=1))

    config = RetrievalConfig(encoder="folder", kind="exact")
    searcher = open_searcher(config, tmp_path / "index", PASSAGES, load)
    assert [hits[0].title for hits in searcher.search(["Oslo", "Bari"], 1)] == ["Turin", "Oslo"]
    with pytest.raises(ValueError, match=r'was built with encoder "shifted:folder", not "shifted:other"'):
        open_searcher(replace(config, encoder="other"), tmp_path / "index", PASSAGES, load)
    with pytest.raises(ValueError, match=r"retrieval.encoder 'folder' .* hashing"):
        open_searcher(config, tmp_path / "index", PASSAGES)


def test_scann_loses_next_to_nothing_on_real_passages(shared, tmp_path, monkeypatch):
    """A tree over a slice, real questions as queries."""
    monkeypatch.setattr(trees, "SCAN_BELOW", 5_000)
    lines = (shared / "data" / "wiki_mini" / "corpus.jsonl").read_bytes().splitlines(keepends=True)[:5_200]
    (tmp_path / "slice.jsonl").write_bytes(b"".join(lines))
    config = RetrievalConfig(corpus=str(tmp_path / "slice.jsonl"), encoder_size=128)
    approximate = open_searcher(config, tmp_path / "index", ())
    assert (
        isinstance(approximate.source.ranker.index, ScannIndex) and approximate.source.ranker.index.settings is not None
    )
    exact = open_searcher(
        RetrievalConfig(index=str(tmp_path / "index"), kind="exact", encoder_size=128), tmp_path / "unused", ()
    )
    rows = (shared / "data" / "wiki_mini" / "2wikimultihopqa" / "dev.jsonl").read_text().splitlines()[:200]
    queries = [json.loads(row)["question"] for row in rows]
    pairs = zip(approximate.search(queries, 5), exact.search(queries, 5), strict=True)
    shares = [len({p.id for p in a} & {p.id for p in b}) / 5 for a, b in pairs]
    assert sum(shares) / len(shares) > 0.96


def test_reading_the_config_imports_nothing_heavy():
    code = (
        "import sys, memsearcher_jax.retrieval.search;"
        "print([m for m in ('scann', 'bm25s', 'jax', 'tensorflow') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_without_scann_the_way_out_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"ScaNN is not installed .* set retrieval.kind to exact"):
        open_searcher(SMALL, tmp_path / "index", PASSAGES)
    assert not (tmp_path / "index").exists()
    searcher = open_searcher(replace(SMALL, kind="exact"), tmp_path / "index", PASSAGES)
    assert searcher.search(["Oslo"], 1)[0][0].title == "Oslo"
