"""Text encoders of the BERT family: token ids to one unit vector per text. Flax stays inside this file.

Devlin et al., "BERT" (2019): post-norm blocks with absolute positions, here without dropout or the pooler. A text's
vector is the mean of its tokens (E5: Wang et al., "Text Embeddings by Weakly-Supervised Contrastive Pre-training",
2022, section 3; MiniLM sentence encoders) or the first of them, brought to norm 1.
Weights keep the orientation of the Hugging Face files (output before input), so that loading only reshapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import linen as nn

from memsearcher_jax.model.encoder_config import EncoderConfig

NORMAL = nn.initializers.normal(0.02)
ZEROS, ONES = nn.initializers.zeros, nn.initializers.ones
ACTIVATIONS = {"gelu": partial(jax.nn.gelu, approximate=False), "gelu_tanh": jax.nn.gelu, "relu": jax.nn.relu}


def init(key: jax.Array, config: EncoderConfig) -> dict:
    """Random float32 weights; the leaves under "layers" are stacked, [L, ...]."""
    return Bert(config).init(key, jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32))["params"]


def declared(config: EncoderConfig) -> dict:
    """The tree of `init` with a `jax.ShapeDtypeStruct` in place of each array; takes no memory."""
    return jax.eval_shape(lambda: init(jax.random.key(0), config))


def hidden_states(params: dict, config: EncoderConfig, ids_BT: jax.Array, length_B: jax.Array) -> jax.Array:
    """hidden_BTD in compute_dtype. Row b's tokens are its first `length_B[b]`, at least 1; the rest is padding.

    What comes out at padding means nothing. T may be at most `config.positions - config.first_position`.
    """
    return Bert(config).apply({"params": params}, ids_BT, length_B)


def encode(params: dict, config: EncoderConfig, ids_BT: jax.Array, length_B: jax.Array) -> jax.Array:
    """vector_BD, float32, of norm 1: the pooled hidden states of each row, as `hidden_states` takes them."""
    hidden_BTD = hidden_states(params, config, ids_BT, length_B).astype(jnp.float32)
    if config.pooling == "cls":
        pooled_BD = hidden_BTD[:, 0]
    else:
        real_BT = jnp.arange(ids_BT.shape[1]) < length_B[:, None]
        pooled_BD = jnp.sum(hidden_BTD * real_BT[..., None], axis=1) / length_B[:, None]
    return pooled_BD / jnp.linalg.norm(pooled_BD, axis=-1, keepdims=True)


@dataclass(frozen=True)
class _Weights:
    """Declares a module's weights: float32 on disk and in params, compute_dtype in use."""

    module: nn.Module
    dtype: str

    def __call__(self, name: str, shape: tuple[int, ...], init=NORMAL) -> jax.Array:
        return self.module.param(name, init, shape, jnp.float32).astype(self.dtype)


class Block(nn.Module):
    """One layer: attend, add, norm, feed, add, norm."""

    config: EncoderConfig

    @nn.compact
    def __call__(self, x_BTD: jax.Array, real_BT: jax.Array) -> tuple[jax.Array, None]:
        c = self.config
        D, N, H, F = c.embed_size, c.heads, c.head_size, c.ffn_size
        weight = _Weights(self, c.compute_dtype)
        wq_NHD, bq_NH = weight("wq", (N, H, D)), weight("bq", (N, H), ZEROS)
        wk_NHD, bk_NH = weight("wk", (N, H, D)), weight("bk", (N, H), ZEROS)
        wv_NHD, bv_NH = weight("wv", (N, H, D)), weight("bv", (N, H), ZEROS)
        wo_DNH, bo_D = weight("wo", (D, N, H)), weight("bo", (D,), ZEROS)
        attention_scale_D, attention_shift_D = _norm(weight, "attention", D)
        up_FD, up_bias_F = weight("up", (F, D)), weight("up_bias", (F,), ZEROS)
        down_DF, down_bias_D = weight("down", (D, F)), weight("down_bias", (D,), ZEROS)
        ffn_scale_D, ffn_shift_D = _norm(weight, "ffn", D)

        q_BTNH = jnp.einsum("BTD,NHD->BTNH", x_BTD, wq_NHD) + bq_NH
        k_BTNH = jnp.einsum("BTD,NHD->BTNH", x_BTD, wk_NHD) + bk_NH
        v_BTNH = jnp.einsum("BTD,NHD->BTNH", x_BTD, wv_NHD) + bv_NH
        mixed_BTNH = attend(q_BTNH, k_BTNH, v_BTNH, real_BT)
        x_BTD += jnp.einsum("BTNH,DNH->BTD", mixed_BTNH, wo_DNH) + bo_D
        x_BTD = layer_norm(x_BTD, attention_scale_D, attention_shift_D, c.norm_eps)

        fed_BTF = ACTIVATIONS[c.activation](jnp.einsum("BTD,FD->BTF", x_BTD, up_FD) + up_bias_F)
        x_BTD += jnp.einsum("BTF,DF->BTD", fed_BTF, down_DF) + down_bias_D
        return layer_norm(x_BTD, ffn_scale_D, ffn_shift_D, c.norm_eps), None


class Bert(nn.Module):
    """Word, position and segment embeddings, their norm, the stacked layers in one scan."""

    config: EncoderConfig

    @nn.compact
    def __call__(self, ids_BT: jax.Array, length_B: jax.Array) -> jax.Array:
        c = self.config
        D, T = c.embed_size, ids_BT.shape[1]
        weight = _Weights(self, c.compute_dtype)
        word_VD = weight("word", (c.vocab_size, D))
        position_PD = weight("position", (c.positions, D))
        type_SD = weight("type", (c.types, D))
        scale_D, shift_D = _norm(weight, "embed", D)

        x_BTD = word_VD[ids_BT] + position_PD[c.first_position : c.first_position + T] + type_SD[0]
        x_BTD = layer_norm(x_BTD, scale_D, shift_D, c.norm_eps)
        layers = nn.scan(
            Block, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=nn.broadcast, length=c.layers
        )
        x_BTD, _ = layers(c, name="layers")(x_BTD, jnp.arange(T) < length_B[:, None])
        return x_BTD


def attend(q_BTNH: jax.Array, k_BTNH: jax.Array, v_BTNH: jax.Array, real_BT: jax.Array) -> jax.Array:
    """mixed_BTNH: each token looks at all real tokens of its row. Scores and the softmax are float32."""
    score_BNTS = jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BTNH, preferred_element_type=jnp.float32)
    score_BNTS *= q_BTNH.shape[-1] ** -0.5
    weight_BNTS = jax.nn.softmax(jnp.where(real_BT[:, None, None], score_BNTS, -jnp.inf), axis=-1)
    return jnp.einsum("BNTS,BSNH->BTNH", weight_BNTS.astype(v_BTNH.dtype), v_BTNH)


def layer_norm(x_BTD: jax.Array, scale_D: jax.Array, shift_D: jax.Array, eps: float) -> jax.Array:
    """(x - mean) / sqrt(variance + eps) * scale + shift, in float32, in the type of x. Ba et al. 2016, eq. 4."""
    wide_BTD = x_BTD.astype(jnp.float32)
    centred_BTD = wide_BTD - jnp.mean(wide_BTD, axis=-1, keepdims=True)
    inverse_BT1 = jax.lax.rsqrt(jnp.mean(jnp.square(centred_BTD), axis=-1, keepdims=True) + eps)
    return (centred_BTD * inverse_BT1).astype(x_BTD.dtype) * scale_D + shift_D


def _norm(weight: _Weights, name: str, size: int) -> tuple[jax.Array, jax.Array]:
    return weight(f"{name}_scale", (size,), ONES), weight(f"{name}_shift", (size,), ZEROS)
