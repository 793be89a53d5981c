"""Qwen2.5, dense Qwen3 and Llama as pure functions over a plain dict of arrays; Flax stays inside this file.

Weights keep the orientation of the Hugging Face files (output before input), so that loading and saving only reshape.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.model.kv_cache import Cache, CacheView, DecodeBuffer, DecodeCache
from memsearcher_jax.model.projections import AdaptedWeight, Int8Weight, adapter_axes, product, project
from memsearcher_jax.model.rope import apply_rope, rope_rotation
from memsearcher_jax.ops.attention import ATTENTION_OUTPUT, Visible, einsum_f32, packed_attention
from memsearcher_jax.ops.axes import (
    all_gather_param,
    as_bits,
    constrain,
    from_bits,
    local_shape,
    name_saved,
    reshard,
    row_major,
)
from memsearcher_jax.ops.quantization import quantize
from memsearcher_jax.ops.splash_attention import splash_attention

Params = dict[str, Any]
"""A nested dict of arrays; the leaves under "layers" are stacked, [L, ...], or "layers" is as `publish` says."""

ZEROS = nn.initializers.zeros
ONES = nn.initializers.ones
PACKED_ATTENTION = {"splash": splash_attention}
"""`ModelConfig.attention` -> kernels for attention over packed rows; otherwise plain XLA."""
INPUT, QKV, GATE, UP = "input", "qkv", "gate", "up"
"""Checkpoint names of remat policies: a layer's input; queries, keys and values; outputs of two projections."""
SAVED_NAMES = {
    "nothing_saveable": (INPUT,),
    "save_attention": (INPUT, ATTENTION_OUTPUT),
    "save_qkv_attention": (INPUT, ATTENTION_OUTPUT, QKV),
    "save_qkv_attention_up": (INPUT, ATTENTION_OUTPUT, QKV, UP),
    "save_qkv_attention_gate_up": (INPUT, ATTENTION_OUTPUT, QKV, GATE, UP),
}
"""`ModelConfig.remat` -> what the backward pass saves."""
LAST_LEVEL_CACHE = 16 << 20  # bytes that a CPU's has at least


@functools.partial(jax.jit, static_argnames="config")
def init(key: Array, config: ModelConfig) -> Params:
    """Random weights in `config.param_dtype`; the leaves under "layers" are stacked, [L, ...].

    The variance is 1 / fan_in, and 1 / (2 L fan_in) for projections into the residual stream (GPT-2: Radford et al.,
    2019, section 2.3). For 7B that is Qwen's 0.02, with which a narrow model would never learn to copy.

    Under `jax.jit` with `out_shardings=sharding.param_shardings(config, mesh)` each device creates only its own shard.
    """
    return jax.tree.map(lambda box: box.value, _boxed_init(key, config), is_leaf=_is_box)


@dataclass(frozen=True)
class ParamSpec:
    """Shape, type and logical axes (one per dimension, see axes.py) of one weight."""

    shape: tuple[int, ...]
    dtype: jnp.dtype
    axes: tuple[str, ...]

    def __getitem__(self, layer: int) -> ParamSpec:
        return ParamSpec(self.shape[1:], self.dtype, self.axes[1:])

    def astype(self, dtype: str) -> ParamSpec:
        return replace(self, dtype=jnp.dtype(dtype))


def param_specs(config: ModelConfig) -> Params:
    """The tree of `init` with a `ParamSpec` in place of each array; allocates nothing."""
    specs = _param_specs(replace(config, attention="xla"))  # one entry for all kernels, which change no shape
    return jax.tree.map(lambda spec: spec, specs)  # a copy: the cached tree is mutable


@functools.cache
def _param_specs(config: ModelConfig) -> Params:
    # The key is made inside eval_shape: under a mesh of devices that are only compiled for, nothing can run.
    boxes = jax.eval_shape(lambda: _boxed_init(jax.random.key(0), config))
    return jax.tree.map(lambda box: ParamSpec(box.value.shape, box.value.dtype, box.names), boxes, is_leaf=_is_box)


def param_axes(config: ModelConfig) -> Params:
    """The tree of `init` with the logical axes in place of each array."""
    return jax.tree.map(lambda spec: spec.axes, param_specs(config))


def param_path(path: tuple) -> str:
    """A tree path of JAX as text, such as "layers.wq"."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def forward(
    params: Params,
    config: ModelConfig,
    ids_BT: Array,
    position_BT: Array,
    segment_BT: Array,
    cache: CacheView | DecodeCache | None = None,
    *,
    output: Literal["logits", "hidden"] = "logits",
) -> tuple[Array, Cache | DecodeBuffer | None]:
    """(logits_BTV float32 or hidden_BTD in compute_dtype, the result of `cache.append` for the new tokens).

    Without a cache a row may pack several texts: tokens attend to their own segment only; segment 0 is padding.
    Segments whose positions begin at P > 0, the same P in a row, continue its first P tokens, and attend to them too.
    params["adapters"], if present, are LoRA adapters that `lora.merge` has already added to the other weights: they get
    the gradient, and the weights get none.
    With a cache segment_BT is 0 for padding, which comes last in a chunk; tokens follow the entries that their context
    holds (position_BT must agree), attend to them, and are appended. The output at padding is undefined.
    """
    weights = {name: value for name, value in params.items() if name != "adapters"}
    unstacked = weights.pop("layers") if isinstance(weights["layers"], list) else None
    if unstacked is None and (cache is not None or "adapters" in params):  # integers have no gradient
        weights["layers"] = jax.tree.map(as_bits, weights["layers"])
    variables = {"params": weights, "adapters": {"layers": params.get("adapters", {})}}
    result: Any = Qwen(config).apply(variables, ids_BT, position_BT, segment_BT, cache, unstacked)
    hidden_BTD, new_cache = result
    return (hidden_BTD if output == "hidden" else logits(output_embedding(params, config), hidden_BTD)), new_cache


def publish(params: Params, config: ModelConfig, platform: str, dtype: str) -> Params:
    """The weights, or their `ParamSpec`s, in `dtype`, as `forward` with a cache reads them fastest on this platform.

    "int8": projections become an `Int8Weight`, the other weights have compute_dtype. So has the output layer, whose
    errors no later layer would average: a fourteenth of the weights of 7B, a fourth of those of 0.5B.
    """
    publish_one = functools.partial(publish_weight, config=config, dtype=dtype)
    return unstack_layers(jax.tree.map(publish_one, params, param_specs(config)), config, platform)


def publish_weight(weight: Any, spec: ParamSpec, config: ModelConfig, dtype: str) -> Any:
    """A weight of this `spec`, or the spec itself, as `publish` returns it."""
    is_projection = spec.axes[0] == "layers" and "embed" in spec.axes
    if dtype != "int8" or not is_projection:
        return weight.astype(config.compute_dtype if dtype == "int8" else dtype)
    first_input = len(adapter_axes(spec.axes[1:])[1])
    return Int8Weight(*_quantize(weight, range(first_input, len(spec.axes))))


def unstack_layers(params: Params, config: ModelConfig, platform: str) -> Params:
    """The published weights, with a list of the layers in place of stacked arrays where a platform reads them faster.

    TPUs: stacked. GPUs: a list, because the compiler copies the weights of a layer from stacked arrays before it
    multiplies them, in every decoded step: they are read twice and written once. CPUs, too, unless all layers fit into
    a cache, where a copy costs less than to compile each layer by itself.
    """
    layers = params["layers"]
    layers_bytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(layers))
    is_unstacked = platform == "gpu" or (platform == "cpu" and layers_bytes > LAST_LEVEL_CACHE)
    if not is_unstacked:
        return params
    layer_list = [jax.tree.map(operator.itemgetter(number), layers) for number in range(config.layers)]
    return params | {"layers": layer_list}


def _quantize(weight: Any, inputs: range) -> tuple[Any, Any]:
    if not isinstance(weight, ParamSpec):
        return quantize(weight, inputs)
    shape = weight.shape[: inputs.start]
    axes = weight.axes[: inputs.start]
    return weight.astype("int8"), ParamSpec(shape, jnp.dtype("float32"), axes)


def output_embedding(params: Params, config: ModelConfig) -> Array:
    """table_VD in compute_dtype: the output layer, gathered once for all the chunks that `logits` is called with."""
    return all_gather_param(_local_output_embedding(params, config), ("vocab", "embed"))


def output_embedding_after(params: Params, config: ModelConfig, hidden_BTD: Array) -> tuple[Array, Array]:
    """(`output_embedding`, hidden_BTD) for training: the table is gathered only once the hidden states are computed.

    In the backward pass the hidden states wait until the table's gradient is scattered. So neither the whole table nor
    its whole gradient is in memory while layers are computed.
    """
    local_VD, hidden_BTD = jax.lax.optimization_barrier((_local_output_embedding(params, config), hidden_BTD))
    return all_gather_param(local_VD, ("vocab", "embed")), hidden_BTD


def logits(table_VD: Array, hidden_BTD: Array) -> Array:
    """logits_BTV, float32, of the hidden states of `forward`, for any T: callers can work in chunks."""
    logits_BTV = product("BTD,VD->BTV", hidden_BTD, table_VD, einsum_f32)
    return constrain(logits_BTV, ("batch", None, "vocab"))


class Block(nn.Module):
    """One layer: norm, attention, add, norm, feed-forward, add."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        x_BTD: Array,
        rotation: tuple[Array, Array],  # of `rope_rotation`
        segment_BT: Array,  # read with a cache
        visible: Visible,  # read without a cache
        cache: CacheView | DecodeCache | None,  # of all layers, read only
        layer: Array,
    ) -> tuple[Array, tuple[Array, Array] | None]:
        """x_BTD, and with a cache this layer's (k_BKTH, v_BKTH), which are written for all layers after the scan."""
        c = self.config
        D = c.embed_size
        N = c.heads
        K = c.kv_heads
        H = c.head_size
        F = c.ffn_size

        def weight(name: str, axes: str, shape: tuple[int, ...], init: Callable) -> Any:
            published = self.get_variable("params", name)
            if isinstance(published, Int8Weight):
                return jax.tree.map(from_bits, published)
            stored = from_bits(_param(self, name, axes, shape, init))
            # The cast comes first: half the bytes are gathered.
            value = all_gather_param(stored.astype(c.compute_dtype), axes.split())
            if not self.has_variable("adapters", name):
                return value
            pair = self.get_variable("adapters", name)
            scale = c.lora_alpha / c.lora_rank
            a_axes, b_axes = adapter_axes(tuple(axes.split()))
            return AdaptedWeight(value, all_gather_param(pair["a"], a_axes), all_gather_param(pair["b"], b_axes), scale)

        attention_norm_D = weight("attention_norm", "norm", (D,), ONES)
        wq_NHD = weight("wq", "heads head embed", (N, H, D), _normal(D))
        wk_KHD = weight("wk", "kv head embed", (K, H, D), _normal(D))
        wv_KHD = weight("wv", "kv head embed", (K, H, D), _normal(D))
        wo_DX = weight("wo", "embed heads", (D, N * H), _normal(2 * c.layers * N * H))
        ffn_norm_D = weight("ffn_norm", "norm", (D,), ONES)
        gate_FD = weight("gate", "ffn embed", (F, D), _normal(D))
        up_FD = weight("up", "ffn embed", (F, D), _normal(D))
        down_DF = weight("down", "embed ffn", (D, F), _normal(2 * c.layers * F))

        x_BTD = name_saved(x_BTD, INPUT)
        y_BTD = rms_norm(x_BTD, attention_norm_D, c.norm_eps)
        q_BNTH = project("BTD,NHD->BNTH", y_BTD, wq_NHD)
        k_BKTH = project("BTD,KHD->BKTH", y_BTD, wk_KHD)
        v_BKTH = project("BTD,KHD->BKTH", y_BTD, wv_KHD)
        if c.family == "qwen2":
            q_BNTH += weight("bq", "heads head", (N, H), ZEROS)[:, None]
            k_BKTH += weight("bk", "kv head", (K, H), ZEROS)[:, None]
            v_BKTH += weight("bv", "kv head", (K, H), ZEROS)[:, None]
        elif c.family == "qwen3":
            q_BNTH = rms_norm(q_BNTH, weight("q_norm", "norm", (H,), ONES), c.norm_eps)
            k_BKTH = rms_norm(k_BKTH, weight("k_norm", "norm", (H,), ONES), c.norm_eps)
        if cache is None:
            q_BNTH = apply_rope(q_BNTH, rotation)
            k_BKTH = apply_rope(k_BKTH, rotation)
        q_BNTH = constrain(q_BNTH, ("batch", "heads", None, None))
        k_BKTH = constrain(k_BKTH, ("batch", "kv", None, None))
        v_BKTH = constrain(v_BKTH, ("batch", "kv", None, None))
        q_BNTH = name_saved(q_BNTH, QKV)
        k_BKTH = name_saved(k_BKTH, QKV)
        v_BKTH = name_saved(v_BKTH, QKV)
        if cache is not None:
            out_BNTH, k_BKTH, v_BKTH = cache.attend(layer, rotation, q_BNTH, k_BKTH, v_BKTH, segment_BT)
        else:
            out_BNTH = PACKED_ATTENTION.get(c.attention, packed_attention)(q_BNTH, k_BKTH, v_BKTH, visible)
        # As a product over one dimension: the TPU compiler would store a wo_DNH in a second layout.
        out_BTX = constrain(jnp.swapaxes(out_BNTH, 1, 2).reshape(*x_BTD.shape[:2], N * H), ("batch", None, "heads"))
        x_BTD += constrain(project("BTX,DX->BTD", out_BTX, wo_DX), ("batch", "tokens", None))

        y_BTD = rms_norm(x_BTD, ffn_norm_D, c.norm_eps)
        gate_BTF = jax.nn.silu(name_saved(project("BTD,FD->BTF", y_BTD, gate_FD), GATE))
        up_BTF = name_saved(project("BTD,FD->BTF", y_BTD, up_FD), UP)
        ffn_BTF = constrain(gate_BTF * up_BTF, ("batch", None, "ffn"))
        if cache is None and GATE in SAVED_NAMES.get(c.remat, ()):
            # For the gradient of `down` the TPU compiler would choose another layout, and copy both saved arrays to it.
            ffn_BTF = row_major(ffn_BTF)
        x_BTD += constrain(project("BTF,DF->BTD", ffn_BTF, down_DF), ("batch", "tokens", None))
        return x_BTD, None if cache is None else (k_BKTH, v_BKTH)


class Qwen(nn.Module):
    """Embedding, the stacked layers in one scan, the final norm; the output layer is declared here too."""

    config: ModelConfig

    def setup(self):
        c = self.config
        table_shape = (c.vocab_size, c.embed_size)
        self.embed_VD = _param(self, "embed", "vocab embed", table_shape, _normal(c.embed_size))
        block = Block
        if c.remat != "none":
            # prevent_cse is not needed inside a scan.
            policy = jax.checkpoint_policies.save_only_these_names(*SAVED_NAMES[c.remat])
            block = nn.remat(Block, prevent_cse=False, policy=policy)
        self.layers = nn.scan(
            block,
            variable_axes={"params": 0, "adapters": 0},
            split_rngs={"params": True},
            in_axes=(nn.broadcast, nn.broadcast, nn.broadcast, nn.broadcast, 0),  # pyright: ignore[reportArgumentType]  # annotated int
            length=c.layers,
            metadata_params={nn.PARTITION_NAME: "layers"},
            # The check traces the layer a second time; the initial weights of a seed depend on that.
            check_constancy_invariants=self.is_initializing(),
        )(c)
        self.final_norm_D = _param(self, "final_norm", "norm", (c.embed_size,), ONES)
        if not c.tie_embeddings:
            self.unembed_VD = _param(self, "unembed", "vocab embed", table_shape, _normal(c.embed_size))

    def __call__(
        self,
        ids_BT: Array,
        position_BT: Array,
        segment_BT: Array,
        cache: CacheView | DecodeCache | None,
        unstacked: list[Params] | None = None,
    ) -> tuple[Array, Cache | DecodeBuffer | None]:
        """(hidden_BTD after the final norm, the result of `cache.append`). `unstacked`: layers in place of our own."""
        c = self.config
        x_BTD = self._embed(ids_BT)
        # Without the barrier the TPU compiler computes it again in each layer.
        rotation = jax.lax.optimization_barrier(rope_rotation(position_BT, c.head_size, c.rope_theta, c.rope_scaling))
        inputs = rotation, segment_BT, Visible.of(position_BT, segment_BT), cache
        if unstacked is None:
            x_BTD, new_kv = self.layers(x_BTD, *inputs, jnp.arange(c.layers))
        else:
            block = Block(c, parent=None)
            keys = []
            values = []
            for number, weights in enumerate(unstacked):
                x_BTD, new_kv = cast("tuple", block.apply({"params": weights}, x_BTD, *inputs, jnp.int32(number)))
                if new_kv is not None:
                    keys.append(new_kv[0])
                    values.append(new_kv[1])
            new_kv = (jnp.stack(keys), jnp.stack(values)) if keys else None
        new_cache = None
        if cache is not None and new_kv is not None:
            k_LBKTH, v_LBKTH = new_kv
            new_cache = cache.append(k_LBKTH, v_LBKTH, segment_BT)
        return rms_norm(x_BTD, self.final_norm_D, c.norm_eps), new_cache

    def _embed(self, ids_BT: Array) -> Array:
        # Each device reads its columns of the table for the rows of its whole "fsdp" group, then they are exchanged:
        # by itself the compiler gathers the table. The cast comes last, because the gradient of a frequent token is a
        # sum of thousands, which bfloat16 would round.
        ids_BT = reshard(ids_BT, ("batch", None), ("lookup_batch", None))
        x_BTD = cast("Array", _take_embeddings(self.config.vocab_size, self.embed_VD, ids_BT))
        x_BTD = reshard(x_BTD, ("lookup_batch", None, "embed"), ("batch", None, None))
        return x_BTD.astype(self.config.compute_dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _take_embeddings(vocab_size: int, table_VD: Array, ids_BT: Array) -> Array:
    """table_VD[ids_BT], whose gradient is accumulated row by row of the batch.

    For all rows at once the TPU compiler sorts the ids first, and compiling that sort takes a fifth of the compile time
    of the whole 7B update. By the compiler's estimate the sums are as fast without it.
    """
    return from_bits(as_bits(table_VD)[ids_BT])


def _take_embeddings_forward(vocab_size: int, table_VD: Array, ids_BT: Array) -> tuple[Array, Array]:
    return _take_embeddings(vocab_size, table_VD, ids_BT), ids_BT


def _take_embeddings_backward(vocab_size: int, ids_BT: Array, dx_BTD: Array) -> tuple[Array, None]:
    def add_row(sum_VD: Array, row: tuple[Array, Array]) -> tuple[Array, None]:
        ids_T, dx_TD = row
        return sum_VD.at[ids_T].add(dx_TD.astype(sum_VD.dtype)), None

    zeros_VD = jnp.zeros((vocab_size, dx_BTD.shape[-1]), jnp.float32)
    sum_VD, _ = jax.lax.scan(add_row, zeros_VD, (ids_BT, dx_BTD))
    return sum_VD.astype(dx_BTD.dtype), None


_take_embeddings.defvjp(_take_embeddings_forward, _take_embeddings_backward)


def rms_norm(x_BTD: Array, weight_D: Array, eps: float) -> Array:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension of any array. Zhang & Sennrich 2019, eq. 4.

    Computed in float32, returned in the type of x.
    """
    wide_BTD = x_BTD.astype(jnp.float32)
    scale_BT1 = jax.lax.rsqrt(jnp.mean(jnp.square(wide_BTD), axis=-1, keepdims=True) + eps)
    # The weight is rounded to the type of x, so that training uses the same weights as the sampler.
    return (wide_BTD * scale_BT1 * weight_D.astype(x_BTD.dtype)).astype(x_BTD.dtype)


def _param(module: Block | Qwen, name: str, axes: str, shape: tuple[int, ...], init: Callable) -> Array:
    """Declares a weight in param_dtype, with one logical axis per dimension; returns this device group's shard."""
    names = tuple(axes.split())
    boxed_init = nn.with_logical_partitioning(init, names)
    weight = module.param(name, boxed_init, local_shape(shape, names), jnp.dtype(module.config.param_dtype))
    return cast("Array", weight)  # `param` removes the box


def _local_output_embedding(params: Params, config: ModelConfig) -> Array:
    return params["embed" if config.tie_embeddings else "unembed"].astype(config.compute_dtype)


def _normal(inverse_variance: float) -> Callable:
    return nn.initializers.normal(inverse_variance**-0.5)


def _boxed_init(key: Array, config: ModelConfig) -> Params:
    token_11 = jnp.zeros((1, 1), jnp.int32)
    # The kernel does not accept a single token, and shapes do not depend on it.
    config = replace(config, attention="xla")
    return dict(Qwen(config).init(key, token_11, token_11, token_11, None)["params"])


def _is_box(x: object) -> bool:
    return isinstance(x, nn.LogicallyPartitioned)
