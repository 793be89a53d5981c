"""`logits.draw` as a Pallas kernel for TPUs: rows stay in VMEM during all passes, of which bisection makes 64."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from memsearcher_jax.ops.vmem import vmem_bytes

ROWS, LANES = 8, 128
"""One register: that many rows and columns of float32."""

COLUMNS = 16
"""Registers that one loop iteration reads, so that their operations overlap."""

ORDERED_MINUS_INF, ORDERED_INF = -0x7F800001, 0x7F800000
"""The bits of the infinities, as `largest_threshold` orders them."""


def draw(
    logits_XSV: Array, uniform_S: Array, temperature_S: Array, top_k_S: Array, top_p_S: Array
) -> tuple[Array, Array]:
    """(token_S, logprob_S), as `logits.sample` describes."""
    X, S, V = logits_XSV.shape
    # Padding is never drawn: its weight is 0. Rows of padding draw something.
    rows = -S % ROWS
    lanes = -V % LANES
    logits_XSV = jnp.pad(logits_XSV, ((0, 0), (0, rows), (0, lanes)), constant_values=-jnp.inf)
    # One array for what each row has one of, and one for the results: a float32 holds a token number exactly.
    rules_S4 = jnp.pad(
        jnp.stack([uniform_S, temperature_S, top_k_S.astype(jnp.float32), top_p_S], 1), ((0, rows), (0, 0))
    )
    block = (X, ROWS, V + lanes)
    block_bytes = 4 * math.prod(block)
    # Two of them are scratch memory, and with a second buffer the next rows are copied during the passes.
    logits_buffers = 2 if 4 * block_bytes < vmem_bytes() else 1
    drawn_S2 = pl.pallas_call(
        partial(_kernel, vocab=V),
        out_shape=jax.ShapeDtypeStruct((S + rows, 2), jnp.float32),
        grid=((S + rows) // ROWS,),
        in_specs=[
            pl.BlockSpec(block, lambda i: (0, i, 0), pipeline_mode=pl.Buffered(logits_buffers)),
            pl.BlockSpec((ROWS, 4), lambda i: (i, 0)),
        ],
        out_specs=pl.BlockSpec((ROWS, 2), lambda i: (i, 0)),
        scratch_shapes=[pltpu.VMEM(block, jnp.float32)] * 2,
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=vmem_bytes()),
        name="draw",
    )(logits_XSV, rules_S4)
    return drawn_S2[:S, 0].astype(jnp.int32), drawn_S2[:S, 1]


class _Located(NamedTuple):
    """The columns at which the cumulative sum first exceeds the target, else the last of positive weight."""

    sum_R1: Array  # of all columns until now
    is_found_R1: Array  # int32: 1 after the sum has exceeded the target
    before_R1: Array  # the sum before the columns
    first_R1: Array  # int32: the first column
    weight_RC: Array
    scaled_RC: Array


def _kernel(
    logits_XRV: Any,
    rules_R4: Any,  # uniform number, temperature, top_k, top_p
    drawn_R2: Any,  # token, logprob
    scaled_XRV: Any,
    weight_XRV: Any,
    *,
    vocab: int,  # columns of each of the X blocks that are no padding
):
    X, _, V = logits_XRV.shape
    uniform_R1, temperature_R1, top_k_R1, top_p_R1 = (rules_R4[:, i : i + 1] for i in range(4))
    is_greedy_R1 = temperature_R1 == 0.0
    lane_RC = jax.lax.broadcasted_iota(jnp.int32, (ROWS, LANES), 1)

    def scan_columns(step: Callable, carry: Any) -> Any:
        """step(x, first, carry) -> carry for each block x and its columns first .. first + LANES, in order."""
        width = COLUMNS * LANES
        rest = V // LANES % COLUMNS

        def steps(x: int, count: int, first: Any, carry: Any) -> Any:
            for column in range(count):
                carry = step(x, pl.multiple_of(first + column * LANES, LANES), carry)
            return carry

        def wide_steps(x: int, i: Any, carry: Any) -> Any:
            return steps(x, COLUMNS, i * width, carry)

        for x in range(X):
            carry = jax.lax.fori_loop(0, V // width, partial(wide_steps, x), carry)
            carry = steps(x, rest, V - rest * LANES, carry)
        return carry

    def total(value: Callable[[Any], Array]) -> Array:
        """The sum over each row of value((x, rows, columns))."""

        def add(x: int, first: Any, sum_RC: Array) -> Array:
            return sum_RC + value((x, slice(None), pl.ds(first, LANES)))

        return jnp.sum(scan_columns(add, jnp.zeros((ROWS, LANES), jnp.float32)), axis=1, keepdims=True)

    def set_weights(value: Callable[[Any], Array]) -> Array:
        """Sets the weights to value((x, rows, columns)); their sum over each row."""

        def store(at: Any) -> Array:
            weight_XRV[at] = value(at)
            return weight_XRV[at]

        return total(store)

    def scale(x: int, first: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        at = x, slice(None), pl.ds(first, LANES)
        scaled_XRV[at] = logits_XRV[at] / divisor_R1
        max_RC, index_RC = carry
        is_new_RC = scaled_XRV[at] > max_RC
        index_RC = jnp.where(is_new_RC, x * vocab + first + lane_RC, index_RC)
        return jnp.where(is_new_RC, scaled_XRV[at], max_RC), index_RC

    divisor_R1 = jnp.where(is_greedy_R1, 1.0, temperature_R1)
    max_RC, index_RC = scan_columns(scale, (jnp.full((ROWS, LANES), -jnp.inf), jnp.zeros((ROWS, LANES), jnp.int32)))
    max_R1 = jnp.max(max_RC, axis=1, keepdims=True)
    greedy_R1 = jnp.min(jnp.where(max_RC == max_R1, index_RC, X * vocab - 1), axis=1, keepdims=True)

    sum_R1 = set_weights(lambda at: jnp.exp(scaled_XRV[at] - max_R1))

    def holds_k(threshold_R1: Array) -> Array:
        # A float32 counts exactly up to 2^24.
        return total(lambda at: (scaled_XRV[at] >= threshold_R1).astype(jnp.float32)) >= top_k_R1

    threshold_k_R1 = largest_threshold((top_k_R1 > 0) & (top_k_R1 < X * vocab) & ~is_greedy_R1, holds_k)
    kept_R1 = set_weights(lambda at: jnp.where(scaled_XRV[at] >= threshold_k_R1, weight_XRV[at], 0.0))
    set_weights(lambda at: weight_XRV[at] / kept_R1)

    def nucleus(at: Any, threshold_R1: Array) -> Array:
        return jnp.where(weight_XRV[at] >= threshold_R1, weight_XRV[at], 0.0)

    def holds_nucleus(threshold_R1: Array) -> Array:
        return total(lambda at: nucleus(at, threshold_R1)) >= top_p_R1

    threshold_p_R1 = largest_threshold((top_p_R1 < 1.0) & ~is_greedy_R1, holds_nucleus)
    mass_R1 = total(lambda at: nucleus(at, threshold_p_R1))  # of what top-k keeps
    target_R1 = uniform_R1 * mass_R1

    def locate(x: int, first: Any, located: _Located) -> _Located:
        at = x, slice(None), pl.ds(first, LANES)
        weight_RC = nucleus(at, threshold_p_R1)
        added_R1 = jnp.sum(weight_RC, axis=1, keepdims=True)
        is_here_R1 = (added_R1 > 0) & (located.is_found_R1 == 0)
        sum_R1 = located.sum_R1 + added_R1
        return _Located(
            sum_R1=sum_R1,
            is_found_R1=jnp.where(sum_R1 > target_R1, 1, located.is_found_R1),
            before_R1=jnp.where(is_here_R1, located.sum_R1, located.before_R1),
            first_R1=jnp.where(is_here_R1, jnp.full((ROWS, 1), x * vocab + first), located.first_R1),
            weight_RC=jnp.where(is_here_R1, weight_RC, located.weight_RC),
            scaled_RC=jnp.where(is_here_R1, scaled_XRV[at], located.scaled_RC),
        )

    zero_R1 = jnp.zeros((ROWS, 1))
    no_R1 = jnp.zeros((ROWS, 1), jnp.int32)
    zero_RC = jnp.zeros((ROWS, LANES))
    nowhere = _Located(zero_R1, no_R1, zero_R1, no_R1, zero_RC, zero_RC)
    _, _, before_R1, first_R1, weight_RC, scaled_RC = scan_columns(locate, nowhere)
    cumulative_RC = weight_RC
    for shift in (1, 2, 4, 8, 16, 32, 64):
        cumulative_RC += jnp.where(lane_RC >= shift, pltpu.roll(cumulative_RC, shift, 1), 0.0)
    is_positive_RC = weight_RC > 0
    is_above_RC = is_positive_RC & (before_R1 + cumulative_RC > target_R1)
    lane_R1 = jnp.min(jnp.where(is_above_RC, lane_RC, LANES), axis=1, keepdims=True)
    last_R1 = jnp.max(jnp.where(is_positive_RC, lane_RC, 0), axis=1, keepdims=True)
    lane_R1 = jnp.where(lane_R1 < LANES, lane_R1, last_R1)
    drawn_R1 = jnp.sum(jnp.where(lane_RC == lane_R1, scaled_RC, 0.0), axis=1, keepdims=True)
    token_R1 = jnp.where(is_greedy_R1, greedy_R1, first_R1 + lane_R1)
    drawn_R2[:, :1] = token_R1.astype(jnp.float32)
    drawn_R2[:, 1:] = jnp.where(is_greedy_R1, max_R1, drawn_R1) - max_R1 - jnp.log(sum_R1)


def largest_threshold(applies_S: Array, predicate: Callable[[Array], Array]) -> Array:
    """The largest float32 threshold per row for which `predicate(threshold_S) -> bool_S` is true, or minus infinity.

    It is minus infinity, too, where `applies_S` is False; nothing is searched if that is so for all rows. The predicate
    must be true for all small thresholds and false for all large ones. The bits of a float32, read as an integer with
    the order of negative numbers reversed, are ordered like the floats: 32 bisections are exact.
    """
    none_S = jnp.full(applies_S.shape, -jnp.inf)

    def bisect(_, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low_S, high_S = bounds
        # The mean of two int32 without overflow.
        middle_S = (low_S >> 1) + (high_S >> 1) + (low_S & high_S & 1)
        is_true_S = predicate(_float_from_ordered(middle_S))
        return jnp.where(is_true_S, middle_S, low_S), jnp.where(is_true_S, high_S, middle_S)

    def search() -> Array:
        bounds = (jnp.full(applies_S.shape, bits, jnp.int32) for bits in (ORDERED_MINUS_INF, ORDERED_INF))
        low_S, _ = jax.lax.fori_loop(0, 32, bisect, tuple(bounds))
        return _float_from_ordered(low_S)

    found_S = jax.lax.cond(jnp.any(applies_S), search, lambda: none_S)
    return jnp.where(applies_S, found_S, none_S)


def _float_from_ordered(ordered: Array) -> Array:
    bits = jnp.where(ordered < 0, ordered ^ jnp.int32(0x7FFFFFFF), ordered)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
