"""Which examples share a row of a fixed length, and where each row goes.

A row holds the tokens with which all of its examples begin only once. `fill_rows` looks for few rows with long common
beginnings, `place_rows` distributes the rows over mini-batches, micro-batches and devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from memsearcher_jax.ops.splash_attention import PackedMask

NO_SUCCESSOR = -1
"""In the place of a number of common tokens: smaller than any, so that every group ends."""


@dataclass(frozen=True)
class Beginning:
    """An example as `fill_rows` sees it."""

    ids: np.ndarray  # int32
    length: int  # tokens to hold: up to the last trained one
    shareable: int  # the first tokens, which other examples may hold in common


@dataclass(frozen=True)
class Row:
    """The examples of one row."""

    members: list[int]  # indices of examples, in the order of the row
    prefix: int  # P: the tokens with which all of them begin, which the row holds once


@dataclass(frozen=True)
class _Group:
    """Examples that begin with the same tokens. Groups with longer prefixes are within those with shorter ones."""

    prefix: int
    unplaced: list[int] = field(default_factory=list)  # members that are in no row yet


class _SortedBeginnings(NamedTuple):
    indices: list[int]  # of the examples, in an order where neighbours begin alike
    common: list[int]  # tokens in common with the next example, in the units that the mask can express


def fill_rows(beginnings: Sequence[Beginning], seq_len: int, order: np.ndarray) -> list[Row]:
    """Rows of at most `seq_len` tokens that hold every example once, with few tokens in all.

    Examples with a longer common beginning are a group within one with a shorter one. From the innermost groups to the
    group of all examples, the members of a group are distributed over rows with the group's prefix. Such a row is kept
    if a row with the prefix of the next larger group could not hold the same members; the others are left to that
    group, where they may fill a row together with examples of other groups. `order` breaks ties.

    For example, two questions p and q follow the system prompt S S, and a to d are each example's own tokens:

        0: S S p p a a      neighbours have in common 4 tokens (0 and 1), 2 (1 and 2) and 4 (2 and 3): the groups are
        1: S S p p b b      {0, 1} and {2, 3} with P = 4, within {0, 1, 2, 3} with P = 2
        2: S S q q c c
        3: S S q q d d

    Rows of 8 tokens: "S S p p a a b b" has the 4 + 2 + 2 tokens of {0, 1}. With P = 2 they need 2 + 4 + 4, which is
    more than 8, so the row is kept; likewise that of {2, 3}.
    Rows of 18 tokens: with P = 2, too, 0 and 1 fit a row, so they are left to the group of all. It needs 2 + 4 x 4
    tokens, and makes one row in place of two: "S S p p a a p p b b q q c c q q d d".
    """
    lengths = np.array([beginning.length for beginning in beginnings])
    rank = np.argsort(order)
    sorted_beginnings = _sort_by_beginning(beginnings, PackedMask(seq_len))
    common = sorted_beginnings.common
    rows: list[Row] = []
    open_groups = [_Group(min(common, default=0))]  # from the group of all examples to the innermost one
    for index, common_with_next in zip(sorted_beginnings.indices, [*common, NO_SUCCESSOR], strict=True):
        unplaced = [index]
        while open_groups and open_groups[-1].prefix > common_with_next:
            group = open_groups.pop()
            members = np.array(sorted(group.unplaced + unplaced, key=rank.__getitem__), np.int64)
            unplaced = []
            for row_members in _best_fit_decreasing(lengths - group.prefix, seq_len - group.prefix, members):
                if open_groups:
                    outer_prefix = max(common_with_next, open_groups[-1].prefix)
                    tokens_in_outer_group = outer_prefix + np.sum(lengths[row_members] - outer_prefix)
                    if tokens_in_outer_group <= seq_len:
                        unplaced += row_members
                        continue
                rows.append(Row(row_members, group.prefix))
        if common_with_next == NO_SUCCESSOR:
            break
        if not open_groups or open_groups[-1].prefix < common_with_next:
            open_groups.append(_Group(common_with_next))
        open_groups[-1].unplaced.extend(unplaced)
    return rows


def _sort_by_beginning(beginnings: Sequence[Beginning], mask: PackedMask) -> _SortedBeginnings:
    width = min(max(beginning.shareable for beginning in beginnings), mask.max_prefix)
    # What an example may not share is replaced by a negative number of its own, so that no two examples agree there.
    # The last column is never shared, which ends every search for the first difference.
    shared_ids = np.repeat(-1 - np.arange(len(beginnings), dtype=np.int32)[:, None], width + 1, axis=1)
    for row_ids, beginning in zip(shared_ids, beginnings, strict=True):
        shared = min(beginning.shareable, width)
        row_ids[:shared] = beginning.ids[:shared]
    indices = sorted(range(len(beginnings)), key=lambda index: shared_ids[index].tobytes())
    sorted_ids = shared_ids[indices]
    first_difference = np.argmax(sorted_ids[1:] != sorted_ids[:-1], axis=1)
    return _SortedBeginnings(indices, (first_difference // mask.unit * mask.unit).tolist())


def _best_fit_decreasing(lengths: np.ndarray, capacity: int, members: np.ndarray) -> list[list[int]]:
    """The members of each row: the longest first, each goes to the fullest row that has space for it.

    The order of `members` breaks ties between equal lengths.
    """
    rows: list[list[int]] = []
    space = np.full(len(members), capacity)  # of each row; those after the last of `rows` are empty
    longest_first = members[np.argsort(-lengths[members], kind="stable")]
    for index in longest_first.tolist():
        fits = space >= lengths[index]
        fullest = int(np.argmin(np.where(fits, space, capacity + 1)))
        if fullest == len(rows):
            rows.append([])
        rows[fullest].append(index)
        space[fullest] -= lengths[index]
    return rows


@dataclass(frozen=True)
class Layout:
    """How the rows of a step are divided."""

    minibatches: int
    microbatches: int  # of a mini-batch
    micro_rows: int  # rows of a micro-batch, the same number on each device

    @classmethod
    def of(
        cls, rows: int, contexts: float, *, minibatch_rows: int, microbatches: int, minibatch_contexts: float
    ) -> Layout:
        """As many mini-batches as `minibatch_contexts` contexts in each make.

        More if the rows do not suffice, fewer if there are fewer full micro-batches.
        """
        micro_rows = minibatch_rows // microbatches
        full_microbatches = math.ceil(rows / micro_rows)
        wanted = math.ceil(contexts / minibatch_contexts)
        fewest = math.ceil(full_microbatches / microbatches)
        return cls(max(min(full_microbatches, wanted), fewest), microbatches, micro_rows)

    @property
    def rows(self) -> int:
        return self.minibatches * self.microbatches * self.micro_rows


def place_rows(trained: np.ndarray, layout: Layout, rng: np.random.Generator) -> np.ndarray:
    """The position of each row in the step, from its number of trained tokens.

    Mini-batches get rows of all sizes, and equally many full micro-batches, up to one. Rows of one micro-batch have
    similar numbers of trained tokens, so that its devices compute equally many logits.
    """
    micro_rows = layout.micro_rows
    full_microbatches = -(-len(trained) // micro_rows)
    rows_by_minibatch = np.bincount(np.arange(full_microbatches) % layout.minibatches) * micro_rows
    # A rank is a place in the list of rows sorted by trained tokens. Each mini-batch takes ranks at even distances, up
    # to chance.
    distances = [(np.arange(count) + rng.random(count)) / count for count in rows_by_minibatch]
    minibatch_by_distance = np.repeat(np.arange(layout.minibatches), rows_by_minibatch)
    minibatch_of_rank = minibatch_by_distance[np.argsort(np.concatenate(distances))]
    position_of_rank = np.empty(len(minibatch_of_rank), np.int64)
    for minibatch, count in enumerate(rows_by_minibatch):
        microbatch = np.arange(count) // micro_rows
        rows_of_devices = np.tile(np.arange(micro_rows), (count // micro_rows, 1))
        row_in_microbatch = rng.permuted(rows_of_devices, axis=1).ravel()
        first_row = minibatch * layout.microbatches * micro_rows
        # `microbatches.split` is strided: neighbouring rows belong to different micro-batches.
        position = first_row + row_in_microbatch * layout.microbatches + microbatch
        position_of_rank[minibatch_of_rank == minibatch] = position
    positions = np.empty(len(trained), np.int64)
    positions[np.argsort(-trained, kind="stable")] = position_of_rank[: len(trained)]
    return positions
