import itertools
import math

import bm25s
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsearcher_jax.analyzer import words
from memsearcher_jax.retrieval.bm25 import _terms, open_bm25
from memsearcher_jax.types import Passage
from tests.retrieval.samples import make_corpus

TEXTS = [
    '"Oslo"\nOslo lies in Norway by the sea, and Oslo is old.',
    '"Turin"\nTurin lies in Italy.',
    '"Bari"\nBari lies in Italy by the sea.',
    '"Void"\n—',
    '"Länder"\nÉtudes über 東京 café',
]


@pytest.fixture(scope="module")
def corpus():
    return make_corpus(Passage(str(row), text) for row, text in enumerate(TEXTS))


@pytest.fixture(scope="module")
def bm25(corpus, tmp_path_factory):
    return open_bm25(corpus, tmp_path_factory.mktemp("words") / "bm25")


def formula_scores(query, k1=1.5, b=0.75):
    """Robertson and Zaragoza (2009), equation 3.15, with the idf of Lucene."""
    stop = {"in", "by", "the", "and", "is"}
    split = [[word for word in words(text) if word not in stop] for text in TEXTS]
    mean = sum(map(len, split)) / len(split)
    score = np.zeros(len(split))
    for word in query:
        holding = sum(word in text for text in split)
        idf = math.log(1 + (len(split) - holding + 0.5) / (holding + 0.5))
        for row, text in enumerate(split):
            count = text.count(word)
            score[row] += idf * count / (count + k1 * (1 - b + b * len(text) / mean))
    return score


@pytest.mark.parametrize(
    "query", [["oslo"], ["italy", "sea"], ["lies", "norway"], ["turin", "turin"], ["東", "京", "東京"]]
)
def test_scores_match_the_formula(bm25, query):
    expected = formula_scores(query)
    ((ids, scores),) = bm25.search(["東京" if "東京" in query else " ".join(query)], 5)
    assert set(ids) == set(np.flatnonzero(expected))
    assert scores == pytest.approx(expected[ids], rel=1e-5)
    assert all(a >= b for a, b in itertools.pairwise(scores))


def test_passages_without_a_shared_word_are_not_found(bm25):
    found = rows_of(bm25, "in the", "", "Paris", "\u202e\x00", "SEA", "sea " * 500)
    assert found[:4] == [[]] * 4 and found[4] == found[5] and set(found[4]) == {0, 2}


def rows_of(bm25, *queries):
    return [rows.tolist() for rows, _ in bm25.search(list(queries), 4)]


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("Besan\xe7on", "Besanc\u0327on"),
        ("Beyonc\xe9", "Beyonce"),
        ("\u0141\xf3d\u017a", "LODZ"),
        ("東京都の人口", "東京"),
        ("カタカナ語", "ｶﾀｶﾅ"),
        ("서울은 크다", "서울"),
        ("ภาษาไทย", "ไทย"),
        ("हिन्दी भाषा", "हिन्दी"),
        ("vitamin C", "c"),
    ],
)
def test_a_word_is_found_in_any_form_and_script(tmp_path, text, query):
    for number, (stored, asked) in enumerate([(text, query), (query, text)]):
        corpus = make_corpus([Passage("0", "another passage"), Passage("1", stored)])
        assert rows_of(open_bm25(corpus, tmp_path / str(number)), asked) == [[1]]


@given(st.text(st.characters(max_codepoint=127, exclude_characters="_") | st.sampled_from("'aest ")))
def test_words_of_two_letters_are_those_of_bm25s(text):
    """An index of ASCII text ranks as one that bm25s builds, but for words of one letter and underscores."""
    theirs = bm25s.tokenize([text], stopwords="en", return_ids=False, show_progress=False)[0]
    assert [word for word in _terms(text) if len(word) > 1] == theirs


def test_an_index_of_titles(corpus, tmp_path):
    title_index = open_bm25(corpus, tmp_path / "titles", "title")
    assert rows_of(title_index, "Where is Oslo in Norway?", "Italy by the sea") == [[0], []]


def test_a_corpus_without_words(tmp_path):
    with pytest.raises(ValueError, match=r"no passage of the corpus contains a word: set retrieval\.method"):
        open_bm25(make_corpus([Passage("0", "—")]), tmp_path / "bm25")
    assert list(tmp_path.iterdir()) == []


def test_titles_without_words_find_nothing(tmp_path):
    corpus = make_corpus([Passage("0", '""\nOslo')])
    assert rows_of(open_bm25(corpus, tmp_path / "titles", "title"), "Oslo", "") == [[], []]
