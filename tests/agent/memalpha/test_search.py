"""BM25 over a store's items: the recorded scores, scores by hand, and the order of equal scores."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsearcher_jax.agent.memalpha import search as bm25
from memsearcher_jax.agent.memalpha.search import BM25Index

texts = st.lists(
    st.lists(st.sampled_from(["a", "B", "c", "d-e", "x_y", "...", "東京"]), max_size=5).map(" ".join), max_size=9
)


def test_tokenize():
    assert bm25.tokenize("Ann's x_y, e-mail: 東京 3.5 É!") == ["ann", "s", "x_y", "e", "mail", "東京", "3", "5", "é"]


def test_scores_by_hand():
    index = BM25Index.build(["red apple", "green pear", "blue sky sky"])
    idf = math.log(2.5) - math.log(1.5)
    longer = 1 - 0.75 + 0.75 * 3 / (7 / 3)
    assert index.rank("SKY", 20) == [(2, pytest.approx(idf * 2 * 2.5 / (2 + 1.5 * longer))), (0, 0.0), (1, 0.0)]
    assert index.rank("nothing", 2) == [(0, 0.0), (1, 0.0)]
    assert index.rank("?!", 20) == BM25Index.build([]).rank("sky", 20) == []


def test_a_word_in_most_texts_gets_a_quarter_of_the_mean_idf():
    index = BM25Index.build(["a b", "a c", "a d", "e f"])
    rare, common = math.log(3.5) - math.log(1.5), math.log(1.5) - math.log(3.5)
    assert index.rank("a", 20)[0] == (0, pytest.approx(0.25 * (5 * rare + common) / 6))


def test_texts_without_words_score_0_and_are_returned():
    assert BM25Index.build(["...", ""]).rank("apple", 20) == [(0, 0.0), (1, 0.0)]


def test_equal_scores_keep_their_order():
    index = BM25Index.build(["k one", "k two", "k one", "m", "o", "p", "q"])
    assert [position for position, _ in index.rank("k", 2)] == [0, 1]
    assert [position for position, _ in index.rank("k", 7)] == list(range(7))


@given(texts, st.sampled_from(["a", "b c", "d e x_y", "東京 a a"]), st.integers(1, 5))
def test_top_k_is_a_prefix_of_the_complete_ranking(state, query, top_k):
    index = BM25Index.build(state)
    whole = index.rank(query, len(state))
    assert sorted(position for position, _ in whole) == list(range(len(state)))
    assert whole == sorted(whole, key=lambda hit: (-hit[1], hit[0]))
    assert index.rank(query, top_k) == whole[:top_k]


def test_recorded_searches(recorded):
    for case in recorded("memalpha/bm25.jsonl"):
        asked, theirs, query = case["input"], case["output"], case["input"]["query"]
        if asked["store"] not in ("semantic", "episodic"):  # the original raises: the core is no list
            continue
        ids, index = [id for id, _ in asked["items"]], BM25Index.build([text for _, text in asked["items"]])
        found = index.rank(query, len(ids) if asked["top_k"] is None else asked["top_k"])
        served = index.rank(query, asked["top_k"] or 20)
        assert bm25.tokenize(query) == theirs["tokens"], case["id"]
        if theirs["raw_scores"] == {"raises": "ZeroDivisionError"}:  # no item has a word
            assert [score for _, score in served] == [0.0] * len(ids), case["id"]
            continue
        least = -math.inf if asked["min_score"] is None else asked["min_score"]
        ours = [[ids[position], pytest.approx(score, abs=1e-9)] for position, score in found if score >= least]
        assert ours == theirs["memory_search"], case["id"]
        assert [ids[position] for position, _ in served] == theirs["server_search"], case["id"]
        if theirs["tokens"]:
            raw = [score for _, score in sorted(index.rank(query, len(ids)))]
            assert raw == pytest.approx(theirs["raw_scores"], abs=1e-9), case["id"]
