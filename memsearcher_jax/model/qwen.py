"""Qwen2.5 and dense Qwen3 as pure functions over a plain dict of arrays; Flax stays inside this file.

Weights keep the orientation of the Hugging Face files (output before input), so that loading and saving only reshape.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from memsearcher_jax.model import splash
from memsearcher_jax.model.attention import SAVED, attend, attend_to_row, rotary_angles, rotate
from memsearcher_jax.model.axes import constrain, exchange, fetch, part_of
from memsearcher_jax.model.cache import Cache, Growing, Reading, Recent
from memsearcher_jax.model.config import ModelConfig

ZEROS, ONES = nn.initializers.zeros, nn.initializers.ones
PROJECTIONS = "projections"  # name of queries, keys and values, for a remat policy
KEPT = {"full": (), "attention": (SAVED,), "projections": (SAVED, PROJECTIONS)}
"""By `ModelConfig.remat`: what the backward pass finds beside each layer's input."""


@functools.partial(jax.jit, static_argnames="config")
def init(key: jax.Array, config: ModelConfig) -> dict:
    """Random weights in `config.param_dtype`; the leaves under "layers" are stacked, [L, ...].

    Of variance 1 / inputs, and what is added to the residual stream of 1 / (2 L inputs) (GPT-2: Radford et al., 2019,
    section 2.3). At the size of 7B that is Qwen's 0.02; a narrow model would never learn to copy with 0.02.

    Under `jax.jit` with `out_shardings=sharding.param_shardings(config, mesh)` each device makes its own part only.
    """
    return jax.tree.map(lambda box: box.value, _boxed_init(key, config), is_leaf=_is_box)


@dataclass(frozen=True)
class Weight:
    """What is declared about one weight: one logical axis (see axes.py) per dimension."""

    shape: tuple[int, ...]
    dtype: jnp.dtype
    axes: tuple[str, ...]


def declared(config: ModelConfig) -> dict:
    """The tree of `init` with each array's `Weight` in its place; takes no memory."""
    return jax.tree.map(lambda weight: weight, _declared(config))  # a tree of the caller's own


@functools.cache
def _declared(config: ModelConfig) -> dict:
    # The key is made inside: under the mesh of a machine that is only compiled for, nothing can run.
    boxes = jax.eval_shape(lambda: _boxed_init(jax.random.key(0), config))
    return jax.tree.map(lambda box: Weight(box.value.shape, box.value.dtype, box.names), boxes, is_leaf=_is_box)


def weight_axes(config: ModelConfig) -> dict:
    """The tree of `init` with each array's logical axes in its place."""
    return jax.tree.map(lambda weight: weight.axes, declared(config))


def forward(
    params: dict,
    config: ModelConfig,
    ids_BT: jax.Array,
    position_BT: jax.Array,
    segment_BT: jax.Array,
    cache: Cache | Reading | Growing | None = None,
    *,
    output: Literal["logits", "hidden"] = "logits",
) -> tuple[jax.Array, Cache | Recent | None]:
    """(logits_BTV float32 or hidden_BTD in compute_dtype, what holds the new tokens: `cache.append` of them).

    Without a cache a row may pack several texts: tokens see their own segment only; segment 0 is padding.
    With a cache segment_BT is 1 for tokens and 0 for padding, which stands at the end; row b's tokens stand at the
    positions behind all that the row holds (as position_BT must say), see it, and are added to it.
    What comes out at padding means nothing.
    Raises ValueError for another `output`, or for a block wider than the cache.
    """
    if output not in ("logits", "hidden"):
        raise ValueError(f"output {output!r}: choose logits or hidden")
    hidden_BTD, cache = Qwen(config).apply({"params": params}, ids_BT, position_BT, segment_BT, cache)
    return (hidden_BTD if output == "hidden" else logits(output_table(params, config), hidden_BTD)), cache


def output_table(params: dict, config: ModelConfig) -> jax.Array:
    """table_VD in compute_dtype: the output layer, fetched once for all the chunks that `logits` takes."""
    return fetch(_output_part(params, config), ("vocab", "embed"))


def output_layer(params: dict, config: ModelConfig, hidden_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(the table of `output_table`, hidden_BTD), for training: the table waits for the hidden states to be there.

    And going backward they wait for its gradient to be scattered. So neither is whole while layers are computed.
    """
    part_VD, hidden_BTD = jax.lax.optimization_barrier((_output_part(params, config), hidden_BTD))
    return fetch(part_VD, ("vocab", "embed")), hidden_BTD


def logits(table_VD: jax.Array, hidden_BTD: jax.Array) -> jax.Array:
    """logits_BTV, float32, of the hidden states that `forward` gives; for any T, so that callers can go in chunks."""
    logits_BTV = jnp.einsum("BTD,VD->BTV", hidden_BTD, table_VD, preferred_element_type=jnp.float32)
    return constrain(logits_BTV, ("batch", None, "vocab"))


class Block(nn.Module):
    """One layer: norm, attend, add, norm, feed, add."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        angle_BTh: jax.Array,
        segment_BT: jax.Array,
        cache: Cache | Reading | Growing | None,  # of all layers, read only
        layer: jax.Array,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
        """x_BTD, and with a cache this block's (k_BKTH, v_BKTH): written once for all layers, after the scan."""
        c = self.config
        D, N, K, H, F = c.embed_size, c.heads, c.kv_heads, c.head_size, c.ffn_size

        def weight(name: str, axes: str, *declaration) -> jax.Array:
            # Cast first: half the bytes travel.
            return fetch(_weight(self, name, axes, *declaration).astype(c.compute_dtype), axes.split())

        attention_norm_D = weight("attention_norm", "norm", (D,), ONES)
        wq_NHD = weight("wq", "heads head embed", (N, H, D), _normal(D))
        wk_KHD = weight("wk", "kv head embed", (K, H, D), _normal(D))
        wv_KHD = weight("wv", "kv head embed", (K, H, D), _normal(D))
        wo_DNH = weight("wo", "embed heads head", (D, N, H), _normal(2 * c.layers * N * H))
        ffn_norm_D = weight("ffn_norm", "norm", (D,), ONES)
        gate_FD = weight("gate", "ffn embed", (F, D), _normal(D))
        up_FD = weight("up", "ffn embed", (F, D), _normal(D))
        down_DF = weight("down", "embed ffn", (D, F), _normal(2 * c.layers * F))

        y_BTD = rms_norm(x_BTD, attention_norm_D, c.norm_eps)
        q_BNTH = jnp.einsum("BTD,NHD->BNTH", y_BTD, wq_NHD)
        k_BKTH = jnp.einsum("BTD,KHD->BKTH", y_BTD, wk_KHD)
        v_BKTH = jnp.einsum("BTD,KHD->BKTH", y_BTD, wv_KHD)
        if c.family == "qwen2":
            q_BNTH += weight("bq", "heads head", (N, H), ZEROS)[:, None]
            k_BKTH += weight("bk", "kv head", (K, H), ZEROS)[:, None]
            v_BKTH += weight("bv", "kv head", (K, H), ZEROS)[:, None]
        else:
            q_BNTH = rms_norm(q_BNTH, weight("q_norm", "norm", (H,), ONES), c.norm_eps)
            k_BKTH = rms_norm(k_BKTH, weight("k_norm", "norm", (H,), ONES), c.norm_eps)
        q_BNTH = constrain(rotate(q_BNTH, angle_BTh), ("batch", "heads", None, None))
        k_BKTH = constrain(rotate(k_BKTH, angle_BTh), ("batch", "kv", None, None))
        v_BKTH = constrain(v_BKTH, ("batch", "kv", None, None))
        q_BNTH, k_BKTH, v_BKTH = (checkpoint_name(x, PROJECTIONS) for x in (q_BNTH, k_BKTH, v_BKTH))
        if cache is not None:
            k_BKTH, v_BKTH = _told_by_the_key(k_BKTH, v_BKTH)
            mixed_BNTH = attend(q_BNTH, k_BKTH, v_BKTH, segment_BT, cache.read(layer))
        elif c.attention == "splash":
            mixed_BNTH = splash.attend(q_BNTH, k_BKTH, v_BKTH, segment_BT)
        else:
            mixed_BNTH = attend_to_row(q_BNTH, k_BKTH, v_BKTH, segment_BT)
        x_BTD += constrain(jnp.einsum("BNTH,DNH->BTD", mixed_BNTH, wo_DNH), ("batch", None, None))

        y_BTD = rms_norm(x_BTD, ffn_norm_D, c.norm_eps)
        gate_BTF = jax.nn.silu(_widen(y_BTD, gate_FD))
        fed_BTF = constrain(gate_BTF * _widen(y_BTD, up_FD), ("batch", None, "ffn"))
        x_BTD += constrain(jnp.einsum("BTF,DF->BTD", fed_BTF, down_DF), ("batch", None, None))
        return x_BTD, None if cache is None else (k_BKTH, v_BKTH)


class Qwen(nn.Module):
    """Embedding, the stacked layers in one scan, the final norm, the output layer."""

    config: ModelConfig

    def setup(self):
        c = self.config
        self.embed_VD = _weight(self, "embed", "vocab embed", (c.vocab_size, c.embed_size), _normal(c.embed_size))
        # Inside a scan nothing can merge the recomputation with the first pass, so the guard against it is waste.
        block = Block
        if c.remat != "none":
            policy = jax.checkpoint_policies.save_only_these_names(*KEPT[c.remat])
            block = nn.remat(Block, prevent_cse=False, policy=policy)
        self.layers = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(nn.broadcast, nn.broadcast, nn.broadcast, 0),
            length=c.layers,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )(c)
        self.final_norm_D = _weight(self, "final_norm", "norm", (c.embed_size,), ONES)
        if not c.tied:
            self.unembed_VD = _weight(
                self, "unembed", "vocab embed", (c.vocab_size, c.embed_size), _normal(c.embed_size)
            )

    def __call__(
        self,
        ids_BT: jax.Array,
        position_BT: jax.Array,
        segment_BT: jax.Array,
        cache: Cache | Reading | Growing | None,
    ) -> tuple[jax.Array, Cache | Recent | None]:
        c = self.config
        x_BTD = self._look_up(ids_BT)
        angle_BTh = rotary_angles(position_BT, c.head_size, c.rope_theta)
        layer_L = jnp.arange(c.layers)
        x_BTD, new = self.layers(x_BTD, angle_BTh, segment_BT, cache, layer_L)
        if cache is not None:
            cache = cache.append(*new, segment_BT)
        return rms_norm(x_BTD, self.final_norm_D, c.norm_eps), cache

    def _look_up(self, ids_BT: jax.Array) -> jax.Array:
        # Each device reads its own columns of the table for the rows of its whole "fsdp" group, then they swap: left
        # to itself the compiler gathers the table. Cast after that, because a frequent token's gradient is a sum of
        # thousands, which bfloat16 would not hold.
        ids_BT = exchange(ids_BT, ("batch", None), ("lookup_batch", None))
        x_BTD = _rows_of(self.config.vocab_size, self.embed_VD, ids_BT)
        x_BTD = exchange(x_BTD, ("lookup_batch", None, "embed"), ("batch", None, None))
        return x_BTD.astype(self.config.compute_dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rows_of(vocab_size: int, table_VD: jax.Array, ids_BT: jax.Array) -> jax.Array:
    """table_VD[ids_BT]. Its gradient is added up row by row of the batch.

    For all rows at once the TPU compiler sorts the ids first, and that sort takes it a fifth of the time that it needs
    for the whole update of 7B. The sums are as quick without, by its own estimate.
    """
    return table_VD[ids_BT]


def _rows_of_forward(vocab_size: int, table_VD: jax.Array, ids_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    return table_VD[ids_BT], ids_BT


def _rows_of_backward(vocab_size: int, ids_BT: jax.Array, gradient_BTD: jax.Array) -> tuple[jax.Array, None]:
    def add_row(sum_VD: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        ids_T, gradient_TD = row
        return sum_VD.at[ids_T].add(gradient_TD.astype(sum_VD.dtype)), None

    zeros_VD = jnp.zeros((vocab_size, gradient_BTD.shape[-1]), jnp.float32)
    sum_VD, _ = jax.lax.scan(add_row, zeros_VD, (ids_BT, gradient_BTD))
    return sum_VD.astype(gradient_BTD.dtype), None


_rows_of.defvjp(_rows_of_forward, _rows_of_backward)


@jax.custom_vjp
def _widen(y_BTD: jax.Array, weight_FD: jax.Array) -> jax.Array:
    """out_BTF. JAX's own gradient of the weight asks for that of the output lying across, this one for y.

    A CPU copies what lies across, and of the two y is several times narrower.
    """
    return jnp.einsum("BTD,FD->BTF", y_BTD, weight_FD)


def _widen_forward(y_BTD: jax.Array, weight_FD: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _widen(y_BTD, weight_FD), (y_BTD, weight_FD)


def _widen_backward(saved: tuple[jax.Array, jax.Array], by_out_BTF: jax.Array) -> tuple[jax.Array, jax.Array]:
    y_BTD, weight_FD = saved
    by_weight_DF = jnp.einsum("BTD,BTF->DF", y_BTD, by_out_BTF)
    return jnp.einsum("BTF,FD->BTD", by_out_BTF, weight_FD), by_weight_DF.T


_widen.defvjp(_widen_forward, _widen_backward)


def rms_norm(x_BTD: jax.Array, weight_D: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x²) + eps) * weight over the last of any dimensions. Zhang & Sennrich 2019, eq. 4.

    In float32, returned in the type of x.
    """
    wide_BTD = x_BTD.astype(jnp.float32)
    scale_BT1 = jax.lax.rsqrt(jnp.mean(jnp.square(wide_BTD), axis=-1, keepdims=True) + eps)
    # The weight is rounded to the type of x first: so training sees the very weights that the sampler holds.
    return (wide_BTD * scale_BT1 * weight_D.astype(x_BTD.dtype)).astype(x_BTD.dtype)


def _told_by_the_key(k_BKTH: jax.Array, v_BKTH: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys and values in which a value that is not finite is 0, and its key NaN.

    Who looks at such a token gets NaN all the same. But who does not look at it multiplies its value by 0, and 0 times
    NaN is NaN: it would spread to all contexts of a block, and to the next one in the same slot.
    """
    is_sound_BKT1 = jnp.isfinite(v_BKTH).all(axis=-1, keepdims=True)
    return jnp.where(is_sound_BKT1, k_BKTH, jnp.nan), jnp.where(is_sound_BKT1, v_BKTH, 0)


def _weight(module: Block | Qwen, name: str, axes: str, shape: tuple[int, ...], init) -> jax.Array:
    """Declares a weight in param_dtype, one logical axis per dimension; returns the part of it that is here."""
    axes = tuple(axes.split())
    boxed_init = nn.with_logical_partitioning(init, axes)
    return module.param(name, boxed_init, part_of(shape, axes), jnp.dtype(module.config.param_dtype))


def _output_part(params: dict, config: ModelConfig) -> jax.Array:
    return params["embed" if config.tied else "unembed"].astype(config.compute_dtype)


def _normal(inverse_variance: float):
    return nn.initializers.normal(inverse_variance**-0.5)


def _boxed_init(key: jax.Array, config: ModelConfig) -> dict:
    token_B1 = jnp.zeros((1, 1), jnp.int32)
    config = replace(config, attention="xla")  # a kernel takes no single token, and weights do not depend on it
    return Qwen(config).init(key, token_B1, token_B1, token_B1, None)["params"]


def _is_box(x: object) -> bool:
    return isinstance(x, nn.LogicallyPartitioned)
