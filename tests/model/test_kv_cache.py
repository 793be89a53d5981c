"""The cache: what is fed in pieces equals what is fed whole, and nothing that stands is ever moved or overwritten."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memsearcher_jax.model.cache import Cache


@pytest.fixture
def feed(forward):
    def feed(params, config, cache, ids_BT, real_B=None):
        """One cached call; row b's first real_B[b] tokens are real."""
        rows, width = ids_BT.shape
        real_B = np.full(rows, width) if real_B is None else np.asarray(real_B)
        position_BT = cache.length_B[:, None] + jnp.arange(width)
        segment_BT = (np.arange(width) < real_B[:, None]).astype(np.int32)
        return forward(params, config, ids_BT, position_BT, segment_BT, cache)

    return feed


def test_decode_equals_the_full_forward(variant, make_params, make_rows, feed, forward):
    _, config = variant
    params, rows = make_params(config), make_rows(config, 2, 8)
    whole_BTV, _ = forward(params, config, *rows)
    cache, logits = Cache.empty(config, 2, 8), []
    for t in range(8):
        logits_B1V, cache = feed(params, config, cache, rows[0][:, t : t + 1])
        logits.append(logits_B1V)
    np.testing.assert_allclose(jnp.concatenate(logits, axis=1), whole_BTV, atol=1e-5)
    assert cache.length_B.tolist() == [8, 8]


def test_chunks_of_different_real_lengths_equal_the_full_forward(base, make_params, make_rows, feed, forward):
    """Each row is at its own place; padding in a block is neither written nor seen by what follows."""
    params = make_params(base)
    ids_BT, *rest = make_rows(base, 3, 12)
    whole_BTV, _ = forward(params, base, ids_BT, *rest)
    cache, done_B = Cache.empty(base, 3, 16), np.zeros(3, int)
    for real_B in ([4, 1, 0], [2, 4, 3], [4, 0, 4], [2, 4, 4], [0, 3, 1]):
        block_BT = np.full((3, 4), 77, np.int32)
        for row, real in enumerate(real_B):
            block_BT[row, :real] = ids_BT[row, done_B[row] : done_B[row] + real]
        logits_BTV, cache = feed(params, base, cache, block_BT, real_B)
        for row, real in enumerate(real_B):
            expected_TV = whole_BTV[row, done_B[row] : done_B[row] + real]
            np.testing.assert_allclose(logits_BTV[row, :real], expected_TV, atol=1e-5)
        done_B += real_B
        assert cache.length_B.tolist() == done_B.tolist()
    assert done_B.tolist() == [12, 12, 12]


def test_what_lies_behind_the_length_is_never_read(base, make_params, make_rows, feed):
    params = make_params(base)
    ids_BT, *_ = make_rows(base, 2, 6)
    _, cache = feed(params, base, Cache.empty(base, 2, 10), ids_BT[:, :4], [4, 2])
    behind = jnp.arange(10) >= cache.length_B[:, None]
    garbage = replace(
        cache,
        k_LBNKHP=jnp.where(behind[None, :, None, None, None, :], 1e3, cache.k_LBNKHP),
        v_LBNKPH=jnp.where(behind[None, :, None, None, :, None], 1e3, cache.v_LBNKPH),
    )
    clean_BTV, _ = feed(params, base, cache, ids_BT[:, 4:])
    dirty_BTV, _ = feed(params, base, garbage, ids_BT[:, 4:])
    np.testing.assert_array_equal(clean_BTV, dirty_BTV)


@pytest.mark.parametrize("width", [1, 3, 8])
def test_append_writes_the_real_tokens_and_nothing_else(width, base):
    """Every length and every number of real tokens, the windows that would run past the end included."""
    capacity = 8
    shape_LKCH = (base.layers, base.kv_heads, capacity, base.head_size)
    cases = [(length, real) for length in range(capacity + 1) for real in range(width + 1)]
    draw = np.random.RandomState(0)
    k_LBKCH, v_LBKCH = (
        draw.standard_normal((base.layers, len(cases), *shape_LKCH[1:])).astype(np.float32) for _ in range(2)
    )
    new = [
        draw.standard_normal((base.layers, len(cases), base.kv_heads, width, base.head_size)).astype(np.float32)
        for _ in range(2)
    ]
    length_B, real_B = map(np.array, zip(*cases, strict=True))
    k_LBNKHP, v_LBNKPH = jnp.asarray(k_LBKCH).swapaxes(3, 4)[:, :, None], jnp.asarray(v_LBKCH)[:, :, None]
    cache = Cache(k_LBNKHP, v_LBNKPH, jnp.asarray(length_B, jnp.int32))
    segment_BT = (np.arange(width) < real_B[:, None]).astype(np.int32)
    written = cache.append(*map(jnp.asarray, new), jnp.asarray(segment_BT))
    for old_LBKCH, new_LBKTH, found_LBKCH in zip(
        (k_LBKCH, v_LBKCH), new, (written.k_LBNKHP[:, :, 0].swapaxes(3, 4), written.v_LBNKPH[:, :, 0]), strict=True
    ):
        expected_LBKCH = old_LBKCH.copy()
        for row, (length, real) in enumerate(cases):
            fits = min(real, capacity - length)
            expected_LBKCH[:, row, :, length : length + fits] = new_LBKTH[:, row, :, :fits]
        np.testing.assert_array_equal(found_LBKCH, expected_LBKCH)
    # An overflow stays visible.
    assert written.length_B.tolist() == (length_B + real_B).tolist()


def test_a_padded_block_near_the_end_is_safe(base, make_params, make_rows, feed, forward):
    params = make_params(base)
    ids_BT, *rest = make_rows(base, 1, 8)
    whole_BTV, _ = forward(params, base, ids_BT, *rest)
    _, cache = feed(params, base, Cache.empty(base, 1, 8), ids_BT[:, :6])
    block_BT = np.concatenate([ids_BT[:, 6:7], np.full((1, 4), 9, np.int32)], axis=1)
    logits_BTV, cache = feed(params, base, cache, block_BT, [1])
    np.testing.assert_allclose(logits_BTV[:, 0], whole_BTV[:, 6], atol=1e-5)
    logits_BTV, cache = feed(params, base, cache, ids_BT[:, 7:])
    np.testing.assert_allclose(logits_BTV[:, 0], whole_BTV[:, 7], atol=1e-5)
    assert cache.length_B.tolist() == [8]


def test_a_block_wider_than_the_cache_is_refused(base, make_params, make_rows, feed):
    ids_BT, *_ = make_rows(base, 1, 5)
    with pytest.raises(ValueError, match="a block of 5 tokens cannot be written to a cache of 4"):
        feed(make_params(base), base, Cache.empty(base, 1, 4), ids_BT)


def test_the_cache_is_updated_in_place(base, make_params, feed):
    """Donated, it comes back in its own memory, and the program needs far less than a second copy beside it."""
    params, cache = make_params(base), Cache.empty(base, 4, 4096)
    cache_bytes = cache.k_LBNKHP.nbytes + cache.v_LBNKPH.nbytes
    step = jax.jit(lambda cache, ids_B1: feed(params, base, cache, ids_B1), donate_argnums=0)
    memory = step.lower(cache, np.ones((4, 1), np.int32)).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes / 2


def test_the_cache_has_the_compute_type(base):
    cache = Cache.empty(replace(base, compute_dtype="bfloat16"), 2, 4)
    assert (cache.k_LBNKHP.dtype, cache.v_LBNKPH.dtype, cache.length_B.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.int32)
    assert cache.k_LBNKHP.shape == (base.layers, 2, 1, base.kv_heads, base.head_size, 4)
    assert cache.v_LBNKPH.shape == (base.layers, 2, 1, base.kv_heads, 4, base.head_size)
