"""Packs contexts of very different lengths into rows of one fixed length. Host-side numpy.

Alignment, here and in every array of this room: entry t of a log-probability, mask or advantage belongs to the token
ids[t], which the model predicts from the tokens before it. So the first token of a context is never trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np


@dataclass(frozen=True)
class Sample:
    """One context to train on; the three sequences have one entry per token."""

    ids: Sequence[int]
    logprobs: Sequence[float]  # behaviour log-probability where sampled; ignored elsewhere
    sampled: Sequence[bool]  # True on the tokens that carry loss
    advantage: float  # the trajectory's, for every sampled token

    def __post_init__(self) -> None:
        lengths = len(self.ids), len(self.logprobs), len(self.sampled)
        if len(set(lengths)) != 1 or lengths[0] == 0:
            raise ValueError(f"a sample needs as many ids as logprobs as mask entries, and some; it has {lengths}")
        if self.sampled[0]:
            raise ValueError("the first token of a sample cannot be trained: nothing comes before it")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """Packed rows; a pytree. Padding is segment 0, and 0 in every other array."""

    ids_BT: np.ndarray | jax.Array  # int32
    position_BT: np.ndarray | jax.Array  # int32, from 0 in each segment
    segment_BT: np.ndarray | jax.Array  # int32, 1, 2, ... along a row; 0 is padding
    mask_BT: np.ndarray | jax.Array  # bool, True on trained tokens
    advantage_BT: np.ndarray | jax.Array  # float32
    old_logprob_BT: np.ndarray | jax.Array  # float32, under the policy that sampled: its sampler's, or its trainer's
    ref_logprob_BT: np.ndarray | jax.Array | None = None  # float32, under the frozen reference; None: not needed
    importance_BT: np.ndarray | jax.Array | None = None  # float32, weight of each policy loss; None: not weighted

    @property
    def fill(self) -> float:
        """Share of the entries that hold a token."""
        return float((np.asarray(self.segment_BT) > 0).mean())

    def split(self, size: int) -> Iterator[Rows]:
        """Groups of `size` rows, in order; `size` divides the number of rows."""
        rows = len(self.ids_BT)
        if rows % size:
            raise ValueError(f"{rows} rows do not split into groups of {size}")
        for start in range(0, rows, size):
            yield jax.tree.map(lambda x, start=start: x[start : start + size], self)


def pack(samples: Sequence[Sample], row_tokens: int, rows_multiple: int, rng: np.random.Generator) -> Rows:
    """Rows [B, row_tokens] that hold every sample whole, exactly once; B is a multiple of `rows_multiple`.

    The rows, the empty ones that fill up B included, come in an order drawn from `rng`: samples arrive sorted by
    trajectory and length, and a mini-batch should see neither. The same arguments give the same rows.
    Raises ValueError where there is no sample, or one that is longer than a row.
    """
    if not samples:
        raise ValueError("there is nothing to pack: no context was given")
    lengths = [len(sample.ids) for sample in samples]
    if max(lengths) > row_tokens:
        raise ValueError(
            f"a context of {max(lengths)} tokens does not fit a row of {row_tokens}: raise training.row_tokens"
        )
    groups = _first_fit_decreasing(lengths, row_tokens)
    count = -(-len(groups) // rows_multiple) * rows_multiple
    rows = Rows(
        ids_BT=np.zeros((count, row_tokens), np.int32),
        position_BT=np.zeros((count, row_tokens), np.int32),
        segment_BT=np.zeros((count, row_tokens), np.int32),
        mask_BT=np.zeros((count, row_tokens), np.bool_),
        advantage_BT=np.zeros((count, row_tokens), np.float32),
        old_logprob_BT=np.zeros((count, row_tokens), np.float32),
    )
    for row, members in zip(rng.permutation(count), groups, strict=False):  # the rows left over stay empty
        start = 0
        for segment, member in enumerate(members, start=1):
            stop = start + lengths[member]
            _write(rows, (row, slice(start, stop)), samples[member], segment)
            start = stop
    return rows


def _first_fit_decreasing(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Longest first, each into the first row with room; the members of each row by index."""
    room = np.full(len(lengths), row_tokens)
    groups: list[list[int]] = [[] for _ in lengths]
    for index in np.argsort(-np.asarray(lengths), kind="stable"):
        row = int(np.argmax(room >= lengths[index]))
        room[row] -= lengths[index]
        groups[row].append(int(index))
    return [group for group in groups if group]


def _write(rows: Rows, place: tuple[int, slice], sample: Sample, segment: int) -> None:
    """Puts one sample into its place of the freshly made rows."""
    sampled_T = np.asarray(sample.sampled, np.bool_)
    rows.ids_BT[place] = sample.ids
    rows.position_BT[place] = np.arange(len(sample.ids))
    rows.segment_BT[place] = segment
    rows.mask_BT[place] = sampled_T
    rows.advantage_BT[place] = np.where(sampled_T, sample.advantage, 0)
    rows.old_logprob_BT[place] = np.where(sampled_T, sample.logprobs, 0)
