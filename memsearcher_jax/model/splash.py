"""Attention over packed rows by the splash kernel of JAX (Pallas, TPU): no [T, T] scores, forward or backward.

Left to XLA, one row of 8,192 tokens with the heads of 7B needs 11 GB of scores, which no small chip has.
"""

from __future__ import annotations

import jax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as mask

from memsearcher_jax.model.attention import SAVED
from memsearcher_jax.model.axes import per_device

BLOCKS = (1_024, 512, 256, 128)
"""Tokens that the kernel works on at a time: the widest that divides a row."""


def attend(
    q_BNTH: jax.Array, k_BKTH: jax.Array, v_BKTH: jax.Array, segment_BT: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """out_BNTH: each token looks at the tokens of its segment up to itself; the same as `attention.attend` of them.

    Rows and heads that devices share are theirs alone: a kernel knows no mesh. `interpret` runs it on a CPU.
    Raises ValueError for rows whose length no block divides.
    """
    T = q_BNTH.shape[2]
    block = next((block for block in BLOCKS if T % block == 0), None)
    if block is None:
        raise ValueError(f"rows of {T} tokens do not divide into blocks of {BLOCKS[-1]}: choose training.row_tokens so")

    def attend_here(q_BNTH: jax.Array, k_BKTH: jax.Array, v_BKTH: jax.Array, segment_BT: jax.Array) -> jax.Array:
        attend_row = kernel.make_splash_mha(
            mask.MultiHeadMask([mask.CausalMask((T, T))] * q_BNTH.shape[1]),
            block_sizes=_block_sizes(block),
            head_shards=1,
            q_seq_shards=1,
            residual_checkpoint_name=SAVED,
            interpret=interpret,
        )
        segments = kernel.SegmentIds(q=segment_BT, kv=segment_BT)
        # The kernel does not scale the scores.
        return jax.vmap(attend_row)(q_BNTH * q_BNTH.shape[-1] ** -0.5, k_BKTH, v_BKTH, segments)

    heads, kv = ("batch", "heads", None, None), ("batch", "kv", None, None)
    return per_device(attend_here, (heads, kv, kv, ("batch", None)), heads)(q_BNTH, k_BKTH, v_BKTH, segment_BT)


def _block_sizes(block: int) -> kernel.BlockSizes:
    """One size throughout, and one fused backward pass for keys, values and queries."""
    return kernel.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        use_fused_bwd_kernel=True,
    )
