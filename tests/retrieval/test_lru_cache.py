from hypothesis import given
from hypothesis import strategies as st

from memsearcher_jax.retrieval.lru_cache import LRUCache


def test_the_least_recently_used_entry_is_evicted():
    cache = LRUCache(2)
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.get("a") == 1  # so that "b" is older
    cache.put("c", 3)
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (1, None, 3)


@given(st.integers(0, 5), st.lists(st.tuples(st.booleans(), st.integers(0, 8))))
def test_a_cache_is_bounded_and_correct(limit, steps):
    cache, truth = LRUCache(limit), {}
    for number, (writes, key) in enumerate(steps):
        if writes:
            cache.put(key, number)
            truth[key] = number
        else:
            assert cache.get(key) in (None, truth.get(key))
        assert len(cache._entries) <= limit
