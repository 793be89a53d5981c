"""Each Pallas kernel against the plain XLA path that computes the same, with the largest difference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memsearcher_jax.device_check.rows import Row
from memsearcher_jax.model import kv_cache
from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.ops.append_to_pages import append_to_pages
from memsearcher_jax.ops.attention import OnlineSoftmax, Visible, normalize, packed_attention
from memsearcher_jax.ops.axes import as_bits
from memsearcher_jax.ops.paged_attention import paged_attention
from memsearcher_jax.ops.quantization import quantize
from memsearcher_jax.ops.splash_attention import splash_attention
from memsearcher_jax.sampling import draw_kernel, logits

# Of the largest absolute value. The matrix units of TPUs multiply float32, too, as bfloat16 unless told otherwise.
TOLERANCES = {"cpu": {"float32": 1e-4, "bfloat16": 2e-2, "int8": 1e-4}}
ACCELERATOR_TOLERANCE = 3e-2
LAYERS, LAYER = 2, 1
WAYS_OUT = {
    "packed": "train with --model.attention xla, and report this table",
    "paged": "sample with --sampling.attention xla, and report this table",
}


@dataclass(frozen=True)
class Kernels:
    """The kernels of a TPU; a test gives wrong ones."""

    packed_attention: Callable[..., Any] = splash_attention
    paged_attention: Callable[..., Any] = paged_attention
    append_to_pages: Callable[..., Any] = append_to_pages
    draw: Callable[..., Any] = draw_kernel.draw


@dataclass(frozen=True)
class Sizes:
    """The shapes of a comparison."""

    heads: int
    kv_heads: int
    head_size: int
    vocab_size: int
    row_tokens: int = 2_048
    contexts: int = 16
    context_pages: int = 8
    page_tokens: int = 128

    @classmethod
    def of(cls, model: ModelConfig, *, small: bool) -> Sizes:
        """Those of a model; `small`: few tokens, for a simulated device."""
        if not small:
            return cls(model.heads, model.kv_heads, model.head_size, model.vocab_size)
        heads = model.heads // model.kv_heads
        return cls(heads, 1, 128, min(model.vocab_size, 512), 256, 4, 3, 16)


def kernel_rows(sizes: Sizes, platform: str, kernels: Kernels = Kernels()) -> Iterator[Row]:
    """One row for each kernel and data type."""
    rng = np.random.default_rng(0)
    for dtype in ("float32", "bfloat16"):
        yield from _packed_rows(sizes, dtype, platform, kernels, rng)
    for dtype in ("float32", "bfloat16", "int8"):
        yield _paged_row(sizes, dtype, platform, kernels, rng)
        yield _append_row(sizes, dtype, kernels, rng)
    yield _draw_row(sizes, platform, kernels, rng)


def _tolerance(platform: str, dtype: str) -> float:
    return TOLERANCES.get(platform, {}).get(dtype, ACCELERATOR_TOLERANCE)


def _difference(found: Any, expected: Any) -> float:
    """The largest difference as a share of the largest value; infinite where either array is not finite."""
    found_X = np.asarray(found, np.float32)
    expected_X = np.asarray(expected, np.float32)
    if not (np.isfinite(found_X).all() and np.isfinite(expected_X).all()):
        return np.inf
    return float(np.abs(found_X - expected_X).max() / max(np.abs(expected_X).max(), 1e-9))


def _row(name: str, difference: float, tolerance: float, kind: str) -> Row:
    passed = difference <= tolerance
    return Row(name, f"{difference:.1e}", f"at most {tolerance:.0e}", passed, WAYS_OUT[kind])


def _failed(name: str, error: Exception, kind: str) -> Row:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return Row(name, f"{type(error).__name__}: {reason}"[:200], "a result", False, WAYS_OUT[kind])


def _packed_rows(sizes: Sizes, dtype: str, platform: str, kernels: Kernels, rng: np.random.Generator) -> Iterator[Row]:
    """Packed attention, forward and backward, over a row with three contexts and padding."""
    T = sizes.row_tokens
    heads = (sizes.heads, sizes.kv_heads, sizes.kv_heads)
    qkv = [jnp.asarray(rng.standard_normal((1, n, T, sizes.head_size)), dtype) for n in heads]
    segment_BT = np.sort(rng.integers(1, 4, (1, T))).astype(np.int32)
    segment_BT[:, -T // 8 :] = 0
    position_BT = np.zeros_like(segment_BT)
    for segment in (1, 2, 3):
        own = np.flatnonzero(segment_BT[0] == segment)
        position_BT[0, own] = np.arange(len(own))
    visible = jax.jit(Visible.of)(position_BT, segment_BT)
    weight_BNTH = jnp.asarray(rng.standard_normal(qkv[0].shape), jnp.float32) * (segment_BT > 0)[:, None, :, None]

    def weighted(attention: Callable[..., Any]) -> Callable[..., Any]:
        def loss(q_BNTH: Any, k_BKTH: Any, v_BKTH: Any) -> tuple[Any, Any]:
            out_BNTH = jnp.where(weight_BNTH != 0, attention(q_BNTH, k_BKTH, v_BKTH, visible), 0)
            return jnp.sum(out_BNTH.astype(jnp.float32) * weight_BNTH), out_BNTH

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))

    names = (f"packed attention, forward, {dtype}", f"packed attention, backward, {dtype}")
    try:
        gradient, out = weighted(kernels.packed_attention)(*qkv)
        expected_gradient, expected_out = weighted(packed_attention)(*qkv)
    except Exception as error:  # of the compiler, of any kind
        yield _failed(names[0], error, "packed")
        return
    tolerance = _tolerance(platform, dtype)
    yield _row(names[0], _difference(out, expected_out), tolerance, "packed")
    largest = max(_difference(found, plain) for found, plain in zip(gradient, expected_gradient, strict=True))
    yield _row(names[1], largest, tolerance, "packed")


def _pools(sizes: Sizes, dtype: str, rng: np.random.Generator) -> tuple[Any, ...]:
    """A cache with random entries: keys, values and, in int8, their scales."""
    pages = sizes.contexts * sizes.context_pages
    shape = (LAYERS, pages, sizes.kv_heads)
    keys = jnp.asarray(rng.standard_normal((*shape, sizes.head_size, sizes.page_tokens)), jnp.float32)
    values = jnp.asarray(rng.standard_normal((*shape, sizes.page_tokens, sizes.head_size)), jnp.float32)
    return _stored(keys, values, 3, dtype)


def _stored(keys: Any, values: Any, key_axis: int, dtype: str) -> tuple[Any, ...]:
    """Keys and values of a cache of this type, as kernels read them; `key_axis`: the heads' dimension of the keys."""
    if dtype != "int8":
        return keys.astype(dtype), values.astype(dtype)
    key, key_scale = quantize(keys, [key_axis])
    value, value_scale = quantize(values, [4])
    return key, value, jnp.stack([key_scale, value_scale], axis=key_axis)


def _page_table(sizes: Sizes, rng: np.random.Generator) -> np.ndarray:
    pages = sizes.contexts * sizes.context_pages
    return rng.permutation(pages).reshape(sizes.contexts, sizes.context_pages).astype(np.int32)


def _paged_row(sizes: Sizes, dtype: str, platform: str, kernels: Kernels, rng: np.random.Generator) -> Row:
    """One token of each context against the pages of its cache."""
    name = f"paged attention, {dtype}"
    queries = sizes.heads // sizes.kv_heads
    q_dtype = "bfloat16" if dtype == "int8" and platform != "cpu" else ("float32" if dtype == "int8" else dtype)
    q_AKQ1H = jnp.asarray(rng.standard_normal((sizes.contexts, sizes.kv_heads, queries, 1, sizes.head_size)), q_dtype)
    pools = _pools(sizes, dtype, rng)
    table_AI = _page_table(sizes, rng)
    most = sizes.context_pages * sizes.page_tokens
    length_A = np.sort(rng.integers(1, most + 1, sizes.contexts))[::-1].astype(np.int32)

    def plain(q: Any, pools: Any, table: Any, length: Any) -> OnlineSoftmax:
        # A TPU stores numbers as they are, and other platforms their bits.
        stored = tuple(map(as_bits, pools)) if dtype != "int8" else pools
        return kv_cache.paged_attention(q, stored, jnp.int32(LAYER), table, length, jnp.int32(0))

    try:
        found = jax.jit(kernels.paged_attention)(q_AKQ1H, pools, jnp.int32(LAYER), table_AI, length_A)
        expected = jax.jit(plain)(q_AKQ1H, pools, table_AI, length_A)
    except Exception as error:  # of the compiler, of any kind
        return _failed(name, error, "paged")
    return _row(name, _difference(normalize(found), normalize(expected)), _tolerance(platform, dtype), "paged")


def _append_row(sizes: Sizes, dtype: str, kernels: Kernels, rng: np.random.Generator) -> Row:
    """New tokens are written to the pages exactly, and nothing else changes."""
    name = f"append to pages, {dtype}"
    W = 4
    shape = (LAYERS, sizes.contexts, sizes.kv_heads, W, sizes.head_size)
    keys, values = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for _ in range(2))
    new = _stored(keys, values, 4, dtype)
    pools = _pools(sizes, dtype, rng)
    table_AI = _page_table(sizes, rng)
    start_A = rng.integers(0, (sizes.context_pages - 1) * sizes.page_tokens, sizes.contexts).astype(np.int32)
    added_A = rng.integers(0, W + 1, sizes.contexts).astype(np.int32)
    try:
        found = jax.jit(kernels.append_to_pages)(pools, new, table_AI, start_A, added_A)
        expected = jax.jit(kv_cache.append_to_pages)(pools, new, table_AI, start_A, added_A)
    except Exception as error:  # of the compiler, of any kind
        return _failed(name, error, "paged")
    wrong = 0
    for pool, expected_pool in zip(found, expected, strict=True):
        wrong += int(np.sum(np.asarray(pool) != np.asarray(expected_pool)))
    return Row(name, f"{wrong} wrong entries", "0 wrong entries", wrong == 0, WAYS_OUT["paged"])


def _draw_row(sizes: Sizes, platform: str, kernels: Kernels, rng: np.random.Generator) -> Row:
    """Tokens drawn from the same logits with the same random numbers, greedily and with all rules."""
    name = "draw"
    S = 16 * sizes.contexts  # so many that a rule which is not kept changes some of them
    V = sizes.vocab_size
    logits_SV = jnp.asarray(rng.normal(0, 3, (S, V)), jnp.float32)
    uniform_S = jnp.asarray(rng.random(S), jnp.float32)
    temperature_S = jnp.where(jnp.arange(S) % 4 == 0, 0.0, 1.0)
    top_k_S = jnp.where(jnp.arange(S) % 2 == 0, 0, 50).astype(jnp.int32)
    top_p_S = jnp.where(jnp.arange(S) % 3 == 0, 1.0, 0.9)
    rules = (uniform_S, temperature_S, top_k_S, top_p_S)
    try:
        token_S, logprob_S = jax.jit(kernels.draw)(logits_SV[None], *rules)
        expected_S, expected_logprob_S = jax.jit(logits.draw)(logits_SV, *rules)
    except Exception as error:  # of the compiler, of any kind
        return _failed(name, error, "paged")
    same_S = np.asarray(token_S) == np.asarray(expected_S)
    difference = np.abs(np.asarray(logprob_S) - np.asarray(expected_logprob_S))[same_S].max(initial=0.0)
    # A sum in another order may move the border between two tokens, for one row in thousands.
    passed = bool(same_S.mean() >= 0.95 and difference < 1e-3)
    found = f"{same_S.mean():.0%} equal, log-probabilities within {difference:.0e}"
    return Row(name, found, "at least 95 %, within 1e-03", passed, WAYS_OUT["paged"])
