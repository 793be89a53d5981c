"""The paged KV cache: decoding and chunked prefill equal the full forward pass; nothing is moved or overwritten."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memsearcher_jax.model import kv_cache, qwen
from memsearcher_jax.model.kv_cache import Cache, CacheView, DecodeBuffer, DecodeCache, copy_pages
from memsearcher_jax.ops import attention
from memsearcher_jax.ops.axes import as_bits, from_bits

common_pages = jax.jit(kv_cache.common_pages, static_argnums=0)
view_of = jax.jit(CacheView.of)
WIDTH = 64  # tokens of a chunk
HELD = (700, 0, 530, 511)  # tokens that each context holds before: several pages, none, about four pages of 128
NEW = (130, 64, 1, 65)  # tokens that are added to each context


@dataclass
class Rows:
    """A cache with a context for each row of a batch; its pages are in random order."""

    cache: Cache
    table_BI: np.ndarray
    length_B: np.ndarray

    @classmethod
    def empty(cls, config, rows, capacity, page_tokens, int8=False):
        pages = -(-capacity // page_tokens)
        table_BI = np.random.default_rng(0).permutation(rows * pages).reshape(rows, pages).astype(np.int32)
        return cls(Cache.empty(config, rows * pages, page_tokens, int8=int8), table_BI, np.zeros(rows, np.int32))

    def entries(self, row, count=None):
        """The first keys and values of a row, as [L, K, H, C] and [L, K, C, H]."""
        k_LNKHE, v_LNKEH = (np.asarray(x)[:, self.table_BI[row]] for x in (self.cache.k_LPKHE, self.cache.v_LPKEH))
        k_LKHC, v_LKCH = np.concatenate(np.moveaxis(k_LNKHE, 1, 0), -1), np.concatenate(np.moveaxis(v_LNKEH, 1, 0), -2)
        return k_LKHC[..., :count], v_LKCH[..., :count, :]


@pytest.fixture
def feed(forward):
    def feed(params, config, rows, ids_BT, real_B=None):
        """One cached call, after which row b has real_B[b] more tokens; the logits."""
        B, width = ids_BT.shape
        real_B = np.full(B, width) if real_B is None else np.asarray(real_B)
        position_BT = rows.length_B[:, None] + np.arange(width)
        segment_BT = (np.arange(width) < real_B[:, None]).astype(np.int32)
        view = view_of(rows.cache, rows.table_BI, *[rows.length_B] * 2)
        logits_BTV, rows.cache = forward(params, config, ids_BT, position_BT, segment_BT, view)
        rows.length_B = rows.length_B + real_B.astype(np.int32)
        return np.asarray(logits_BTV)

    return feed


@pytest.fixture
def fill(feed):
    def fill(params, config, rows, texts):
        """Appends these texts to the rows."""
        ids_BT = np.zeros((len(texts), padded(max(map(len, texts)))), np.int32)
        for row, text in enumerate(texts):
            ids_BT[row, : len(text)] = text
        feed(params, config, rows, ids_BT, list(map(len, texts)))

    return fill


@pytest.fixture
def contexts(base):
    rng = np.random.default_rng(0)
    return [rng.integers(0, base.vocab_size, held + new) for held, new in zip(HELD, NEW, strict=True)]


def padded(tokens):
    """A power of two, so that texts of different lengths need few programs."""
    return 1 << (tokens - 1).bit_length()


def full_logits(params, config, forward, ids_T):
    """The logits of one context, in one pass without a cache."""
    row, position_1T = np.zeros((1, padded(len(ids_T))), np.int32), np.arange(padded(len(ids_T)))[None]
    row[0, : len(ids_T)] = ids_T
    logits_BTV, _ = forward(params, config, row, position_1T, np.int32(position_1T < len(ids_T)))
    return np.asarray(logits_BTV)[0, : len(ids_T)]


@pytest.mark.parametrize("name", ["grouped_untied", "multi_query_tied", "qwen3_tied", "llama3_untied"])
def test_decode_equals_the_full_forward(name, variants, make_params, make_rows, feed, forward):
    config = variants[name]
    params, (ids_BT, *rest) = make_params(config), make_rows(config, 2, 12)
    expected_BTV, _ = forward(params, config, ids_BT, *rest)
    rows = Rows.empty(config, 2, 12, 5)
    logits = [feed(params, config, rows, ids_BT[:, t : t + 1]) for t in range(12)]
    np.testing.assert_allclose(np.concatenate(logits, axis=1), expected_BTV, atol=1e-5)


def test_in_int8_a_token_is_the_same_in_its_own_pass_and_in_a_page(base, make_params, make_rows, feed, forward):
    """However a text is cut into calls, its logits are equal, and near those without rounding."""
    params, (ids_BT, *rest) = make_params(base), make_rows(base, 2, 12)
    exact_BTV, _ = forward(params, base, ids_BT, *rest)
    results = []
    for width in (12, 4, 1):
        rows = Rows.empty(base, 2, 12, 5, int8=True)
        logits = [feed(params, base, rows, ids_BT[:, t : t + width]) for t in range(0, 12, width)]
        results.append(np.concatenate(logits, axis=1))
        np.testing.assert_allclose(results[-1], results[0], atol=1e-5)
    difference = np.abs(results[0] - exact_BTV)
    assert 1e-4 < difference.max() < 0.02 * np.abs(exact_BTV).max()


def test_in_int8_values_that_are_not_finite_reach_only_those_who_see_them(base, make_params, make_rows, feed):
    params, (ids_BT, *_) = make_params(base), make_rows(base, 2, 6)
    rows = Rows.empty(base, 2, 10, 5, int8=True)
    bad = params | {"layers": params["layers"] | {"wv": params["layers"]["wv"].at[:].set(jnp.inf)}}
    feed(bad, base, rows, ids_BT[:, :3], [3, 0])
    scale_LPK2E = rows.cache.scale_LPK2E
    assert jnp.isnan(scale_LPK2E[:, :, :, 0]).any() and jnp.isfinite(scale_LPK2E[:, :, :, 1]).all()
    logits_BTV = feed(params, base, rows, ids_BT[:, 3:5])
    assert np.isnan(logits_BTV[0]).all() and np.isfinite(logits_BTV[1]).all()


@pytest.mark.parametrize("page_tokens", [1, 4])
@pytest.mark.parametrize("width", [1, 3, 11])
def test_append_writes_the_real_tokens_and_nothing_else(width, page_tokens, base):
    """Every length and every number of real tokens, including windows that would pass the end of a page."""
    capacity = 8
    cases = [(length, real) for length in range(capacity + 1) for real in range(width + 1)]
    rng, L, K, H = np.random.RandomState(0), base.layers, base.kv_heads, base.head_size
    rows = Rows.empty(base, len(cases), capacity, page_tokens)
    pools = [jnp.asarray(rng.standard_normal(x.shape), x.dtype) for x in (rows.cache.k_LPKHE, rows.cache.v_LPKEH)]
    rows.cache = Cache(*pools)
    new = [rng.standard_normal((L, len(cases), K, width, H)).astype(np.float32) for _ in range(2)]
    length_B, real_B = (np.array(x, np.int32) for x in zip(*cases, strict=True))
    segment_BT = (np.arange(width) < real_B[:, None]).astype(np.int32)
    view = view_of(rows.cache, rows.table_BI, *[length_B] * 2)
    written = replace(rows, cache=jax.jit(CacheView.append)(view, *map(jnp.asarray, new), jnp.asarray(segment_BT)))
    for row, (length, real) in enumerate(cases):
        (k_LKHC, v_LKCH), end = rows.entries(row), min(length + real, capacity)
        k_LKHC, v_LKCH = k_LKHC.copy(), v_LKCH.copy()
        k_LKHC[..., length:end] = np.swapaxes(new[0][:, row, :, : end - length], 2, 3)
        v_LKCH[:, :, length:end] = new[1][:, row, :, : end - length]
        for found, expected in zip(written.entries(row), (k_LKHC, v_LKCH), strict=True):
            np.testing.assert_array_equal(found, expected)


def test_the_cache_is_updated_in_place(base, make_params, forward):
    """A donated cache keeps its memory, and the program needs far less than a second copy."""
    params, rows = make_params(base), Rows.empty(base, 4, 4096, 256)
    cache_bytes = rows.cache.k_LPKHE.nbytes + rows.cache.v_LPKEH.nbytes

    def step(cache, table_BI, length_B, ids_B1):
        view = CacheView.of(cache, table_BI, length_B, length_B)
        return forward(params, base, ids_B1, length_B[:, None], jnp.ones_like(ids_B1), view)

    arguments = (rows.cache, rows.table_BI, rows.length_B, np.ones((4, 1), np.int32))
    memory = jax.jit(step, donate_argnums=0).lower(*arguments).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes / 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bits_are_those_of_the_values(dtype):
    values = jnp.asarray([1.5, -0.0, jnp.inf, 3e-39], dtype)
    stored = as_bits(values)
    assert stored.dtype == ("uint16" if dtype == "bfloat16" else dtype)
    assert from_bits(stored).dtype == dtype
    assert np.array_equal(np.asarray(from_bits(stored)).view(np.uint8), np.asarray(values).view(np.uint8))


def block_of(contexts, table_BI, order, chunks):
    """The new tokens of these contexts, split into chunks in one row, and what each chunk reads.

    (ids, position, segment) of the tokens; (table, start, read) of each chunk.
    """
    tokens_AW, segment_AW = np.zeros((2, chunks, WIDTH), np.int32)
    start_A, length_A = np.zeros((2, chunks), np.int32)
    table_AI = np.zeros((chunks, table_BI.shape[1]), np.int32)
    starts = [(number, at) for number in order for at in range(HELD[number], HELD[number] + NEW[number], WIDTH)]
    for chunk, (number, at) in enumerate(starts):
        text = contexts[number][at : at + WIDTH]
        tokens_AW[chunk, : len(text)], segment_AW[chunk, : len(text)] = text, number + 1
        start_A[chunk], length_A[chunk], table_AI[chunk] = at, HELD[number], table_BI[number]
    position_AW = start_A[:, None] + np.arange(WIDTH, dtype=np.int32)
    return [x.reshape(1, -1) for x in (tokens_AW, position_AW, segment_AW)], (table_AI, start_A, length_A)


def test_chunks_attend_to_their_context_and_to_each_other(base, make_params, forward, fill, contexts):
    """Wider than a query block, longer than a page, with unused chunks at the end."""
    params, rows = make_params(base), Rows.empty(base, 4, 900, 128)
    fill(params, base, rows, [ids_T[:held] for ids_T, held in zip(contexts, HELD, strict=True)])
    (ids_1T, position_1T, segment_1T), chunks = block_of(contexts, rows.table_BI, (3, 1, 0, 2), chunks=8)
    assert ids_1T.shape[1] > 2 * attention.QUERY_BLOCK
    view = view_of(rows.cache, *chunks)
    logits_1TV, rows.cache = forward(params, base, ids_1T, position_1T, segment_1T, view)
    logits_1TV = np.asarray(logits_1TV)
    for number, ids_T in enumerate(contexts):
        expected_TV = full_logits(params, base, forward, ids_T)[HELD[number] :]
        np.testing.assert_allclose(logits_1TV[0][segment_1T[0] == number + 1], expected_TV, atol=2e-5)
    # The cache equals that of one pass over the full context.
    for row, ids_T in enumerate(contexts):
        alone = Rows.empty(base, 1, 900, 128)
        fill(params, base, alone, [ids_T])
        for actual, expected in zip(rows.entries(row, len(ids_T)), alone.entries(0, len(ids_T)), strict=True):
            np.testing.assert_allclose(actual, expected, atol=2e-5)


@pytest.mark.parametrize(
    ("tables", "lengths", "common"),
    [
        ([[3, 1, 2], [3, 1, 5]], [12, 12], 2),
        ([[3, 1, 2], [3, 1, 5]], [12, 5], 3),
        ([[3, 1, 2], [4, 1, 2]], [12, 12], 0),
        ([[3, 1, 2], [4, 1, 2]], [9, 0], 3),
        ([[3, 1, 2], [4, 1, 2]], [0, 0], 0),
    ],
)
def test_common_pages_are_those_that_every_chunk_reads_or_lacks(tables, lengths, common):
    assert common_pages(4, np.array(lengths), np.array(tables)).tolist() == [common, common]


@pytest.mark.parametrize("int8", [False, True])
def test_copied_pages_are_equal_and_the_others_unchanged(int8, base):
    rng, empty = np.random.default_rng(0), Cache.empty(base, 5, 4, int8=int8)
    cache = jax.tree.map(lambda x: jnp.asarray(100 * rng.standard_normal(x.shape), x.dtype), empty)
    copied = jax.jit(copy_pages)(cache, np.array([1, 3, 0]), np.array([3, 4, 0]))
    for before, after in zip(jax.tree.leaves(cache), jax.tree.leaves(copied), strict=True):
        np.testing.assert_array_equal(after, np.asarray(before)[:, [0, 1, 2, 1, 1]])


@pytest.mark.parametrize("rows_together", [1, 3, 8])
@pytest.mark.parametrize("shared", [0, 1])
def test_paged_attention_is_that_of_the_named_pages(shared, rows_together, monkeypatch):
    monkeypatch.setattr(kv_cache, "MAX_ROWS_TOGETHER", rows_together)
    rng = np.random.default_rng(0)
    L, A, context_pages, K, Q, W, H, E = 2, 6, 3, 2, 2, 4, 8, 16
    q_AKQWH = rng.standard_normal((A, K, Q, W, H)).astype(np.float32)
    k_LPKHE = rng.standard_normal((L, A * context_pages, K, H, E)).astype(np.float32)
    v_LPKEH = rng.standard_normal((L, A * context_pages, K, E, H)).astype(np.float32)
    table_AI = rng.permutation(A * context_pages).reshape(A, context_pages)
    table_AI[:, :shared] = table_AI[0, :shared]
    length_A = np.array([40, 0, 48, 1, 17, 16], np.int32)
    attend = jax.jit(lambda *arguments: attention.normalize(kv_cache.paged_attention(*arguments)))
    out_AKQWH = np.asarray(attend(q_AKQWH, (k_LPKHE, v_LPKEH), np.int32(1), table_AI, length_A, np.int32(shared)))
    for chunk, length in enumerate(length_A):
        if length:
            k_KHC = np.concatenate(list(k_LPKHE[1, table_AI[chunk]]), axis=-1)[..., :length]
            v_KCH = np.concatenate(list(v_LPKEH[1, table_AI[chunk]]), axis=-2)[:, :length]
            score_KQWC = np.einsum("KQWH,KHC->KQWC", q_AKQWH[chunk], k_KHC) * H**-0.5
            weight_KQWC = np.exp(score_KQWC - score_KQWC.max(-1, keepdims=True))
            expected_KQWH = np.einsum("KQWC,KCH->KQWH", weight_KQWC / weight_KQWC.sum(-1, keepdims=True), v_KCH)
            np.testing.assert_allclose(out_AKQWH[chunk], expected_KQWH, atol=1e-5)


@pytest.mark.parametrize("int8", [pytest.param(False, marks=pytest.mark.variant), True])
@pytest.mark.parametrize("platform", ["tpu", "gpu"])
@pytest.mark.usefixtures("interpreted")
def test_the_kernels_fill_and_read_the_cache_as_xla_does(platform, int8, base, make_params, make_rows, monkeypatch):
    """Two prefill chunks of each context, then two tokens that only the decode buffer holds."""
    base = replace(base, head_size=16, layers=2)
    params, rows = make_params(base), Rows.empty(base, 3, 64, 16, int8)
    ids_BT, _, _ = make_rows(base, 3, 40)
    table_BI, real_B = jnp.asarray(rows.table_BI), np.array([19, 5, 0])

    def run(cache: Cache, params: dict):
        @jax.jit
        def prefill(cache, ids_BT, length_B):
            segment_BT = (jnp.arange(19) < real_B[:, None]).astype(jnp.int32)
            position_BT, view = length_B[:, None] + jnp.arange(19), CacheView.of(cache, table_BI, length_B, length_B)
            hidden, cache = qwen.forward(params, base, ids_BT, position_BT, segment_BT, view, output="hidden")
            return jnp.where(segment_BT[..., None] > 0, hidden, 0), cache

        @jax.jit
        def decode(cache, buffer, ids_B1, length_B, token):
            position_B1, segment_B1 = length_B[:, None] + token, jnp.ones((3, 1), jnp.int32)
            view = DecodeCache(CacheView.of(cache, table_BI, length_B, length_B), buffer)
            return qwen.forward(params, base, ids_B1, position_B1, segment_B1, view, output="hidden")

        outputs, buffer = [], DecodeBuffer.empty(base, 3, 4)
        for chunk in range(2):
            hidden, cache = prefill(cache, ids_BT[:, 19 * chunk : 19 * (chunk + 1)], chunk * real_B)
            outputs.append(hidden)
        for token in range(2):
            hidden, buffer = decode(cache, buffer, ids_BT[:, 38 + token : 39 + token], 2 * real_B, token)
            outputs.append(hidden)
        return outputs, cache, buffer

    expected = run(rows.cache, params)
    monkeypatch.setattr(kv_cache, "platform", lambda: platform)
    actual = run(rows.cache, qwen.publish(params, base, platform, "float32"))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), actual, expected)
