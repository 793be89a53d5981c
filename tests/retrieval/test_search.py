import itertools
import json
import subprocess
import sys
from dataclasses import dataclass, field, replace

import pytest

from memsearcher_jax.agent.types import Passage
from memsearcher_jax.retrieval.approximate import ScannIndex
from memsearcher_jax.retrieval.corpus import corpus_of
from memsearcher_jax.retrieval.encode import fit_hashing
from memsearcher_jax.retrieval.index import ExactIndex
from memsearcher_jax.retrieval.search import RetrievalConfig, Searcher, open_searcher

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


def make_searcher(batch_limit=1_024):
    corpus = corpus_of(PASSAGES)
    encoder = fit_hashing(corpus.texts(0, 4), 256)
    recorder = Recorder(encoder)
    return Searcher(corpus, ExactIndex(encoder(corpus.texts(0, 4))), recorder, batch_limit), recorder


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


def test_scann_loses_next_to_nothing_on_real_passages(shared, tmp_path):
    """A slice that is large enough for a tree, real questions as queries."""
    lines = (shared / "data" / "wiki_mini" / "corpus.jsonl").read_bytes().splitlines(keepends=True)[:5_200]
    (tmp_path / "slice.jsonl").write_bytes(b"".join(lines))
    config = RetrievalConfig(corpus=str(tmp_path / "slice.jsonl"), encoder_size=128)
    approximate = open_searcher(config, tmp_path / "index", ())
    assert isinstance(approximate.index, ScannIndex) and approximate.index.settings is not None
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
