"""Packs contexts of different lengths into rows of a fixed length, in numpy on the host.

Alignment in this package: entry t of a log-probability, mask or advantage belongs to the token ids[t], which the model
predicts from the tokens before it. So the first token of a context is never trained.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from memsearcher_jax.training.rows import Beginning, Layout, Row, fill_rows, place_rows

TOKEN_DTYPES = {"ids": np.int32, "logprobs": np.float32, "sampled": np.bool_}
"""The arrays of a TrainingExample, with an entry for each token."""


@dataclass(frozen=True)
class TrainingExample:
    """One context to train on. ids, logprobs and sampled have one entry per token; sequences become arrays."""

    ids: np.ndarray  # int32
    logprobs: np.ndarray  # float32, of the sampling policy where sampled; ignored elsewhere
    sampled: np.ndarray  # bool, True on the tokens to train
    advantage: float  # of the trajectory
    number: int = 0  # of the context in its trajectory
    correct: bool = False  # the answer of its trajectory is
    version: int = 0  # of the policy that sampled it
    count: int = 1  # how often it counts: equal contexts are computed once
    memory: np.ndarray | None = None  # bool, True on tokens of memories; None if they are not told apart

    def __post_init__(self) -> None:
        for name, dtype in TOKEN_DTYPES.items():
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype))
        lengths = len(self.ids), len(self.logprobs), len(self.sampled)
        if len(set(lengths)) != 1 or lengths[0] == 0:
            raise ValueError(f"ids, logprobs and sampled must have equal lengths above 0, not {lengths}")
        if self.memory is not None and len(self.memory) != lengths[0]:
            raise ValueError(f"memory must have as many entries as ids, not {len(self.memory)} for {lengths[0]}")
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
    kind_weight_BT: jax.Array | None = None  # float32, weight of the loss by the kind of a token; None: 1
    teacher_ids_BTK: jax.Array | None = None  # int32, the teacher's most likely tokens; None if not needed
    teacher_probability_BTK: jax.Array | None = None  # float32, with the former

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
"""The arrays that packing fills; losses and teachers add others."""


@dataclass(frozen=True)
class PackedRows:
    """Which tokens each row of a step holds. The arrays of a mini-batch are made when they are asked for."""

    examples: Sequence[TrainingExample]
    lengths: np.ndarray  # of each example, up to its last trained token
    rows: Sequence[Row | None]  # in the order of the step; None: an empty row
    seq_len: int
    minibatch_rows: int

    @property
    def minibatches(self) -> int:
        return len(self.rows) // self.minibatch_rows

    def of_minibatch(self, number: int) -> PackedRows:
        """The rows of one mini-batch, counted from 0."""
        first = number * self.minibatch_rows
        return replace(self, rows=self.rows[first : first + self.minibatch_rows])

    def batch(self) -> PackedBatch:
        """The arrays of all rows."""
        shape = len(self.rows), self.seq_len
        arrays: dict[str, Any] = {name: np.zeros(shape, dtype) for name, dtype in PACKED_DTYPES.items()}
        for segment in self._segments():
            example = self.examples[segment.example]
            place = segment.row, slice(segment.begin, segment.end)
            own = slice(segment.first, segment.first + segment.end - segment.begin)
            sampled_T = example.sampled[own]
            arrays["ids_BT"][place] = example.ids[own]
            arrays["position_BT"][place] = np.arange(own.start, own.stop)
            arrays["segment_BT"][place] = segment.number
            arrays["mask_BT"][place] = sampled_T
            arrays["count_BT"][place] = np.where(sampled_T, example.count, 0)
            arrays["advantage_BT"][place] = np.where(sampled_T, example.advantage, 0)
            arrays["old_logprob_BT"][place] = np.where(sampled_T, example.logprobs[own], 0)
        return PackedBatch(**arrays)

    def memory_mask(self) -> np.ndarray:
        """bool [B, T]: True on the tokens of memories. Raises ValueError for an example that does not mark them."""
        memory_BT = np.zeros((len(self.rows), self.seq_len), bool)
        for segment in self._segments():
            memory = self.examples[segment.example].memory
            if memory is None:
                raise ValueError("training.memory_weight needs contexts whose memories are marked, and one is not")
            memory_BT[segment.row, segment.begin : segment.end] = memory[segment.first :][: segment.end - segment.begin]
        return memory_BT

    def per_token(self, values: ArrayLike, dtype: DTypeLike) -> np.ndarray:
        """[B, T]: each token has the value of its example, of `values`, which has one for each; padding has 0."""
        values_C = np.asarray(values)
        values_BT = np.zeros((len(self.rows), self.seq_len), dtype)
        for segment in self._segments():
            values_BT[segment.row, segment.begin : segment.end] = values_C[segment.example]
        return values_BT

    def _segments(self) -> Iterator[_Segment]:
        for place, row in enumerate(self.rows):
            if row is None:
                continue
            begin = 0
            for number, example in enumerate(row.members, start=1):
                first = 0 if number == 1 else row.prefix
                end = begin + int(self.lengths[example]) - first
                yield _Segment(place, begin, end, number, example, first)
                begin = end


@dataclass(frozen=True)
class _Segment:
    """Consecutive tokens of one example in a row."""

    row: int
    begin: int  # in the row
    end: int
    number: int  # 1, 2, ... along the row
    example: int
    first: int  # the example's token at `begin`; the row holds those before it once, for all of its examples


def merge_equal(examples: Sequence[TrainingExample]) -> list[TrainingExample]:
    """The examples that differ, each with the `count` of its equal ones, by which losses and metrics weight it.

    A sampler rounds by what else it decodes, so log-probabilities of equal examples may differ: those of the first one
    remain.
    """
    first_of_equals: dict[tuple[bytes, ...], TrainingExample] = {}
    counts = Counter[tuple[bytes, ...]]()
    for example in examples:
        token_fields = (example.ids.tobytes(), example.sampled.tobytes())
        fields = (example.advantage, example.number, example.correct, example.version)
        memory = b"" if example.memory is None else example.memory.tobytes()
        key = (*token_fields, memory, repr(fields).encode())
        first_of_equals.setdefault(key, example)
        counts[key] += 1
    return [
        example if counts[key] == 1 else replace(example, count=counts[key]) for key, example in first_of_equals.items()
    ]


def plan_rows(
    examples: Sequence[TrainingExample],
    seq_len: int,
    minibatch_rows: int,
    rng: np.random.Generator,
    *,
    microbatches: int = 1,
    minibatch_contexts: int = sys.maxsize,
) -> PackedRows:
    """Rows of `seq_len` that hold each example once and unsplit, up to its last trained token: see `rows.fill_rows`.

    A row holds the tokens with which all of its examples begin only once: the first example is whole, the others are
    their own tokens, with the positions that they have in the whole example. Attention gives these tokens the shared
    ones to see (`ops.attention.Visible`), so losses and gradients are those of whole examples.

    Every `minibatch_rows` consecutive rows are a mini-batch, which `microbatches.split` splits into `microbatches`.
    `Layout.of` says how many there are. `rng` distributes the examples, which arrive sorted by trajectory and turn,
    so that each mini-batch is a sample of all trajectories and turns, with the same number of rows, up to one
    micro-batch, and about the same number of trained tokens. Its empty micro-batches come last.

    Raises ValueError without examples, or if an example is longer than a row.
    """
    if not examples:
        raise ValueError("packing needs at least one example")
    beginnings = list(map(_beginning, examples))
    lengths = np.array([beginning.length for beginning in beginnings])
    if max(lengths) > seq_len:
        raise ValueError(f"a context of {max(lengths)} tokens does not fit a row of {seq_len}: raise training.seq_len")
    rows = fill_rows(beginnings, seq_len, rng.permutation(len(examples)))

    layout = Layout.of(
        len(rows),
        sum(example.count for example in examples),
        minibatch_rows=minibatch_rows,
        microbatches=microbatches,
        minibatch_contexts=minibatch_contexts,
    )

    trained_C = np.array([np.count_nonzero(example.sampled) for example in examples])
    trained = np.array([np.sum(trained_C[row.members]) for row in rows])
    placed: list[Row | None] = [None] * layout.rows
    for position, row in zip(place_rows(trained, layout, rng), rows, strict=True):
        placed[position] = row
    return PackedRows(examples, lengths, placed, seq_len, minibatch_rows)


def pack(
    examples: Sequence[TrainingExample],
    seq_len: int,
    minibatch_rows: int,
    rng: np.random.Generator,
    *,
    microbatches: int = 1,
    minibatch_contexts: int = sys.maxsize,
) -> PackedBatch:
    """The rows [B, seq_len] of `plan_rows`, those of all mini-batches."""
    rows = plan_rows(
        examples, seq_len, minibatch_rows, rng, microbatches=microbatches, minibatch_contexts=minibatch_contexts
    )
    return rows.batch()


def _beginning(example: TrainingExample) -> Beginning:
    """What of the example is computed, and what other examples may share.

    A shared beginning ends before the token that precedes the first trained one: that token predicts the trained one,
    so it has to come from the example itself.
    """
    trained = np.flatnonzero(example.sampled)
    if not len(trained):
        return Beginning(example.ids, length=1, shareable=0)
    return Beginning(example.ids, length=int(trained[-1]) + 1, shareable=int(trained[0]) - 1)
