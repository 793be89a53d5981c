"""Packs contexts of different lengths into rows of a fixed length, in numpy on the host.

Alignment in this package: entry t of a log-probability, mask or advantage belongs to the token ids[t], which the model
predicts from the tokens before it. So the first token of a context is never trained.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from memsearcher_jax.ops.splash_attention import PackedMask


@dataclass(frozen=True)
class TrainingExample:
    """One context to train on. ids, logprobs and sampled have one entry per token."""

    ids: Sequence[int] | np.ndarray
    logprobs: Sequence[float] | np.ndarray  # of the sampling policy where sampled; ignored elsewhere
    sampled: Sequence[bool] | np.ndarray  # True on the tokens to train
    advantage: float  # of the trajectory
    number: int = 0  # of the context in its trajectory
    correct: bool = False  # the answer of its trajectory is
    version: int = 0  # of the policy that sampled it
    count: int = 1  # how often it counts: equal contexts are computed once

    def __post_init__(self) -> None:
        lengths = len(self.ids), len(self.logprobs), len(self.sampled)
        if len(set(lengths)) != 1 or lengths[0] == 0:
            raise ValueError(f"ids, logprobs and sampled must have equal lengths above 0, not {lengths}")
        if self.sampled[0]:
            raise ValueError("the first token of an example cannot be trained: no token precedes it")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedBatch:
    """Packed rows; a pytree of numpy or JAX arrays. Padding has segment 0, and 0 in every other array."""

    ids_BT: jax.Array  # int32
    position_BT: jax.Array  # int32, in the context; from P in a segment that continues the row's first P tokens
    segment_BT: jax.Array  # int32, 1, 2, ... along a row; 0 is padding
    mask_BT: jax.Array  # bool, True on trained tokens
    count_BT: jax.Array  # float32, how often a trained token counts; 0 on others
    advantage_BT: jax.Array  # float32
    old_logprob_BT: jax.Array  # float32, of the sampling policy, computed by the sampler or the trainer
    ref_logprob_BT: jax.Array | None = None  # float32, of the reference or the teacher; None if not needed
    tis_weight_BT: jax.Array | None = None  # float32, weight of the policy loss; None if not used
    teacher_weight_BT: jax.Array | None = None  # float32, weight of the teacher's advantage or loss; None without
    teacher_ids_BTK: jax.Array | None = None  # int32, the teacher's most likely tokens; None if not needed
    teacher_probability_BTK: jax.Array | None = None  # float32, with the former
    number_BT: np.ndarray | None = None  # int32, of the context in its trajectory; on the host only
    example_BT: np.ndarray | None = None  # int32, index of the token's example; on the host only

    def split(self, size: int) -> Iterator[PackedBatch]:
        """Yields batches of `size` consecutive rows."""
        for start in range(0, len(self.ids_BT), size):
            yield jax.tree.map(lambda x, start=start: x[start : start + size], self)


PACKED_DTYPES = {
    "ids_BT": np.int32,
    "position_BT": np.int32,
    "segment_BT": np.int32,
    "mask_BT": np.bool_,
    "count_BT": np.float32,
    "advantage_BT": np.float32,
    "old_logprob_BT": np.float32,
}
"""The arrays that `pack` fills for the devices."""


def merge_equal(examples: Sequence[TrainingExample]) -> list[TrainingExample]:
    """The examples that differ, each with the `count` of its equal ones, by which losses and metrics weight it.

    A sampler rounds by what else it decodes: of equal examples the recorded log-probabilities of the first one remain.
    """
    equal: dict[tuple[bytes, ...], list[TrainingExample]] = {}
    for one in examples:
        key = tuple(np.asarray(value).tobytes() for name, value in vars(one).items() if name != "logprobs")
        equal.setdefault(key, []).append(one)
    return [replace(first, count=len(others) + 1) for first, *others in equal.values()]


def pack(
    examples: Sequence[TrainingExample],
    seq_len: int,
    minibatch_rows: int,
    rng: np.random.Generator,
    *,
    microbatches: int = 1,
    minibatch_contexts: int = sys.maxsize,
) -> PackedBatch:
    """Rows [B, seq_len] that hold each example once and unsplit, up to its last trained token, in as few rows as
    possible.

    A row holds the tokens with which all of its examples begin only once: the first example is whole, the others are
    their own tokens, with the positions that they have in the whole example. Attention gives these tokens the shared
    ones to see (`ops.attention.Visible`), so losses and gradients are those of whole examples.

    Every `minibatch_rows` consecutive rows are a mini-batch, which `microbatches.split` splits into `microbatches`.
    There are as many mini-batches as `minibatch_contexts` examples in each make; more if the rows do not suffice, fewer
    if there are fewer full micro-batches. `rng` distributes the examples, which arrive sorted by trajectory and turn,
    so that each mini-batch is a sample of all trajectories and turns, with the same number of rows, up to one
    micro-batch, and about the same number of trained tokens. Its empty micro-batches come last.

    Raises ValueError without examples, or if an example is longer than a row.
    """
    if not examples:
        raise ValueError("pack needs at least one example")
    lengths = np.array([1 + np.max(np.flatnonzero(example.sampled), initial=0) for example in examples])
    if max(lengths) > seq_len:
        raise ValueError(f"a context of {max(lengths)} tokens does not fit a row of {seq_len}: raise training.seq_len")
    bins, prefixes = _fill_rows(examples, lengths, seq_len, rng.permutation(len(examples)))
    trained = np.array([sum(np.count_nonzero(examples[index].sampled) for index in members) for members in bins])
    micro_rows = minibatch_rows // microbatches
    num_microbatches = -(-len(bins) // micro_rows)
    updates = min(num_microbatches, -(-sum(example.count for example in examples) // minibatch_contexts))
    updates = max(updates, -(-num_microbatches // microbatches))
    rows = _assign_rows(trained, updates, micro_rows, microbatches, rng)
    shape = updates * minibatch_rows, seq_len
    dtypes = PACKED_DTYPES | {"number_BT": np.int32, "example_BT": np.int32}
    arrays: dict[str, Any] = {name: np.zeros(shape, dtype) for name, dtype in dtypes.items()}
    for row, members, prefix in zip(rows, bins, prefixes, strict=True):
        end = 0
        for segment, index in enumerate(members, start=1):
            begin, skipped = end, prefix if end else 0
            end += lengths[index] - skipped
            place, example = (row, slice(begin, end)), examples[index]
            own = slice(skipped, lengths[index])
            sampled_T = np.asarray(example.sampled[own], np.bool_)
            arrays["ids_BT"][place] = example.ids[own]
            arrays["position_BT"][place] = np.arange(skipped, lengths[index])
            arrays["segment_BT"][place] = segment
            arrays["mask_BT"][place] = sampled_T
            arrays["count_BT"][place] = np.where(sampled_T, example.count, 0)
            arrays["advantage_BT"][place] = np.where(sampled_T, example.advantage, 0)
            arrays["old_logprob_BT"][place] = np.where(sampled_T, example.logprobs[own], 0)
            arrays["number_BT"][place] = example.number
            arrays["example_BT"][place] = index
    return PackedBatch(**arrays)


def _fill_rows(
    examples: Sequence[TrainingExample], lengths: np.ndarray, seq_len: int, order: np.ndarray
) -> tuple[list[list[int]], list[int]]:
    """The members of each row, and P: they begin with the same P tokens, which the row holds once.

    Examples with a longer common beginning are a group within one with a shorter one. From the innermost groups to all
    examples, a row of members of one group is kept if a row with the P of the next larger group could not hold them;
    the other members are left to that group. No prefix reaches the token before the first trained one: that token is
    the example's own, because its prediction has to come from the example. `order` breaks ties.
    """
    mask = PackedMask(seq_len)
    limits = np.array(
        [np.argmax(np.append(one.sampled[:length], True)) - 1 for one, length in zip(examples, lengths, strict=True)]
    )
    width = min(int(limits.max()), mask.max_prefix)
    # From its limit on, each example has an id of its own, so that no two agree there. The last one ends the search.
    ids = np.repeat(-1 - np.arange(len(examples), dtype=np.int32)[:, None], width + 1, axis=1)
    for index, (example, limit) in enumerate(zip(examples, limits, strict=True)):
        ids[index, : min(limit, width)] = example.ids[: min(limit, width)]
    by_ids = sorted(range(len(examples)), key=lambda index: ids[index].tobytes())
    common = np.argmax(ids[by_ids[1:]] != ids[by_ids[:-1]], axis=1) // mask.unit * mask.unit
    rank = np.argsort(order)

    bins: list[list[int]] = []
    prefixes: list[int] = []
    groups = [(min(common.tolist(), default=0), list[int]())]  # (P, members not in a row yet), the largest group first
    # With its successor in this order an example shares the most tokens.
    for index, prefix in zip(by_ids, [*common.tolist(), -1], strict=True):
        left = [index]
        while groups and groups[-1][0] > prefix:
            own_prefix, members = groups.pop()
            outer_prefix = max(prefix, groups[-1][0]) if groups else -1
            members = np.array(sorted(members + left, key=rank.__getitem__), np.int64)
            left = []
            for row in _best_fit_decreasing(lengths - own_prefix, seq_len - own_prefix, members):
                if outer_prefix >= 0 and np.sum(lengths[row] - outer_prefix) <= seq_len - outer_prefix:
                    left += row
                else:
                    bins.append(row)
                    prefixes.append(own_prefix)
        if not groups or groups[-1][0] < prefix:
            groups.append((prefix, []))
        groups[-1][1].extend(left)
    return bins, prefixes


def _best_fit_decreasing(lengths: np.ndarray, seq_len: int, order: np.ndarray) -> list[list[int]]:
    """The members of each row: each example of `order`, longest first, goes to the fullest row that has space.

    `order` breaks ties between examples of equal length.
    """
    space = np.full(len(order), seq_len)
    bins: list[list[int]] = [[] for _ in order]
    for index in order[np.argsort(-lengths[order], kind="stable")]:
        row = int(np.argmin(np.where(space >= lengths[index], space, seq_len + 1)))
        space[row] -= lengths[index]
        bins[row].append(int(index))
    return [members for members in bins if members]


def _assign_rows(
    trained: np.ndarray, updates: int, micro_rows: int, microbatches: int, rng: np.random.Generator
) -> np.ndarray:
    """The final position of each row, from its number of trained tokens.

    Rows of a micro-batch have similar numbers, so that its devices compute equally many logits.
    """
    num_microbatches = -(-len(trained) // micro_rows)
    rows_per_update = np.bincount(np.arange(num_microbatches) % updates) * micro_rows
    # Each mini-batch takes rows at even distances, jittered, from the list sorted by trained tokens.
    turn = np.concatenate([(np.arange(rows) + rng.random(rows)) / rows for rows in rows_per_update])
    update_of_rank = np.repeat(np.arange(updates), rows_per_update)[np.argsort(turn)]
    row_of_rank = np.empty(len(update_of_rank), np.int64)
    for update, rows in enumerate(rows_per_update):
        microbatch = np.arange(rows) // micro_rows
        device = rng.permuted(np.tile(np.arange(micro_rows), (rows // micro_rows, 1)), axis=1).ravel()
        # `microbatches.split` is strided: neighbouring rows belong to different micro-batches.
        row_of_rank[update_of_rank == update] = (update * micro_rows + device) * microbatches + microbatch
    positions = np.empty(len(trained), np.int64)
    positions[np.argsort(-trained, kind="stable")] = row_of_rank[: len(trained)]
    return positions
