"""Fixed-shape text buffers: parts of a prompt held apart, padded, with their true lengths as arrays.

A prompt is prefix, question, bridge, memory and suffix. Each part has one static width, so that a memory of 3 tokens
and one of 1024 run the same compiled program; `splice` closes the gaps on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


@dataclass(frozen=True)
class PromptIds:
    """The token ids of one fresh prompt, part by part."""

    prefix: tuple[int, ...]
    question: tuple[int, ...]
    bridge: tuple[int, ...]
    memory: tuple[int, ...]
    suffix: tuple[int, ...]

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    @property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        return (self.prefix, self.question, self.bridge, self.memory, self.suffix)


@dataclass(frozen=True)
class PromptWidths:
    """Room for each part of a prompt, in tokens."""

    prefix: int
    question: int
    bridge: int
    memory: int
    suffix: int

    @property
    def parts(self) -> tuple[int, ...]:
        return (self.prefix, self.question, self.bridge, self.memory, self.suffix)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Padded:
    """Rows of ids, left-aligned in a buffer of static width."""

    ids_SW: Array  # int32; what stands after a row's length is never read
    length_S: Array  # int32


def pad(rows: Sequence[Sequence[int]], width: int) -> Padded:
    """Host rows into one buffer. Raises ValueError if a row is wider than the buffer."""
    ids_SW = np.zeros((len(rows), width), np.int32)
    for row, ids in enumerate(rows):
        if len(ids) > width:
            raise ValueError(f"a text of {len(ids)} tokens does not fit a buffer of {width}")
        ids_SW[row, : len(ids)] = ids
    return Padded(ids_SW, np.array([len(ids) for ids in rows], np.int32))


def splice(parts: Sequence[Padded]) -> Padded:
    """Joins the parts of every row without gaps: a [S, sum of widths] buffer and the total lengths."""
    rows = parts[0].length_S.shape[0]
    width = sum(part.ids_SW.shape[1] for part in parts)
    ids_SW = jnp.zeros((rows, width), jnp.int32)
    length_S = jnp.zeros(rows, jnp.int32)
    for part in parts:
        ids_SW = place(ids_SW, length_S, part)
        length_S = length_S + part.length_S
    return Padded(ids_SW, length_S)


def place(values_SC: Array, start_A: Array, part: Padded, row_A: Array | None = None) -> Array:
    """Writes each row of `part` into `values_SC` from the row's start on; what is past the part's length is not.

    `row_A` names the rows to write to, where they are not all rows in order; a number past the last means nobody.
    """
    rows, width = part.ids_SW.shape
    row_A = jnp.arange(rows) if row_A is None else row_A
    column_AW = start_A[:, None] + jnp.arange(width)
    # A column outside the buffer is dropped, never clamped: padding can not overwrite a neighbour.
    column_AW = jnp.where(jnp.arange(width) < part.length_S[:, None], column_AW, values_SC.shape[1])
    return values_SC.at[row_A[:, None], column_AW].set(part.ids_SW.astype(values_SC.dtype), mode="drop")
