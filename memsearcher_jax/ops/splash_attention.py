"""Attention over packed rows and within segments by the splash kernel, JAX's Pallas kernel for TPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask

from memsearcher_jax.ops.attention import ATTENTION_OUTPUT, OnlineSoftmax, Visible, normalized_softmax
from memsearcher_jax.ops.axes import shard_map_per_device

SPLASH_BLOCKS = (1_024, 512, 256, 128)
"""Block sizes: the largest that divides a row is used."""


def splash_attention(q_BNTH: Array, k_BKTH: Array, v_BKTH: Array, visible: Visible) -> Array:
    """`packed_attention` by JAX's Pallas kernel for TPUs, which never materialises the [T, T] scores.

    One row of 8,192 tokens with the heads of Qwen2.5-7B has 11 GB of scores. Blocks that no query needs are skipped. On
    a mesh each device runs the kernel on its own rows and heads. Raises ValueError for rows that no block divides.
    """
    return _splash(q_BNTH, k_BKTH, v_BKTH, visible, with_logsumexp=False)


def splash_softmax(q_BNTH: Array, k_BKTH: Array, v_BKTH: Array, segment_BT: Array) -> OnlineSoftmax:
    """Attention within segments by the same kernel, to be combined with that to other keys. It has no gradient.

    The tokens of a segment are adjacent. Raises ValueError for rows that no block divides.
    """
    out_BNTH, logsumexp_BNT = _splash(q_BNTH, k_BKTH, v_BKTH, Visible.of_segments(segment_BT), with_logsumexp=True)
    return normalized_softmax(out_BNTH, logsumexp_BNT, k_BKTH)


def _splash(q_BNTH: Array, k_BKTH: Array, v_BKTH: Array, visible: Visible, *, with_logsumexp: bool) -> Any:
    """out_BNTH, or (out_BNTH, logsumexp_BNT of each query's scores), which the kernel cannot differentiate."""
    T = q_BNTH.shape[2]
    block = next((block for block in SPLASH_BLOCKS if T % block == 0), None)
    if block is None or T > 2**16:
        raise ValueError(
            f"rows of {T} tokens: training.seq_len must be a multiple of {SPLASH_BLOCKS[-1]}, up to {2**16}"
        )
    sizes = splash.BlockSizes(
        **dict.fromkeys(("block_q", "block_kv", "block_kv_compute"), block),
        **dict.fromkeys(("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute"), block),
        use_fused_bwd_kernel=True,
    )
    mask = PackedMask(T)

    def local_attention(q_BNTH: Array, k_BKTH: Array, v_BKTH: Array, offset_BT: Array, prefix_B: Array) -> Any:
        causal = splash.make_splash_mha(
            splash_mask.MultiHeadMask([splash_mask.CausalMask((T, T))] * q_BNTH.shape[1]),
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=1,
            residual_checkpoint_name=ATTENTION_OUTPUT,
            save_residuals=with_logsumexp,
        )

        def row_attention(q_NTH: Array, k_KTH: Array, v_KTH: Array, offset_T: Array, prefix: Array) -> Any:
            # The kernel calls the mask function with one integer per query, which need not be the query's index.
            query_T = mask.pack(offset_T, prefix)
            needed_XY = _needed_blocks(offset_T, prefix, block)
            assert causal.dq_mask_info is None  # as with the fused backward kernel

            def mask_info(causal_info: Any, next_XY: Array) -> Any:
                block_mask = needed_XY[None].astype(jnp.int32)
                return causal_info._replace(q_sequence=query_T, block_mask=block_mask, data_next=next_XY[None])

            next_forward_XY = _next_needed(needed_XY)
            next_backward_XY = _next_needed(needed_XY.T).T
            kernel = splash.SplashAttentionKernel(
                mask_info(causal.fwd_mask_info, next_forward_XY),
                None,
                mask_info(causal.dkv_mask_info, next_backward_XY),
                **causal.kwargs | {"mask_function": mask},
            )
            result = kernel(q_NTH, k_KTH, v_KTH)
            return (result[0], *result[1]) if with_logsumexp else result

        # The kernel does not scale the scores.
        rows = q_BNTH * q_BNTH.shape[-1] ** -0.5, k_BKTH, v_BKTH, offset_BT, prefix_B
        if len(q_BNTH) == 1:
            return jax.tree.map(lambda x: x[None], row_attention(*(x[0] for x in rows)))
        # Not vmap: with the blocks of several rows it takes gigabytes.
        return jax.lax.map(lambda row: row_attention(*row), rows)

    heads = ("batch", "heads", None, None)
    kv = ("batch", "kv", None, None)
    in_axes = (heads, kv, kv, ("batch", None), ("batch",))
    out_axes = (heads, heads[:3]) if with_logsumexp else heads
    out_shape = (q_BNTH.shape, q_BNTH.shape[:3]) if with_logsumexp else q_BNTH.shape
    attention = shard_map_per_device(local_attention, in_axes, out_axes, out_shape)
    return attention(q_BNTH, k_BKTH, v_BKTH, *visible)


@dataclass(frozen=True)
class PackedMask:
    """The mask of `splash_attention` over rows of T tokens: a function of one integer per query and the key's index.

    The integer holds, from its lowest bits, the query's index, its offset (see `Visible`), and the prefix in units. So
    P is a multiple of `unit`, at most `max_prefix`: any number up to 2,048 tokens per row, then 4, 32 or 256 for twice
    as many each. The class compares by value because JAX compiles once for every mask function.
    """

    T: int

    @property
    def bits(self) -> int:
        return max((self.T - 1).bit_length(), 1)

    @property
    def unit(self) -> int:
        """So that prefixes reach a quarter of the row."""
        return 2 ** max(3 * self.bits - 34, 0)

    @property
    def max_prefix(self) -> int:
        return min((2 ** (32 - 2 * self.bits) - 1) * self.unit, self.T)

    def pack(self, offset_T: Array, prefix: Array) -> Array:
        """query_T, int32."""
        index_T = jnp.arange(self.T, dtype=jnp.int32)
        return index_T | offset_T << self.bits | prefix // self.unit << 2 * self.bits

    def __call__(self, query: Array, key: Array) -> Array:
        mask = 2**self.bits - 1
        index = query & mask
        offset = jax.lax.shift_right_logical(query, self.bits) & mask
        # In the longest rows the prefix has no bits: a kernel's shift by 32 is undefined.
        prefix = jax.lax.shift_right_logical(query, 2 * self.bits) * self.unit if self.max_prefix else 0
        # In the prefix key - prefix is negative, and without its sign larger than any offset: a second comparison of
        # the same two values would cost more.
        return (key <= index) & ((key - prefix) & 0x7FFFFFFF >= offset)


def _needed_blocks(offset_T: Array, prefix: Array, block: int) -> Array:
    """needed_XY, bool: whether some query of block X sees a key of block Y."""
    first_own_X1 = jnp.min((offset_T + prefix).reshape(-1, block), axis=1, keepdims=True) // block
    X1 = jnp.arange(len(first_own_X1))[:, None]
    Y = jnp.arange(len(first_own_X1))
    return (Y <= X1) & ((first_own_X1 <= Y) | (Y * block < prefix))


def _next_needed(needed_XY: Array) -> Array:
    """next_XY, int32: the Y of the next needed block in memory order, from each block on; the kernel fetches it."""
    index_XY = jnp.arange(needed_XY.size, dtype=jnp.int32).reshape(needed_XY.shape)
    next_X = jax.lax.cummin(jnp.where(needed_XY, index_XY, index_XY[-1, -1]).ravel(), reverse=True)
    return next_X.reshape(needed_XY.shape) % needed_XY.shape[1]
