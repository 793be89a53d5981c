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

    def split(self, size: int) -> Iterator[Rows]:
        """Groups of `size` rows, in order; `size` divides the number of rows."""
        rows = len(self.ids_BT)
        if rows % size:
            raise ValueError(f"{rows} rows do not split into groups of {size}")
        for start in range(0, rows, size):
            yield jax.tree.map(lambda x, start=start: x[start : start + size], self)


def pack(
    samples: Sequence[Sample],
    row_tokens: int,
    rows_per_update: int,
    rng: np.random.Generator,
    *,
    micro_batches: int = 1,
) -> Rows:
    """Rows [B, row_tokens] that hold every sample whole, exactly once, in as few mini-batches as there can be.

    Each run of `rows_per_update` rows is a mini-batch, which `parts.split_rows` cuts into `micro_batches`. Samples
    arrive sorted by trajectory and turn, and a mini-batch should see neither: who goes where is drawn from `rng`, but
    so that mini-batches have the same number of rows, to one micro-batch, and alike numbers of trained tokens.
    Micro-batches that stay empty are the last ones of their mini-batch. The same arguments give the same rows.

    Raises ValueError where there is no sample, or one that is longer than a row.
    """
    if not samples:
        raise ValueError("there is nothing to pack: no context was given")
    lengths = np.array([len(sample.ids) for sample in samples])
    if max(lengths) > row_tokens:
        raise ValueError(
            f"a context of {max(lengths)} tokens does not fit a row of {row_tokens}: raise training.row_tokens"
        )
    groups = _best_fit_decreasing(lengths, row_tokens, rng.permutation(len(samples)))
    trained = np.array([sum(np.count_nonzero(samples[member].sampled) for member in group) for group in groups])
    places = _deal(trained, rows_per_update // micro_batches, micro_batches, rng)
    count = -(-len(groups) // rows_per_update) * rows_per_update
    rows = Rows(
        ids_BT=np.zeros((count, row_tokens), np.int32),
        position_BT=np.zeros((count, row_tokens), np.int32),
        segment_BT=np.zeros((count, row_tokens), np.int32),
        mask_BT=np.zeros((count, row_tokens), np.bool_),
        advantage_BT=np.zeros((count, row_tokens), np.float32),
        old_logprob_BT=np.zeros((count, row_tokens), np.float32),
    )
    for row, members in zip(places, groups, strict=True):
        start = 0
        for segment, member in enumerate(members, start=1):
            stop = start + lengths[member]
            _write(rows, (row, slice(start, stop)), samples[member], segment)
            start = stop
    return rows


def _best_fit_decreasing(lengths: np.ndarray, row_tokens: int, order: np.ndarray) -> list[list[int]]:
    """Longest first, each into the fullest row with room; the members of each row by index.

    `order` decides between samples of one length.
    """
    room = np.full(len(lengths), row_tokens)
    groups: list[list[int]] = [[] for _ in lengths]
    for index in order[np.argsort(-lengths[order], kind="stable")]:
        row = int(np.argmin(np.where(room >= lengths[index], room, row_tokens + 1)))
        room[row] -= lengths[index]
        groups[row].append(int(index))
    return [group for group in groups if group]


def _deal(trained: np.ndarray, micro_rows: int, micro_batches: int, rng: np.random.Generator) -> np.ndarray:
    """Where each row goes, given how many tokens of it are trained: its index among the rows of all mini-batches.

    A micro-batch has rows with alike numbers, so that its devices have the same to do behind the last layer too.
    """
    parts = -(-len(trained) // micro_rows)
    updates = -(-parts // micro_batches)
    rows_U = np.array([parts // updates + (update < parts % updates) for update in range(updates)]) * micro_rows
    # Every mini-batch takes its rows, the empty ones among them, at even distances from the sorted list.
    turn = np.concatenate([(np.arange(rows) + rng.random(rows)) / rows for rows in rows_U])
    owner = np.repeat(np.arange(updates), rows_U)[np.argsort(turn)]
    places = np.empty(len(owner), np.int64)
    for update, rows in enumerate(rows_U):
        part = np.arange(rows) // micro_rows
        device = rng.permuted(np.tile(np.arange(micro_rows), (rows // micro_rows, 1)), axis=1).ravel()
        # As `parts.split_rows` counts: neighbouring rows are of different parts.
        places[owner == update] = (update * micro_rows + device) * micro_batches + part
    by_trained = np.argsort(-trained, kind="stable")
    placed = np.empty(len(trained), np.int64)
    placed[by_trained] = places[: len(trained)]
    return placed


def _write(rows: Rows, place: tuple[int, slice], sample: Sample, segment: int) -> None:
    """Puts one sample into its place of the freshly made rows."""
    sampled_T = np.asarray(sample.sampled, np.bool_)
    rows.ids_BT[place] = sample.ids
    rows.position_BT[place] = np.arange(len(sample.ids))
    rows.segment_BT[place] = segment
    rows.mask_BT[place] = sampled_T
    rows.advantage_BT[place] = np.where(sampled_T, sample.advantage, 0)
    rows.old_logprob_BT[place] = np.where(sampled_T, sample.logprobs, 0)
