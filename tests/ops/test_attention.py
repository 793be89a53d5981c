"""Attention over packed rows: the hand-written derivative and the TPU kernel agree with dense attention."""

from dataclasses import dataclass, replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsearcher_jax.model import qwen
from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.ops.attention import (
    PACKED_BLOCK,
    Visible,
    group_heads,
    normalize,
    packed_attention,
    self_attention,
)
from memsearcher_jax.ops.splash_attention import (
    PackedMask,
    _needed_blocks,
    _next_needed,
    splash_attention,
    splash_softmax,
)


@dataclass(frozen=True)
class Row:
    """Packed rows, and the mask that says which keys each query must see."""

    qkv: tuple[jax.Array, jax.Array, jax.Array]  # [B, N or K, T, H]
    visible: Visible
    mask_BTT: np.ndarray
    is_real_B1T1: np.ndarray


def make_row(T, dtype="float32", *, B=2, N=6, K=2, H=8, shared=0.0):
    """Three segments per row, padding at the end, and more query heads than key-value heads.

    `shared`: the share of the first segment that the others continue; the first segments differ in length.
    """
    rng = np.random.default_rng(T)
    qkv = tuple(jnp.asarray(rng.standard_normal((B, n, T, H)), dtype) for n in (N, K, K))
    segment_BT = np.sort(rng.integers(1, 4, (B, T)))
    segment_BT[:, -T // 5 :] = 0
    position_BT, mask_BTT = np.zeros((B, T), np.int32), np.tri(T, dtype=bool) & np.eye(T, dtype=bool)[None].repeat(B, 0)
    for segment_T, position_T, mask_TT in zip(segment_BT, position_BT, mask_BTT, strict=True):
        prefix = int(shared * np.sum(segment_T == 1))
        for segment in (1, 2, 3):
            own = np.flatnonzero(segment_T == segment)
            position_T[own] = np.arange(len(own)) + (prefix if segment > 1 else 0)
            mask_TT[np.ix_(own, own)] = np.tri(len(own), dtype=bool)
            mask_TT[own, :prefix] |= segment > 1
    visible = jax.jit(Visible.of)(position_BT, segment_BT.astype(np.int32))
    return Row(qkv, visible, mask_BTT, (segment_BT > 0)[:, None, :, None])


def gradients(attention, row, qkv=None, mask=None):
    """(output, gradients by q, k and v) of a randomly weighted sum of the output of attention(q, k, v, mask)."""
    qkv, mask = qkv or row.qkv, row.visible if mask is None else mask
    weight_BNTH = np.random.default_rng(0).standard_normal(qkv[0].shape).astype(np.float32)
    (_, out_BNTH), dqkv = _weighted_sum(attention)(*qkv, mask, weight_BNTH, row.is_real_B1T1)
    return out_BNTH, dqkv


@cache
def _weighted_sum(attention):
    """Compiled once for each function and shape; padding has no weight."""

    def loss(q_BNTH, k_BKTH, v_BKTH, mask, weight_BNTH, is_real_B1T1):
        out_BNTH = jnp.where(is_real_B1T1, attention(q_BNTH, k_BKTH, v_BKTH, mask), 0)
        return jnp.sum(weight_BNTH * out_BNTH), out_BNTH

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))


def dense_attention(q_BNTH, k_BKTH, v_BKTH, mask_BTT):
    """Attention that computes every score."""
    k_BNTH, v_BNTH = (jnp.repeat(x, q_BNTH.shape[1] // x.shape[1], axis=1) for x in (k_BKTH, v_BKTH))
    score_BNTT = jnp.einsum("BNtH,BNTH->BNtT", q_BNTH, k_BNTH) * q_BNTH.shape[-1] ** -0.5
    prob_BNTT = jax.nn.softmax(jnp.where(mask_BTT[:, None], score_BNTT, -jnp.inf), axis=-1)
    return jnp.einsum("BNtT,BNTH->BNtH", prob_BNTT, v_BNTH)


def dense_gradients(row):
    return gradients(dense_attention, row, tuple(x.astype(jnp.float32) for x in row.qkv), row.mask_BTT)


@pytest.mark.parametrize(("T", "shared"), [(1, 0), (50, 0.4), (128, 1), (384, 0), (1_100, 0.4), (1_280, 0), (1_280, 1)])
def test_packed_attention_has_the_gradient_of_dense_attention(T, shared):
    row = make_row(T, shared=shared)
    (out, dqkv), (expected_out, expected_dqkv) = gradients(packed_attention, row), dense_gradients(row)
    np.testing.assert_allclose(out, expected_out, rtol=1e-5, atol=1e-6)
    for gradient, expected in zip(dqkv, expected_dqkv, strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5)


def test_packed_attention_skips_blocks_that_no_query_sees():
    """NaN in the keys of the first context reaches only the queries that see its block of keys."""
    T, block = 8 * PACKED_BLOCK, PACKED_BLOCK
    position_BT = np.arange(T)[None] % (4 * block)
    position_BT[:, 4 * block :] += block  # the second context continues the first block
    visible = jax.jit(Visible.of)(position_BT, np.arange(T)[None] // (4 * block) + 1)
    q_BNTH, k_BKTH, v_BKTH = make_row(T, B=1).qkv
    v_BKTH = np.array(v_BKTH)
    v_BKTH[:, :, block : 4 * block] = np.nan  # a weight of 0 would spread it
    out_T = np.asarray(jax.jit(packed_attention)(q_BNTH, k_BKTH, v_BKTH, visible)).sum(axis=(0, 1, 3))
    np.testing.assert_array_equal(np.isfinite(out_T), (np.arange(T) < block) | (np.arange(T) >= 4 * block))


def test_bfloat16_gradients_are_within_rounding():
    row = make_row(256, "bfloat16", shared=0.4)
    rounded = gradients(packed_attention, row)[1]
    for gradient, expected in zip(rounded, dense_gradients(row)[1], strict=True):
        assert gradient.dtype == jnp.bfloat16
        assert np.linalg.norm(gradient.astype(jnp.float32) - expected) < 0.01 * np.linalg.norm(expected)


@pytest.mark.parametrize("shared", [0, 0.5])
@pytest.mark.usefixtures("interpreted")
def test_the_kernel_equals_dense_attention_forward_and_backward(shared):
    """Interpreted on a CPU, with several blocks of queries and keys."""
    row = make_row(384, N=4, H=128, shared=shared)
    out, dqkv = gradients(splash_attention, row)
    expected_out, expected_dqkv = dense_gradients(row)
    np.testing.assert_allclose(out, expected_out, atol=1e-5)
    for gradient, expected in zip(dqkv, expected_dqkv, strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.usefixtures("interpreted")
def test_the_kernel_within_segments_can_be_combined_with_other_keys():
    """Segments and padding of any length, also across blocks: as the XLA path, whose scores exist."""
    row = make_row(384, N=4, H=128)
    lengths, segments = [130, 14, 100, 28, 112], [1, 0, 2, 3, 0]
    segment_BT = np.repeat(segments, lengths)[None].astype(np.int32).repeat(len(row.qkv[0]), axis=0)
    real_T = np.flatnonzero(segment_BT[0])

    def of_real(softmax):
        values = normalize(softmax), softmax.max_BKQT + jnp.log(softmax.sum_BKQT)
        return [jnp.take(value, real_T, axis=3) for value in values]

    def plain(q, k, v, segment_BT):
        return of_real(self_attention(group_heads(q, k), k, v, segment_BT))

    own = jax.jit(lambda *arguments: of_real(splash_softmax(*arguments)))
    for actual, expected in zip(own(*row.qkv, segment_BT), jax.jit(plain)(*row.qkv, segment_BT), strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_the_splash_kernel_computes_the_blocks_that_some_query_needs():
    """Of one row with two contexts of four blocks, of which the second continues the first block."""
    block = 8
    index_T = np.arange(8 * block)
    offset_T = np.where(index_T < 4 * block, 0, 3 * block)
    needed_QC = _needed_blocks(jnp.asarray(offset_T), jnp.int32(block), block)
    expected_QC = np.tri(8, dtype=bool)
    expected_QC[4:, 1:4] = False
    np.testing.assert_array_equal(needed_QC, expected_QC)
    next_QC = np.asarray(_next_needed(needed_QC))
    np.testing.assert_array_equal(next_QC[needed_QC], np.nonzero(needed_QC)[1])
    assert next_QC[4].tolist() == [0, 4, 4, 4, 4, 0, 0, 0]


@cache
def _kernel_sees(mask):
    return jax.jit(lambda offset, prefix, query, key: mask(mask.pack(jnp.full(mask.T, offset), prefix)[query], key))


@given(st.integers(1, 16), st.data())
def test_the_mask_of_the_kernel_is_that_of_packed_attention(log_T, data):
    """For rows of every length: what a query's integer holds is what `Visible` says."""
    T = 2**log_T
    mask = PackedMask(T)
    query, key = (data.draw(st.integers(0, T - 1)) for _ in range(2))
    prefix = data.draw(st.integers(0, min(mask.max_prefix // mask.unit, query // mask.unit))) * mask.unit
    offset = data.draw(st.integers(0, query - prefix))
    assert bool(_kernel_sees(mask)(offset, prefix, query, key)) == (
        key <= query and (key < prefix or key >= offset + prefix)
    )


@pytest.mark.parametrize("log_T", [15, 16])
def test_the_mask_of_the_longest_rows_shifts_by_less_than_an_integer(log_T):
    """MLIR's arith.shrui by 32 bits or more is poison, although XLA's shift is 0."""
    program = jax.make_jaxpr(PackedMask(2**log_T))(jnp.int32(0), jnp.int32(0))
    shifts = [eqn.invars[1].val for eqn in program.eqns if eqn.primitive.name == "shift_right_logical"]
    assert shifts and max(shifts) < 32


def test_the_splash_kernel_refuses_rows_that_no_block_divides():
    row = make_row(200)
    with pytest.raises(ValueError, match=r"rows of 200 tokens: training\.seq_len must be a multiple of 128"):
        splash_attention(*row.qkv, row.visible)


def test_weights_do_not_depend_on_the_attention_setting():
    """Flax creates weights by a pass over a single token, which no block of the kernel divides."""
    xla = ModelConfig(64, 16, 32, 2, 4, 2, 8, attention="xla")
    splash = replace(xla, attention="splash")
    assert qwen.param_specs(splash) == qwen.param_specs(xla)
