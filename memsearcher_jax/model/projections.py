"""Products of activations and projections: with LoRA adapters, as a sampler stores them, and their gradient.

Subscripts are those of einsum; weights have their output axes first.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array

from memsearcher_jax.ops.axes import platform

FEW_TOKENS = 32
"""Tokens up to which `product` has the weight first on a CPU."""


class Int8Weight(NamedTuple):
    """A projection in int8, times one factor for each output."""

    values: Array  # int8
    scale: Array  # float32 [*output axes]


class AdaptedWeight(NamedTuple):
    """A projection, and the LoRA adapters that were added to it."""

    weight: Array
    a: Array | None = None  # [rank, *input axes]
    b: Array | None = None  # [*output axes, rank]
    scale: float = 1.0


class _Axes(NamedTuple):
    """The subscripts of an einsum of activations and a weight."""

    x: str
    weight: str
    out: str

    @classmethod
    def of(cls, subscripts: str) -> _Axes:
        return cls(*re.split(",|->", subscripts))


def adapter_axes(axes: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The logical axes of adapters A and B of a projection, whose output axes come first."""
    # The output is heads and head size, or features; or "embed" alone, into the residual stream.
    split = 1 if axes[0] == "embed" else len(axes) - 1
    return ("rank", *axes[split:]), (*axes[:split], "rank")


def project(subscripts: str, x: Array, weight: Array | AdaptedWeight | Int8Weight) -> Array:
    """`einsum` of activations and a weight, in the type of `x`.

    The gradient of the weight reads the smaller of its two operands transposed: a CPU copies what it reads transposed.
    JAX's own gradient of an up projection would read the larger. With adapters this gradient, which is as large as the
    weight, is never computed: A and B get theirs from products of their rank.
    """
    if isinstance(weight, Int8Weight):
        # An accelerator converts the values while it multiplies: they are never written in the type of x.
        out = project(subscripts, x, weight.values.astype(x.dtype))
        axes = _Axes.of(subscripts)
        scale_axes = "".join(axis for axis in axes.weight if axis not in axes.x)
        return jnp.einsum(f"{axes.out},{scale_axes}->{axes.out}", out, weight.scale).astype(x.dtype)
    adapted = weight if isinstance(weight, AdaptedWeight) else AdaptedWeight(weight)
    return cast("Array", _project(subscripts, adapted.scale, x, adapted.weight, adapted.a, adapted.b))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _project(subscripts: str, scale: float, x: Array, weight: Array, a: Array | None, b: Array | None) -> Array:
    return product(subscripts, x, weight, einsum)


def _project_forward(
    subscripts: str, scale: float, x: Array, weight: Array, *adapters: Array | None
) -> tuple[Array, tuple[Array | None, ...]]:
    return einsum(subscripts, x, weight), (x, weight, *adapters)


def _project_backward(subscripts: str, scale: float, saved: tuple[Any, ...], dout: Array) -> tuple[Array | None, ...]:
    """With y = x (W + scale B A)^T: dA = scale (dy B)^T x and dB = scale dy^T (x A^T)."""
    x, weight, a, b = saved
    axes = _Axes.of(subscripts)
    dx = einsum(f"{axes.out},{axes.weight}->{axes.x}", dout, weight)
    if a is None:
        return dx, _weight_gradient(axes, x, dout), None, None
    a_axes = "r" + "".join(axis for axis in axes.weight if axis in axes.x)
    b_axes = "".join(axis for axis in axes.weight if axis in axes.out) + "r"

    def product(subscripts: str, x: Array, y: Array) -> Array:
        operands = x.astype(dout.dtype), y.astype(dout.dtype)
        return jnp.einsum(subscripts, *operands, preferred_element_type=jnp.float32)

    dout_b_BTr = product(f"{axes.out},{b_axes}->BTr", dout, b)
    da = product(f"BTr,{axes.x}->{a_axes}", dout_b_BTr, x)
    x_a_BTr = product(f"{axes.x},{a_axes}->BTr", x, a)
    db = product(f"{axes.out},BTr->{b_axes}", dout, x_a_BTr)
    return dx, None, scale * da, scale * db


def _weight_gradient(axes: _Axes, x: Array, dout: Array) -> Array:
    """The product of `dout` and `x`, with the smaller one first: see `project`."""
    if dout.size <= x.size:
        smaller = dout
        smaller_axes = axes.out
        larger = x
        larger_axes = axes.x
    else:
        smaller = x
        smaller_axes = axes.x
        larger = dout
        larger_axes = axes.out
    # In another order of the result jnp.einsum would exchange the operands.
    order = "".join(axis for axis in smaller_axes + larger_axes if axis in axes.weight)
    dweight = einsum(f"{smaller_axes},{larger_axes}->{order}", smaller, larger)
    return jnp.einsum(f"{order}->{axes.weight}", dweight)


_project.defvjp(_project_forward, _project_backward)


def product(subscripts: str, x: Array, weight: Array, einsum: Callable[[str, Array, Array], Array]) -> Array:
    """`einsum` of activations and a weight.

    Of few tokens in bfloat16 a CPU computes it faster with the weight as the first operand. In float32, too, but the
    sum is rounded otherwise, and a sampler would draw other tokens.
    """
    axes = _Axes.of(subscripts)
    token_axes = "".join(axis for axis in axes.x if axis not in axes.weight)
    tokens = math.prod(length for axis, length in zip(axes.x, x.shape, strict=True) if axis in token_axes)
    weight_is_first = platform() == "cpu" and weight.dtype == jnp.bfloat16 and tokens <= FEW_TOKENS
    if not weight_is_first:
        return einsum(subscripts, x, weight)
    order = "".join(axis for axis in axes.weight if axis not in axes.x) + token_axes
    transposed = einsum(f"{axes.weight},{axes.x}->{order}", weight, x)
    return jnp.einsum(f"{order}->{axes.out}", transposed)


def einsum(subscripts: str, x: Array, y: Array) -> Array:
    """`jnp.einsum`, in the type of `x`, accumulated in float32.

    On a CPU the product is rounded after it was written in float32: XLA's CPU kernels for bfloat16 (AMX, AVX512-BF16)
    are used for products in float32 only. Elsewhere that would exchange twice the bytes between devices.
    """

    def rounded(x: Array, y: Array) -> Array:
        wide = jnp.promote_types(x.dtype, jnp.float32)
        return jnp.einsum(subscripts, x, y, preferred_element_type=wide).astype(x.dtype)

    return jax.lax.platform_dependent(x, y, cpu=rounded, default=functools.partial(jnp.einsum, subscripts))
