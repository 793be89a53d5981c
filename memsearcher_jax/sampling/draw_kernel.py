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

    sum_s1: Array  # of all columns until now
    is_found_s1: Array  # int32: 1 after the sum has exceeded the target
    before_s1: Array  # the sum before the columns
    first_s1: Array  # int32: the first column
    weight_sv: Array
    scaled_sv: Array


def _kernel(
    logits_XsV: Any,
    rules_s4: Any,  # uniform number, temperature, top_k, top_p
    drawn_s2: Any,  # token, logprob
    scaled_XsV: Any,
    weight_XsV: Any,
    *,
    vocab: int,  # columns of each of the X blocks that are no padding
):
    X, _, V = logits_XsV.shape
    uniform_s1, temperature_s1, top_k_s1, top_p_s1 = (rules_s4[:, i : i + 1] for i in range(4))
    is_greedy_s1 = temperature_s1 == 0.0
    lane_sv = jax.lax.broadcasted_iota(jnp.int32, (ROWS, LANES), 1)

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

        def add(x: int, first: Any, sum_sv: Array) -> Array:
            return sum_sv + value((x, slice(None), pl.ds(first, LANES)))

        return jnp.sum(scan_columns(add, jnp.zeros((ROWS, LANES), jnp.float32)), axis=1, keepdims=True)

    def set_weights(value: Callable[[Any], Array]) -> Array:
        """Sets the weights to value((x, rows, columns)); their sum over each row."""

        def store(at: Any) -> Array:
            weight_XsV[at] = value(at)
            return weight_XsV[at]

        return total(store)

    def scale(x: int, first: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        at = x, slice(None), pl.ds(first, LANES)
        scaled_XsV[at] = logits_XsV[at] / divisor_s1
        max_sv, index_sv = carry
        is_new_sv = scaled_XsV[at] > max_sv
        index_sv = jnp.where(is_new_sv, x * vocab + first + lane_sv, index_sv)
        return jnp.where(is_new_sv, scaled_XsV[at], max_sv), index_sv

    divisor_s1 = jnp.where(is_greedy_s1, 1.0, temperature_s1)
    max_sv, index_sv = scan_columns(scale, (jnp.full((ROWS, LANES), -jnp.inf), jnp.zeros((ROWS, LANES), jnp.int32)))
    max_s1 = jnp.max(max_sv, axis=1, keepdims=True)
    greedy_s1 = jnp.min(jnp.where(max_sv == max_s1, index_sv, X * vocab - 1), axis=1, keepdims=True)

    sum_s1 = set_weights(lambda at: jnp.exp(scaled_XsV[at] - max_s1))

    def holds_k(threshold_s1: Array) -> Array:
        # A float32 counts exactly up to 2^24.
        return total(lambda at: (scaled_XsV[at] >= threshold_s1).astype(jnp.float32)) >= top_k_s1

    threshold_k_s1 = largest_threshold((top_k_s1 > 0) & (top_k_s1 < X * vocab) & ~is_greedy_s1, holds_k)
    kept_s1 = set_weights(lambda at: jnp.where(scaled_XsV[at] >= threshold_k_s1, weight_XsV[at], 0.0))
    set_weights(lambda at: weight_XsV[at] / kept_s1)

    def nucleus(at: Any, threshold_s1: Array) -> Array:
        return jnp.where(weight_XsV[at] >= threshold_s1, weight_XsV[at], 0.0)

    def holds_nucleus(threshold_s1: Array) -> Array:
        return total(lambda at: nucleus(at, threshold_s1)) >= top_p_s1

    threshold_p_s1 = largest_threshold((top_p_s1 < 1.0) & ~is_greedy_s1, holds_nucleus)
    mass_s1 = total(lambda at: nucleus(at, threshold_p_s1))  # of what top-k keeps
    target_s1 = uniform_s1 * mass_s1

    def locate(x: int, first: Any, located: _Located) -> _Located:
        at = x, slice(None), pl.ds(first, LANES)
        weight_sv = nucleus(at, threshold_p_s1)
        added_s1 = jnp.sum(weight_sv, axis=1, keepdims=True)
        is_here_s1 = (added_s1 > 0) & (located.is_found_s1 == 0)
        sum_s1 = located.sum_s1 + added_s1
        return _Located(
            sum_s1=sum_s1,
            is_found_s1=jnp.where(sum_s1 > target_s1, 1, located.is_found_s1),
            before_s1=jnp.where(is_here_s1, located.sum_s1, located.before_s1),
            first_s1=jnp.where(is_here_s1, jnp.full((ROWS, 1), x * vocab + first), located.first_s1),
            weight_sv=jnp.where(is_here_s1, weight_sv, located.weight_sv),
            scaled_sv=jnp.where(is_here_s1, scaled_XsV[at], located.scaled_sv),
        )

    zero_s1 = jnp.zeros((ROWS, 1))
    no_s1 = jnp.zeros((ROWS, 1), jnp.int32)
    zero_sv = jnp.zeros((ROWS, LANES))
    nowhere = _Located(zero_s1, no_s1, zero_s1, no_s1, zero_sv, zero_sv)
    _, _, before_s1, first_s1, weight_sv, scaled_sv = scan_columns(locate, nowhere)
    cumulative_sv = weight_sv
    for shift in (1, 2, 4, 8, 16, 32, 64):
        cumulative_sv += jnp.where(lane_sv >= shift, pltpu.roll(cumulative_sv, shift, 1), 0.0)
    is_positive_sv = weight_sv > 0
    is_above_sv = is_positive_sv & (before_s1 + cumulative_sv > target_s1)
    lane_s1 = jnp.min(jnp.where(is_above_sv, lane_sv, LANES), axis=1, keepdims=True)
    last_s1 = jnp.max(jnp.where(is_positive_sv, lane_sv, 0), axis=1, keepdims=True)
    lane_s1 = jnp.where(lane_s1 < LANES, lane_s1, last_s1)
    drawn_s1 = jnp.sum(jnp.where(lane_sv == lane_s1, scaled_sv, 0.0), axis=1, keepdims=True)
    token_s1 = jnp.where(is_greedy_s1, greedy_s1, first_s1 + lane_s1)
    drawn_s2[:, :1] = token_s1.astype(jnp.float32)
    drawn_s2[:, 1:] = jnp.where(is_greedy_s1, max_s1, drawn_s1) - max_s1 - jnp.log(sum_s1)


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
