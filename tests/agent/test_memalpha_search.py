"""BM25 over a store's items: the recorded scores, by hand, and the same however the index came to be."""

import json
import math
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsearcher_jax.agent import memalpha_search as bm25
from memsearcher_jax.agent.memalpha_memory import Item, Memory, Store

texts = st.lists(
    st.lists(st.sampled_from(["a", "B", "c", "d-e", "x_y", "...", "東京"]), max_size=5).map(" ".join), max_size=9
)


def test_words():
    assert bm25.words("Ann's x_y, e-mail: 東京 3.5 É!") == ["ann", "s", "x_y", "e", "mail", "東京", "3", "5", "é"]


def test_scores_by_hand():
    index = bm25.index(["red apple", "green pear", "blue sky sky"])
    idf = math.log(2.5) - math.log(1.5)
    longer = 1 - 0.75 + 0.75 * 3 / (7 / 3)
    assert bm25.rank(index, "SKY") == [(2, pytest.approx(idf * 2 * 2.5 / (2 + 1.5 * longer))), (0, 0.0), (1, 0.0)]
    assert bm25.rank(index, "sky", min_score=0.1, top_k=1)[0][0] == 2
    assert bm25.rank(index, "nothing", min_score=0.1) == []
    assert bm25.rank(index, "?!") == bm25.rank(bm25.index([]), "sky") == []


def test_a_word_in_most_texts_gets_a_quarter_of_the_mean():
    index = bm25.index(["a b", "a c", "a d", "e f"])
    rare, common = math.log(3.5) - math.log(1.5), math.log(1.5) - math.log(3.5)
    assert bm25.rank(index, "a")[0] == (0, pytest.approx(0.25 * (5 * rare + common) / 6))


def test_texts_without_any_word_score_nothing_and_are_still_found():
    assert bm25.rank(bm25.index(["...", ""]), "apple") == [(0, 0.0), (1, 0.0)]


def test_equals_keep_their_order():
    index = bm25.index(["k one", "k two", "k one", "m", "o", "p", "q"])
    assert [position for position, _ in bm25.rank(index, "k", top_k=2)] == [0, 1]
    assert [position for position, _ in bm25.rank(index, "k", top_k=None)] == list(range(7))


@given(st.lists(texts, min_size=1, max_size=4))
def test_an_index_that_followed_equals_one_built_at_once(history):
    index = None
    for state in history:
        index = bm25.index(state, index)
        assert index == bm25.index(state)


@given(texts, st.sampled_from(["a", "b c", "d e x_y", "東京 a a"]), st.integers(1, 5))
def test_the_best_are_the_head_of_all(state, query, top_k):
    index = bm25.index(state)
    whole = bm25.rank(index, query, top_k=None)
    assert sorted(position for position, _ in whole) == list(range(len(state)))
    assert whole == sorted(whole, key=lambda hit: (-hit[1], hit[0]))
    assert bm25.rank(index, query, top_k=top_k) == whole[:top_k]
    assert bm25.rank(index, query, top_k=None, min_score=0.0) == [hit for hit in whole if hit[1] >= 0]


def test_a_store_is_searched_with_what_its_items_read(ruler):
    memory = Memory()
    for content in (["red", "apple"], 5, "apple pie", "sky"):
        memory, _ = memory.insert(Store.EPISODIC, content, ruler)
    (best, score), *_ = bm25.search(memory, Store.EPISODIC, "5")
    assert (best.content, score > 0) == (5, True)
    assert bm25.search(memory, Store.SEMANTIC, "5") == ()
    with pytest.raises(ValueError, match="core memory has no items"):
        bm25.search(memory, Store.CORE, "5")


@pytest.mark.slow
def test_a_long_memory_is_followed_and_searched_in_time():
    """130,000 tokens: 4,000 items of 26 words, about 1.25 tokens each, with word frequencies as in language."""
    draw = random.Random(0)
    vocabulary = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(20_000)]
    weights = [1 / rank for rank in range(1, 20_001)]
    items = [" ".join(draw.choices(vocabulary, weights, k=26)) for _ in range(4_000)]
    index = bm25.index(items)
    followed, ranked = [], []
    for step in range(20):
        changed = items[step + 5 :] + [" ".join(draw.choices(vocabulary, weights, k=26)) for _ in range(20)]
        before = time.process_time()
        index = bm25.index(changed, index)
        middle = time.process_time()
        bm25.rank(index, " ".join(draw.choices(vocabulary, weights, k=15)))
        followed.append(1e3 * (middle - before))
        ranked.append(1e3 * (time.process_time() - middle))
    before = time.process_time()
    bm25.index(items)
    whole = 1e3 * (time.process_time() - before)
    median = sorted(followed)[10], sorted(ranked)[10]
    print(f"\nfollow {median[0]:.1f} ms, rank {median[1]:.1f} ms, build from nothing {whole:.1f} ms")
    assert max(median) < 50


def memory_of(case) -> Memory:
    items = tuple(Item(item_id, text, 0) for item_id, text in case["items"])
    return Memory(**{Store(case["store"]).value: items})


def ids(hits) -> list[str]:
    return [item.id for item, _ in hits]


def test_recorded_searches(shared):
    with open(shared / "reference/memalpha/bm25.jsonl", encoding="utf-8") as file:
        cases = [json.loads(line) for line in file]
    for case in cases:
        asked, theirs = case["input"], case["output"]
        if asked["store"] not in ("semantic", "episodic"):
            with pytest.raises(ValueError):
                bm25.search(memory_of(asked | {"items": []}), Store(asked["store"]), asked["query"])
            continue
        memory, store, query = memory_of(asked), Store(asked["store"]), asked["query"]
        found = bm25.search(memory, store, query, top_k=asked["top_k"], min_score=asked["min_score"])
        served = bm25.search(memory, store, query, top_k=asked["top_k"] or 20)
        assert bm25.words(query) == theirs["tokens"], case["id"]
        if theirs["raw_scores"] == {"raises": "ZeroDivisionError"}:  # no item has a word
            assert [score for _, score in served] == [0.0] * len(asked["items"]), case["id"]
            continue
        assert [[item.id, pytest.approx(score, abs=1e-9)] for item, score in found] == theirs["memory_search"], case[
            "id"
        ]
        assert ids(served) == theirs["server_search"], case["id"]
        if theirs["tokens"]:
            index = bm25.index([item.text for item in memory.items(store)])
            raw = [score for _, score in sorted(bm25.rank(index, query, top_k=None))]
            assert raw == pytest.approx(theirs["raw_scores"], abs=1e-9), case["id"]
