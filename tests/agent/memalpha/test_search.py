"""BM25 over a store's items: the recorded scores, scores by hand, and the order of equal scores."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsearcher_jax.agent.memalpha import search as bm25
from memsearcher_jax.agent.memalpha.memory import Item, Memory, Store
from memsearcher_jax.agent.memalpha.search import BM25Index

texts = st.lists(
    st.lists(st.sampled_from(["a", "B", "c", "d-e", "x_y", "...", "東京"]), max_size=5).map(" ".join), max_size=9
)


@given(texts, st.sampled_from(["a", "b c", "d e x_y", "東京 a a"]), st.integers(1, 5))
def test_top_k_is_a_prefix_of_the_complete_ranking_in_which_equal_scores_keep_their_order(state, query, top_k):
    index = BM25Index.build(state)
    whole = index.rank(query, top_k=None)
    assert sorted(position for position, _ in whole) == list(range(len(state)))
    assert whole == sorted(whole, key=lambda hit: (-hit[1], hit[0]))
    assert index.rank(query, top_k=top_k) == whole[:top_k]
    assert index.rank(query, top_k=None, min_score=0.0) == [hit for hit in whole if hit[1] >= 0]


def memory_of(case) -> Memory:
    items = tuple(Item(item_id, text, 0) for item_id, text in case["items"])
    return Memory(**{Store(case["store"]).value: items})


def ids(hits) -> list[str]:
    return [item.id for item, _ in hits]


def test_recorded_searches(recorded):
    for case in recorded("memalpha/bm25.jsonl"):
        asked, theirs = case["input"], case["output"]
        if asked["store"] not in ("semantic", "episodic"):
            with pytest.raises(ValueError):
                bm25.search(memory_of(asked | {"items": []}), Store(asked["store"]), asked["query"])
            continue
        memory, store, query = memory_of(asked), Store(asked["store"]), asked["query"]
        found = bm25.search(memory, store, query, top_k=asked["top_k"], min_score=asked["min_score"])
        served = bm25.search(memory, store, query, top_k=asked["top_k"] or 20)
        assert bm25.tokenize(query) == theirs["tokens"], case["id"]
        if theirs["raw_scores"] == {"raises": "ZeroDivisionError"}:  # no item has a word
            assert [score for _, score in served] == [0.0] * len(asked["items"]), case["id"]
            continue
        ours = [[item.id, pytest.approx(score, abs=1e-9)] for item, score in found]
        assert ours == theirs["memory_search"], case["id"]
        assert ids(served) == theirs["server_search"], case["id"]
        if theirs["tokens"]:
            index = BM25Index.build([item.text for item in memory.items(store)])
            raw = [score for _, score in sorted(index.rank(query, top_k=None))]
            assert raw == pytest.approx(theirs["raw_scores"], abs=1e-9), case["id"]
