"""The kernels of the sampler, interpreted on a CPU, against plain attention over each context's entries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memsearcher_jax.model import sharding
from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.model.rope import apply_rope, rope_rotation
from memsearcher_jax.ops import append_to_pages as appending
from memsearcher_jax.ops import paged_attention as kernels
from memsearcher_jax.ops.attention import combine, normalize, partial_attention
from memsearcher_jax.ops.quantization import quantize, rounded
from memsearcher_jax.planning.tpu_plan import find_topology

rotate = jax.jit(apply_rope)
LAYERS, LAYER, PAGE, PAGES_PER_CHUNK = 2, 1, 8, 5
LENGTHS = {
    "ragged": (0, 5, 8, 40, 17, 1),  # a whole group of six chunks, one of them without entries
    "empty_groups": (0, 0, 0, 0, 0, 33),
    "all_empty": (0, 0, 0, 0, 0, 0),
}
# kv heads, queries of each, head size
HEADS = {"one": (1, 7, 16), "two": (2, 3, 16), "0.5B": (2, 7, 64), "full": (1, 2, 128)}


@pytest.fixture(scope="module")
def attention():
    """The kernel, compiled once for each shape, with two pages in a block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "BLOCK_ENTRIES", 2 * PAGE)
        yield jax.jit(kernels.paged_attention)


@pytest.fixture
def random():
    rng = np.random.default_rng(0)
    return lambda *shape: rng.normal(size=shape).astype(np.float32)


def page_table(chunks: int) -> np.ndarray:
    """Random pages; the chunks 1 and 2 share their first two, and pages that are not read have no valid number."""
    table_AI = np.random.default_rng(1).permutation(chunks * PAGES_PER_CHUNK).reshape(chunks, -1).astype(np.int32)
    table_AI[2, :2] = table_AI[1, :2]
    return table_AI


@jax.jit
def attention_to_pages(q_AKQWH, k_LPKHE, v_LPKEH, page_table_AI, length_A):
    """The softmax over the entries, gathered."""
    A, K, _, W, H = q_AKQWH.shape
    k_AKHC = jnp.moveaxis(k_LPKHE[LAYER][page_table_AI], 1, 3).reshape(A, K, H, -1)
    v_AKCH = jnp.moveaxis(v_LPKEH[LAYER][page_table_AI], 1, 2).reshape(A, K, -1, H)
    mask_AWC = jnp.arange(k_AKHC.shape[3]) < jnp.broadcast_to(length_A[:, None, None], (A, W, 1))
    return partial_attention(q_AKQWH, k_AKHC, v_AKCH, mask_AWC)


@jax.jit
def attention_to_others_too(softmax, q_AKQWH, k_AKHC, v_AKCH):
    mask_AWC = jnp.ones((*q_AKQWH.shape[:1], q_AKQWH.shape[3], k_AKHC.shape[3]), bool)
    return normalize(combine([softmax, partial_attention(q_AKQWH, k_AKHC, v_AKCH, mask_AWC)]))


def with_unread_pages_unknown(page_table_AI, length_A):
    return np.where(np.arange(PAGES_PER_CHUNK) * PAGE < length_A[:, None], page_table_AI, 10**6)


def pools(random, chunks, K, H):
    pages = chunks * PAGES_PER_CHUNK
    return random(LAYERS, pages, K, H, PAGE), random(LAYERS, pages, K, PAGE, H)


@jax.jit
def in_int8(keys, values):
    """(pools in int8, with their scales; what they stand for), of pools or of new tokens."""
    axis = 3 if keys.shape[3:] != values.shape[3:] else 4
    (k, key_scale), (v, value_scale) = quantize(keys, [axis]), quantize(values, [4])
    exact = jnp.float32(k) * jnp.expand_dims(key_scale, axis), jnp.float32(v) * value_scale[..., None]
    return (k, v, jnp.stack([key_scale, value_scale], axis=axis)), exact


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.usefixtures("interpreted")
def test_attention_reads_the_pages_of_each_chunk(heads, lengths, int8, random, attention):
    (K, Q, H), A, W = heads, len(lengths), 3
    q_AKQWH, pool, table_AI, length_A = random(A, K, Q, W, H), pools(random, A, K, H), page_table(A), np.array(lengths)
    stored, pool = in_int8(*pool) if int8 else (pool, pool)
    expected = attention_to_pages(q_AKQWH, *pool, table_AI, length_A)
    table_AI = with_unread_pages_unknown(table_AI, length_A)
    softmax = attention(q_AKQWH, stored, jnp.int32(LAYER), table_AI, length_A)
    some = length_A > 0
    for field, atol in (("max_BKQT", 1e-5), ("sum_BKQT", 0), ("acc_BKQTH", 1e-5)):
        actual, plain = (np.asarray(getattr(x, field))[some] for x in (softmax, expected))
        np.testing.assert_allclose(actual, plain, rtol=1e-4, atol=atol)

    # Combined with other keys, a chunk without entries has no weight.
    keys = random(A, K, H, 4), random(A, K, 4, H)
    outputs = [attention_to_others_too(one, q_AKQWH, *keys) for one in (softmax, expected)]
    np.testing.assert_allclose(*outputs, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("interpreted")
def test_a_chunk_that_exceeds_the_memory_of_a_core_is_cut(random, monkeypatch):
    """Each of its three queries becomes a chunk of its own, which reads the same pages."""
    K, Q, _ = HEADS["two"]
    monkeypatch.setattr(kernels, "BLOCK_ENTRIES", 2 * PAGE)
    monkeypatch.setattr(kernels, "vmem_bytes", lambda: K * Q * kernels.QUERY_BYTES)
    chunks = []
    attend = kernels._attention
    monkeypatch.setattr(
        kernels, "_attention", lambda *arguments: chunks.append(arguments[0].shape) or attend(*arguments)
    )
    attention = jax.jit(lambda *arguments: kernels.paged_attention(*arguments))
    test_attention_reads_the_pages_of_each_chunk(HEADS["two"], LENGTHS["ragged"], False, random, attention)
    assert [shape[0] for shape in chunks] == [3 * len(LENGTHS["ragged"])]


DECODED = [("full", True), ("0.5B", False)]
DECODED_SLOWLY = [("full", False), ("0.5B", True), ("two", False), ("two", True), ("one", False), ("one", True)]


@pytest.mark.parametrize(
    ("heads", "int8"), [*DECODED, *(pytest.param(*case, marks=pytest.mark.slow) for case in DECODED_SLOWLY)]
)
@pytest.mark.usefixtures("interpreted")
def test_decoding_also_reads_the_decode_buffer_and_its_own_token(heads, int8, random):
    (K, Q, H), lengths, J, used = HEADS[heads], LENGTHS["ragged"], 4, 3
    A, length_A = len(lengths), np.array(lengths)
    q_AKQ1H, pool, table_AI = random(A, K, Q, 1, H), pools(random, A, K, H), page_table(A)
    own, buffer = (random(A, K, 1, H), random(A, K, 1, H)), (random(LAYERS, A, K, J, H), random(LAYERS, A, K, J, H))
    own[1][2, :, 0, 0] = np.inf
    rotation = jax.jit(rope_rotation, static_argnums=(1, 2))(length_A[:, None], H, 10_000.0)
    buffer[0][:, :, :, used:] = np.nan  # a key that is NaN says nothing to those who do not see it
    stored, pool = in_int8(*pool) if int8 else (pool, pool)
    k_AK1H, v_AK1H = np.array(rotate(own[0], rotation)), own[1].copy()
    if int8:
        k_AK1H, v_AK1H = np.array(jax.jit(rounded)(k_AK1H)), np.array(jax.jit(rounded)(v_AK1H))
    k_AK1H[2], v_AK1H[2] = np.nan, 0

    k_AKCH, v_AKCH = (
        np.concatenate([old[LAYER, :, :, :used], new], axis=2)
        for old, new in zip(buffer, (k_AK1H, v_AK1H), strict=True)
    )
    rotated_AKQ1H = rotate(q_AKQ1H.reshape(A, K * Q, 1, H), rotation).reshape(q_AKQ1H.shape)
    cached = attention_to_pages(rotated_AKQ1H, *pool, table_AI, length_A)
    expected_AKQ1H = attention_to_others_too(cached, rotated_AKQ1H, np.swapaxes(k_AKCH, 2, 3), v_AKCH)

    tokens = kernels.NewTokens(*rotation, *own, *buffer)
    entries = kernels.CachedEntries(jnp.int32(LAYER), with_unread_pages_unknown(table_AI, length_A), length_A)
    out_AKQ1H, *new = jax.jit(kernels.decode_attention)(q_AKQ1H, tokens, jnp.int32(used), stored, entries)
    out_AKQ1H = np.asarray(out_AKQ1H)
    np.testing.assert_allclose(out_AKQ1H, expected_AKQ1H, rtol=1e-4, atol=1e-5)
    assert np.isnan(out_AKQ1H[2]).all() and np.isnan(out_AKQ1H).sum() == K * Q * H
    np.testing.assert_allclose(new[0], k_AK1H, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(new[1], v_AK1H, rtol=1e-6 * int8)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(("K", "H"), [(2, 16), (2, 64), (1, 128)])
@pytest.mark.parametrize(
    ("W", "starts", "added"), [(6, (0, 6, 13, 5), (6, 5, 6, 0)), (20, (0, 20, 3, 17), (20, 3, 19, 20))]
)
@pytest.mark.usefixtures("interpreted")
def test_chunks_are_appended_exactly_and_nothing_else_changes(K, H, W, starts, added, int8, random):
    """The chunks 0 and 1 follow each other in one context; a token whose keys are NaN changes that token only."""
    A = len(starts)
    pool, new = pools(random, A, K, H), [random(LAYERS, A, K, W, H), random(LAYERS, A, K, W, H)]
    new[0][:, 0, :, 1] = np.nan
    table_AI = page_table(A)
    table_AI[2, :2], table_AI[1] = (10, 11), table_AI[0]
    if int8:
        pool, new = in_int8(*pool)[0], in_int8(*new)[0]
    k_LPKHE, v_LPKEH, *scales = map(np.array, pool)
    for chunk in range(A):
        for token in range(added[chunk]):
            page, entry = divmod(starts[chunk] + token, PAGE)
            k_LPKHE[:, table_AI[chunk, page], :, :, entry] = new[0][:, chunk, :, token]
            v_LPKEH[:, table_AI[chunk, page], :, entry] = new[1][:, chunk, :, token]
            for scale_LPK2E in scales:
                scale_LPK2E[:, table_AI[chunk, page], :, :, entry] = new[2][:, chunk, :, token]
    result = jax.jit(appending.append_to_pages)(pool, new, table_AI, np.array(starts), np.array(added))
    for appended, expected in zip(result, (k_LPKHE, v_LPKEH, *scales), strict=True):
        np.testing.assert_array_equal(appended, expected)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.usefixtures("interpreted")
def test_layers_that_a_core_does_not_hold_together_are_appended_in_parts(int8, random, monkeypatch):
    monkeypatch.setattr(appending, "APPEND_SHARE", 0)
    grids = []
    call = appending.pl.pallas_call
    monkeypatch.setattr(
        appending.pl,
        "pallas_call",
        lambda *arguments, grid_spec, **rest: (
            grids.append(grid_spec.grid) or call(*arguments, grid_spec=grid_spec, **rest)
        ),
    )
    heads = 3  # as no other test has: what was traced for the same shapes would be used again
    test_chunks_are_appended_exactly_and_nothing_else_changes(heads, 16, 6, (0, 6, 13, 5), (6, 5, 6, 0), int8, random)
    assert grids == [(4, LAYERS)]


@pytest.mark.parametrize(("megabytes", "parts"), [(64, 1), (16, 2), (4, 7)])
def test_layers_are_appended_in_the_fewest_parts_that_fit_a_core(megabytes, parts, monkeypatch):
    """Of Qwen3-0.6B; a core of a v4 has 16 MiB."""
    monkeypatch.setattr(appending, "vmem_bytes", lambda: megabytes << 20)
    pool = jax.ShapeDtypeStruct((28, 64, 8, 128, 128), jnp.bfloat16)
    new = jax.ShapeDtypeStruct((28, 8, 8, 16, 128), jnp.bfloat16)
    assert appending._layer_parts([pool, pool], [new, new]) == parts


SHAPES = {  # kv heads, queries of each, head size, layers: of one device
    "7B, tensor 4": (1, 7, 128, 28),
    "7B, tensor 2": (2, 7, 128, 28),
    "7B": (4, 7, 128, 28),
    "3B, tensor 2": (1, 8, 128, 36),
    "3B": (2, 8, 128, 36),
    "0.5B, tensor 2": (1, 7, 64, 24),
    "0.5B": (2, 7, 64, 24),
    "Qwen3-0.6B": (8, 2, 128, 28),
}


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    ("shape", "topology", "dtype"),
    [*((shape, "v5e:2x2", dtype) for shape in SHAPES for dtype in ("bfloat16", "int8"))]
    + [
        (shape, topology, dtype)
        for shape in ("7B", "0.5B", "Qwen3-0.6B")
        for topology in ("v4:2x2x1", "v6e:2x2", "v5p:2x2x1", "tpu7x:2x2x1")
        for dtype in ("bfloat16", "int8")
    ],
)
def test_the_kernels_compile_for_every_tpu_and_copy_no_pool(shape, topology, dtype, tpu_compiler):
    mesh = sharding.make_mesh(MeshConfig(1, 1, -1), find_topology(topology).devices)
    (K, Q, H, L), E, context_pages, P, J = SHAPES[shape], 128, 64, 1_024, 32

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding.named_sharding(mesh, ()))

    def step(pools, rotation, chunk_q, q_AKQWH, own, buffer, new, table, layer, start_A):
        """A prefill chunk, a token, and the end of a call."""
        prefill = kernels.paged_attention(chunk_q, pools, layer, table[:16], start_A[:16])
        tokens = kernels.NewTokens(*rotation, *own, *buffer)
        entries = kernels.CachedEntries(layer, table, start_A)
        decode = kernels.decode_attention(q_AKQWH, tokens, layer, pools, entries)
        return appending.append_to_pages(pools, new, table, start_A, start_A), prefill, decode

    A, int32, stored = 64, jnp.int32, jnp.dtype(dtype)
    pools = [array(L, P, K, H, E, dtype=stored), array(L, P, K, E, H, dtype=stored)]
    buffer = (array(L, A, K, J, H),) * 2
    new = buffer
    if dtype == "int8":
        pools.append(array(L, P, K, 2, E, dtype=jnp.float32))
        new = *[array(L, A, K, J, H, dtype=stored)] * 2, array(L, A, K, J, 2, dtype=jnp.float32)
    rotation, queries = (array(A, 1, H // 2, dtype=jnp.float32),) * 2, (array(16, K, Q, 64, H), array(A, K, Q, 1, H))
    where = array(A, context_pages, dtype=int32), array(dtype=int32), array(A, dtype=int32)
    arguments = pools, rotation, *queries, (array(A, K, 1, H),) * 2, buffer, new, *where
    with jax.set_mesh(mesh):
        specs = jax.sharding.PartitionSpec()
        local = jax.shard_map(step, in_specs=specs, out_specs=specs, check_vma=False)
        memory = jax.jit(local, donate_argnums=0).lower(*arguments).compile().memory_analysis()
    assert memory.alias_size_in_bytes == sum(pool.size * pool.dtype.itemsize for pool in pools)
    assert memory.temp_size_in_bytes < 50e6
