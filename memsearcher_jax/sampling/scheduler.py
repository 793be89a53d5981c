"""The host state of an engine: which slot holds what, and which device calls the next step needs.

Pure Python and numpy: `schedule` returns the calls with their host arrays, a model runner runs them, and `update`
takes the result. A step admits contexts, prefills what is not cached, and decodes for every context whose tokens are.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import chain, groupby, zip_longest
from typing import NamedTuple

import numpy as np

from memsearcher_jax.sampling.config import SamplingConfig, SamplingParams
from memsearcher_jax.sampling.context import Context, FindStop, RecordedContext
from memsearcher_jax.sampling.decode import Decode, DecodeOutput
from memsearcher_jax.sampling.prefill import CopyPages, Prefill
from memsearcher_jax.sampling.replica import PrefillChunk, Replica

COPIES_PER_CALL = 8
"""Pages of each replica that one call copies."""

LEAST_TEMPERATURE = 1e-5
"""Lower ones count as 0: logits that are divided by them may overflow."""

LEAST_TOP_P = 1e-5
"""Lower ones count as this one: a float32 rounds the least to 0, and the nucleus would be empty."""


@dataclass(frozen=True)
class FinishedGeneration:
    """One generation that has ended."""

    slot: int
    ids: tuple[int, ...]  # including the stop token
    finite: bool = True  # False: it ended because the next logits were not finite; `ids` may be empty
    found_stop: bool = False  # ended by `FindStop`


@dataclass
class SamplerStats:
    """What an engine did between `start` and `stop`."""

    appended_tokens: int = 0  # prompts and observations
    prompt_tokens: int = 0  # context lengths at the start of each generation: prefilled by a sampler without a cache
    prefilled_tokens: int = 0
    shared_tokens: int = 0  # prefixes of new contexts that were cached already
    generated_tokens: int = 0
    steps: int = 0
    seconds: float = 0.0  # between `start` and `stop`
    host_wait: float = 0.0  # of them, in which there was work and no call was under way
    active_slots: int = 0  # sum over steps
    slots: int = 0  # sum over steps, idle slots included
    preempted: int = 0  # times that a context gave its pages back to older ones
    recomputed_tokens: int = 0  # of such contexts: prefilled or decoded before, and prefilled again

    def __add__(self, other: SamplerStats) -> SamplerStats:
        return SamplerStats(*map(operator.add, astuple(self), astuple(other)))

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the prompt tokens that were not prefilled; 0 if preemption made more prefills than that."""
        return max(0.0, 1 - self.prefilled_tokens / self.prompt_tokens) if self.prompt_tokens else 0.0

    @property
    def host_wait_share(self) -> float:
        """Share of the time in which there was work and no call was under way: of several engines, their mean."""
        return self.host_wait / self.seconds if self.seconds else 0.0

    @property
    def idle_slot_share(self) -> float:
        """Share of the slots that took no part in a step: free, or waiting for a search, pages or prefill."""
        return 1 - self.active_slots / self.slots if self.slots else 0.0


class DecodedRow(NamedTuple):
    """What a row of a decoding call generates for."""

    context: Context
    generation: int  # of the context, at the time of the call


@dataclass(frozen=True)
class ScheduledStep:
    """The device calls of one step, in order; decoding is the last."""

    calls: Sequence[CopyPages | Prefill]
    decode: Decode | None  # None if no context is ready
    rows: dict[int, DecodedRow]  # of `decode`, those that are used

    @property
    def is_empty(self) -> bool:
        return not self.calls and self.decode is None


class Scheduler:
    """S slots over the data-parallel replicas of a host.

    A call serves all replicas of one group, with an equal number of rows for each.
    """

    def __init__(self, settings: SamplingConfig, replicas: int, groups: int = 1):
        """`replicas`: their number, which divides the slots.

        Raises ValueError if the KV cache of one is too small for one context.
        """
        self.settings = settings
        self._size = settings.slots // replicas
        pages = settings.pages_per_replica(replicas)
        self._replicas = [Replica(settings, pages) for _ in range(replicas)]
        self._group_size = replicas // groups
        self._batch_sizes = [*(rows for rows in settings.decode_batch_sizes if rows < self._size), self._size]
        self._stats = SamplerStats()
        self._requested_at = [math.inf] * groups

    @property
    def free_slots(self) -> list[int]:
        """Slots that hold no context, alternating over the groups so that new contexts are spread evenly."""
        free = [slot for slot in range(self.settings.slots) if slot not in self._replica(slot).contexts]
        group_slots = self._group_size * self._size
        by_group = [list(slots) for _, slots in groupby(free, lambda slot: slot // group_slots)]
        alternating = chain.from_iterable(zip_longest(*by_group))
        return [slot for slot in alternating if slot is not None]

    def requested_at(self, group: int) -> float:
        """The time, of time.monotonic, of the first request for the group since its last step; infinite without one."""
        return self._requested_at[group]

    @property
    def active(self) -> bool:
        """Whether a step would generate anything."""
        return any(replica.active for replica in self._replicas)

    def is_active(self, group: int) -> bool:
        """Whether a step of the group would generate anything."""
        return any(replica.active for replica in self._group(group))

    def clear(self) -> SamplerStats:
        """Frees every slot, forgets what is cached, and returns what was done since the last call."""
        for replica in self._replicas:
            self._stats.preempted += replica.preempted
            self._stats.shared_tokens += replica.shared_tokens
            self._stats.recomputed_tokens += replica.recomputed_tokens
            replica.clear()
        stats = self._stats
        self._stats = SamplerStats()
        self._requested_at = [math.inf] * len(self._requested_at)
        return stats

    def fits(self, slot: int | None, tokens: int) -> bool:
        """Whether `tokens` more leave room to generate in the slot's context, or in a new one (None)."""
        length = 0 if slot is None else self._context(slot).length
        return length + tokens < self.settings.context_tokens

    def open_context(
        self,
        slot: int,
        ids: Sequence[int] | np.ndarray,
        rng_stream: tuple[int, int],
        max_tokens: int,
        params: SamplingParams | None = None,
        find_stop: FindStop | None = None,
    ) -> None:
        """Starts a context and its first generation in a free slot.

        `rng_stream` seeds the context's draws together with the root key: (trajectory, context), the same on any slot
        at any time. `params` is its sampling rule, by default that of the settings. `find_stop`: where a generation
        ends apart from the stop ids; tokens that were sampled after it are removed, so its place in a step makes no
        difference. Raises ValueError for an empty prompt, or if nothing is left to generate.
        """
        if not len(ids):
            raise ValueError("a prompt must have at least one token")
        context = Context(slot, rng_stream, params or self.settings.params, self.settings.context_tokens)
        self._generate(context, ids, max_tokens, find_stop)
        self._replica(slot).contexts[slot] = context

    def extend_context(
        self,
        slot: int,
        ids: Sequence[int] | np.ndarray,
        max_tokens: int,
        find_stop: FindStop | None = None,
        drop: int = 0,
    ) -> None:
        """Removes the last `drop` tokens of the slot's context, appends text and starts another generation.

        The last generation must have ended with at least `drop` tokens. Raises ValueError, and changes nothing, if
        nothing is left to generate.
        """
        self._generate(self._context(slot), ids, max_tokens, find_stop, drop)

    def pop_context(self, slot: int) -> RecordedContext:
        """The slot's context after the last step; frees the slot. Raises RuntimeError if it is still generating."""
        if self._context(slot).remaining:
            raise RuntimeError(f"slot {slot} is still generating")
        return self._replica(slot).remove(slot).record()

    def schedule(self, group: int = 0) -> ScheduledStep:
        """The calls of a group for all requests since its last step."""
        self._requested_at[group] = math.inf
        replicas = self._group(group)
        for replica in replicas:
            replica.grow()
        calls = list(self._prefill(replicas))
        decoding = [replica.decoding for replica in replicas]
        if not calls and not any(decoding):
            return ScheduledStep(calls, None, {})
        self._stats.steps += 1
        self._stats.active_slots += sum(map(len, decoding))
        self._stats.slots += len(replicas) * self._size
        if not any(decoding):
            return ScheduledStep(calls, None, {})
        most = max(map(len, decoding))
        size = next(size for size in self._batch_sizes if size >= most)
        rows: dict[int, DecodedRow] = {}
        for replica, contexts in enumerate(decoding):
            for row, context in enumerate(contexts):
                rows[replica * size + row] = DecodedRow(context, context.generation)
        call = self._decode_call(rows, size)
        for context, _ in rows.values():
            context.calls_in_flight += 1
        return ScheduledStep(calls, call, rows)

    def update(self, step: ScheduledStep, output: DecodeOutput | None) -> list[FinishedGeneration]:
        """Records the output of the step's decoding, on the host, and returns the generations that it ended.

        What it sampled for a generation that had ended before, which the host did not know then, is dropped.
        """
        finished = []
        for row, (context, generation) in step.rows.items():
            assert output is not None
            if context.generation != generation or not context.remaining:
                self._stats.active_slots -= 1
                continue
            context.calls_in_flight -= 1
            count = int(output.count_A[row])
            self._stats.generated_tokens += count
            context.append(output.token_AJ[row, :count], output.logprob_AJ[row, :count])
            context.remaining = int(output.remaining_A[row])
            if count and context.pages:  # it may have been preempted since
                self._replica(context.slot).mark_cached(context, context.length - 1)
            if context.remaining and not context.find_stop:
                continue
            ids = context.generated()
            end = context.find_stop(ids) if context.find_stop else None
            if end is not None:  # what this step sampled after it, finite or not, is dropped
                self._truncate(context, context.generation_start + end)
                context.remaining = 0
                finished.append(FinishedGeneration(context.slot, ids[:end], found_stop=True))
            elif not context.remaining:
                finished.append(FinishedGeneration(context.slot, ids, bool(output.finite_A[row])))
        return finished

    def warm_up_steps(self) -> list[ScheduledStep]:
        """Steps without any work, with calls of every shape that a step may need; the last one decodes for all rows."""
        prefills = [self._prefill_call([[]], width) for width in self.settings.prefill_buckets]
        steps = [ScheduledStep([], self._decode_call({}, size), {}) for size in self._batch_sizes]
        return [ScheduledStep([self._copy_call([[]]), *prefills], None, {}), *steps]

    def _truncate(self, context: Context, length: int) -> None:
        """Keeps the first `length` tokens of a context; the others were sampled."""
        self._stats.generated_tokens -= context.length - length
        self._replica(context.slot).truncate(context, length)

    def _generate(
        self,
        context: Context,
        ids: Sequence[int] | np.ndarray,
        max_tokens: int,
        find_stop: FindStop | None,
        drop: int = 0,
    ) -> None:
        length = context.length - drop + len(ids)
        if min(max_tokens, self.settings.context_tokens - length) < 1:
            raise ValueError(f"a context of {length} tokens and max_tokens {max_tokens} leave none to generate")
        if drop:
            self._truncate(context, context.length - drop)
        context.append(ids)
        context.generate(max_tokens, find_stop)
        self._stats.appended_tokens += len(ids)
        self._stats.prompt_tokens += context.length
        group = context.slot // (self._group_size * self._size)
        self._requested_at[group] = min(self._requested_at[group], time.monotonic())

    def _prefill(self, replicas: Sequence[Replica]) -> Iterator[CopyPages | Prefill]:
        """Admits contexts and caches their tokens; a later call may share what an earlier one caches."""
        size = self.settings.prefill_chunk
        budget = self.settings.prefill_tokens_per_step
        while budget > 0:
            copies = [list(replica.admit()) for replica in replicas]
            while any(copies):
                yield self._copy_call([pairs[:COPIES_PER_CALL] for pairs in copies])
                copies = [pairs[COPIES_PER_CALL:] for pairs in copies]
            left = max(replica.uncached_chunks() for replica in replicas) * size
            if not left:
                return
            width = self.settings.prefill_bucket(left)
            chunks = [replica.prefill_chunks(width // size) for replica in replicas]
            self._stats.prefilled_tokens += sum(chunk.tokens for row in chunks for chunk in row)
            budget -= width
            yield self._prefill_call(chunks, width)

    def _copy_call(self, pairs: Sequence[Sequence[tuple[int, int]]]) -> CopyPages:
        """(source, target) of each replica's copies."""
        source_A, target_A = np.zeros((2, self._group_size * COPIES_PER_CALL), np.int32)
        for replica, copies in enumerate(pairs):
            for row, (source, target) in enumerate(copies, start=replica * COPIES_PER_CALL):
                source_A[row] = source
                target_A[row] = target
        return CopyPages(source_A, target_A)

    def _prefill_call(self, chunks: Sequence[Sequence[PrefillChunk]], width: int) -> Prefill:
        """Each replica's chunks, in a call of `width` tokens for each replica."""
        size = self.settings.prefill_chunk
        rows = width // size
        A = self._group_size * rows
        ids_AW, segment_AW = np.zeros((2, A, size), np.int32)
        start_A, length_A = np.zeros((2, A), np.int32)
        page_table_AI = np.zeros((A, self.settings.context_pages), np.int32)
        for replica, row_chunks in enumerate(chunks):
            for row, chunk in enumerate(row_chunks, start=replica * rows):
                context = chunk.context
                ids_AW[row, : chunk.tokens] = context.ids_T[chunk.start : chunk.start + chunk.tokens]
                segment_AW[row, : chunk.tokens] = context.slot + 1
                start_A[row] = chunk.start
                length_A[row] = chunk.cached
                page_table_AI[row, : len(context.pages)] = context.pages
        position_AW = start_A[:, None] + np.arange(size, dtype=np.int32)
        B = self._group_size
        return Prefill(
            ids_BT=ids_AW.reshape(B, width),
            position_BT=position_AW.reshape(B, width),
            segment_BT=segment_AW.reshape(B, width),
            page_table_AI=page_table_AI,
            start_A=start_A,
            length_A=length_A,
        )

    def _decode_call(self, rows: dict[int, DecodedRow], size: int) -> Decode:
        """A call of `size` rows for each replica."""
        A = self._group_size * size
        S = self._group_size * self._size
        slot_A = np.full(A, S, np.int32)
        continues_A = np.zeros(A, bool)
        token_A, remaining_A, top_k_A = np.zeros((3, A), np.int32)
        length_A = np.ones(A, np.int32)
        temperature_A, top_p_A = np.ones((2, A), np.float32)
        rng_stream_A2 = np.zeros((A, 2), np.uint32)
        page_table_AI = np.zeros((A, self.settings.context_pages), np.int32)
        for row, (context, _) in rows.items():
            slot_A[row] = context.slot % S
            continues_A[row] = context.calls_in_flight > 0
            token_A[row] = context.ids_T[context.length - 1]
            length_A[row] = context.length
            remaining_A[row] = context.remaining
            rng_stream_A2[row] = context.rng_stream
            params = context.params
            temperature_A[row] = params.temperature if params.temperature >= LEAST_TEMPERATURE else 0.0
            top_k_A[row] = params.top_k
            top_p_A[row] = max(params.top_p, LEAST_TOP_P)
            page_table_AI[row, : len(context.pages)] = context.pages
        return Decode(
            slot_A=slot_A,
            continues_A=continues_A,
            token_A=token_A,
            length_A=length_A,
            remaining_A=remaining_A,
            rng_stream_A2=rng_stream_A2,
            temperature_A=temperature_A,
            top_k_A=top_k_A,
            top_p_A=top_p_A,
            page_table_AI=page_table_AI,
        )

    def _group(self, group: int) -> list[Replica]:
        return self._replicas[group * self._group_size :][: self._group_size]

    def _replica(self, slot: int) -> Replica:
        return self._replicas[slot // self._size]

    def _context(self, slot: int) -> Context:
        return self._replica(slot).contexts[slot]
