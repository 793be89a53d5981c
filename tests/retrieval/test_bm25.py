import itertools
import json
import math
import shutil

import numpy as np
import pytest

from memsearcher_jax.agent.types import Passage
from memsearcher_jax.retrieval.bm25 import build, open_bm25
from memsearcher_jax.retrieval.corpus import corpus_of

TEXTS = [
    '"Oslo"\nOslo lies in Norway by the sea, and Oslo is old.',
    '"Turin"\nTurin lies in Italy.',
    '"Bari"\nBari lies in Italy by the sea.',
    '"Void"\n—',
    '"Länder"\nÉtudes über 東京 café',
]


@pytest.fixture(scope="module")
def corpus():
    return corpus_of(Passage(str(row), text) for row, text in enumerate(TEXTS))


@pytest.fixture(scope="module")
def words(corpus, tmp_path_factory):
    return open_bm25(corpus, tmp_path_factory.mktemp("words") / "bm25")


def by_the_formula(query, k1=1.5, b=0.75):
    """Robertson and Zaragoza 2009, equation 3.15, with the idf of Lucene; every passage, without a library."""
    stop = {"in", "by", "the", "and", "is"}
    split = [[w for w in text.lower().replace('"', " ").replace(",", " ").replace(".", " ").split()] for text in TEXTS]
    split = [[word for word in text if word not in stop and word != "—"] for text in split]
    mean = sum(map(len, split)) / len(split)
    score = np.zeros(len(split))
    for word in query:
        holding = sum(word in text for text in split)
        idf = math.log(1 + (len(split) - holding + 0.5) / (holding + 0.5))
        for row, text in enumerate(split):
            count = text.count(word)
            score[row] += idf * count / (count + k1 * (1 - b + b * len(text) / mean))
    return score


@pytest.mark.parametrize("query", [["oslo"], ["italy", "sea"], ["lies", "norway"], ["turin", "turin"], ["東京"]])
def test_scores_are_those_of_the_formula(words, query):
    expected = by_the_formula(query)
    ids_QN, scores_QN = words.rank([" ".join(query)], 5)
    found = ids_QN[0] >= 0
    assert set(ids_QN[0][found]) == set(np.flatnonzero(expected))
    assert scores_QN[0][found] == pytest.approx(expected[ids_QN[0][found]], rel=1e-5)
    assert all(a >= b for a, b in itertools.pairwise(scores_QN[0]))


def test_what_shares_no_word_is_not_found(words):
    ids_QN, scores_QN = words.rank(["in the", "", "Paris", "\u202e\x00", "SEA", "sea " * 500], 4)
    assert (ids_QN[:4] == -1).all() and np.isneginf(scores_QN[:4]).all()
    assert ids_QN[4].tolist() == ids_QN[5].tolist() and set(ids_QN[4]) == {0, 2}


def test_titles_have_words_of_their_own(corpus, tmp_path):
    titles = open_bm25(corpus, tmp_path / "titles", "title")
    assert titles.rank(["Where is Oslo in Norway?"], 5)[0].tolist() == [[0]]
    assert (titles.rank(["Italy by the sea"], 5)[0] == -1).all()


def test_ties_are_in_the_order_of_the_corpus(tmp_path):
    ranker = open_bm25(corpus_of(Passage(str(row), "same words here") for row in range(9)), tmp_path / "bm25")
    assert ranker.rank(["words"], 4)[0].tolist() == [[0, 1, 2, 3]]


def test_it_is_built_once_and_can_be_moved(corpus, words, tmp_path):
    build(corpus, tmp_path / "bm25")
    made = (tmp_path / "bm25" / "manifest.json").stat().st_mtime_ns
    (tmp_path / "bm25").rename(tmp_path / "moved")
    again = open_bm25(corpus, tmp_path / "moved")
    assert (tmp_path / "moved" / "manifest.json").stat().st_mtime_ns == made
    for mine, theirs in zip(again.rank(["sea of Italy"], 3), words.rank(["sea of Italy"], 3), strict=True):
        assert mine.tolist() == theirs.tolist()


def test_another_corpus_and_damage_are_refused(corpus, tmp_path):
    build(corpus, tmp_path / "bm25")
    with pytest.raises(ValueError, match="was built from another corpus"):
        open_bm25(corpus_of([Passage("0", "Oslo")]), tmp_path / "bm25")
    manifest = json.loads((tmp_path / "bm25" / "manifest.json").read_text())
    for name, content in [
        ("manifest.json", "{"),
        ("manifest.json", "[]"),
        ("manifest.json", json.dumps(manifest | {"field": "title"})),
        ("manifest.json", json.dumps(manifest | {"format": 1})),
        ("vocab.index.json", "{"),
        ("data.csc.index.npy", "spoilt"),
        ("data.csc.index.npy", ""),
    ]:
        shutil.copytree(tmp_path / "bm25", tmp_path / "spoilt")
        (tmp_path / "spoilt" / name).write_text(content)
        with pytest.raises(ValueError, match=r"spoilt: is no BM25 index that can be read .* delete it") as refused:
            open_bm25(corpus, tmp_path / "spoilt")
        assert "\n" not in str(refused.value)
        shutil.rmtree(tmp_path / "spoilt")


def test_a_build_that_stops_half_way_leaves_nothing(corpus, tmp_path, monkeypatch):
    def full(self, folder, **options):
        (folder / "data.csc.index.npy").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("bm25s.BM25.save", full)
    with pytest.raises(OSError, match=r"bm25: the disk is full; make room and give the same command again"):
        build(corpus, tmp_path / "bm25")
    assert list(tmp_path.iterdir()) == []


def test_a_corpus_without_a_word(tmp_path):
    with pytest.raises(ValueError, match=r"no passage of the corpus holds a word: set retrieval\.method"):
        build(corpus_of([Passage("0", "—")]), tmp_path / "bm25")
    assert list(tmp_path.iterdir()) == []
