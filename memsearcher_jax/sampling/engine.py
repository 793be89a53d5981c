"""The host's side of the sampler: which slot holds what, what waits for prefill, what has ended.

One thread drives an engine. Requests gather between ticks; a tick opens contexts, appends text, catches the caches up
and decodes for every slot that speaks. All programs have fixed shapes and are compiled by `warm_up`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.sampling import sampler
from memsearcher_jax.sampling.buffer import Padded, PromptIds, PromptWidths, pad
from memsearcher_jax.sampling.config import SamplingConfig


@dataclass(frozen=True)
class Spoken:
    """One ended generation."""

    slot: int
    ids: tuple[int, ...]  # the token that ended it included


@dataclass(frozen=True)
class Recorded:
    """One context as its slot held it, one entry per token."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # 0 where not sampled
    sampled: tuple[bool, ...]


@dataclass
class Counters:
    """What an engine has done since `start`."""

    standing_tokens: int = 0  # text that was given: prompts and observations
    prefilled_tokens: int = 0  # tokens that went through prefill
    generated_tokens: int = 0
    ticks: int = 0


@dataclass(frozen=True)
class _Begin:
    prompt: PromptIds
    stream: tuple[int, int]
    room: int


@dataclass(frozen=True)
class _Extend:
    ids: Sequence[int]
    room: int


@dataclass
class _Held:
    """The host's copy of one slot's lengths, in tokens."""

    length: int
    cached: int
    spoke_from: int

    @property
    def behind(self) -> int:
        """Standing tokens that prefill has still to cache; decode feeds the last one."""
        return self.length - 1 - self.cached


class Engine:
    """S slots on the mesh of one host."""

    def __init__(
        self,
        model: ModelConfig,
        settings: SamplingConfig,
        widths: PromptWidths,
        stop_ids: Sequence[int],
        mesh: Mesh,
    ):
        """`mesh` holds local devices only: an engine never waits for another host."""
        self.settings = settings
        self.counters = Counters()
        self._widths = widths
        self._mesh = mesh
        self._params = None
        self._root_key = jax.random.key(0)
        self._held: dict[int, _Held] = {}
        self._begins: dict[int, _Begin] = {}
        self._extends: dict[int, _Extend] = {}
        self._speaking: set[int] = set()
        self._rows = None
        with jax.set_mesh(mesh):
            shardings = sampler.slot_shardings(mesh)
            jit = partial(jax.jit, out_shardings=shardings)
            self._slots = jit(partial(sampler.empty_slots, model, settings))()
            self._begin = jit(sampler.begin, donate_argnums=0)
            self._extend = jit(sampler.extend, donate_argnums=0)
            self._prefill = jit(partial(sampler.prefill, model), donate_argnums=0, static_argnames="width")
            self._decode = jit(partial(sampler.decode, model, settings, tuple(stop_ids)), donate_argnums=0)

    @property
    def free(self) -> list[int]:
        """Slots that hold no context."""
        return [slot for slot in range(self.settings.slots) if slot not in self._held]

    @property
    def speaking(self) -> bool:
        """Whether a tick would generate anything."""
        return bool(self._speaking)

    def start(self, params, root_key: Array) -> None:
        """New weights and a new root key. Every slot must be free: caches of the weights before are worthless."""
        if self._held:
            raise RuntimeError(f"{len(self._held)} slots still hold contexts of the weights before")
        self._params, self._root_key = params, root_key
        self.counters = Counters()

    def fits(self, slot: int | None, tokens: int) -> bool:
        """Whether so many more tokens leave room to speak in the slot's context, or in a fresh one (None)."""
        held = 0 if slot is None else self._held[slot].length
        return held + tokens < self.settings.context_tokens

    def begin(self, slot: int, prompt: PromptIds, stream: tuple[int, int], max_tokens: int) -> None:
        """Opens a fresh context that speaks; whatever the slot held is gone.

        `stream` names the context's random draws: (trajectory, context), the same wherever and whenever it runs.
        """
        length = len(prompt)
        self._held[slot] = _Held(length, cached=0, spoke_from=length)
        self._begins[slot] = _Begin(prompt, stream, self._room(length, max_tokens))
        self._speaking.add(slot)
        self.counters.standing_tokens += length

    def extend(self, slot: int, ids: Sequence[int], max_tokens: int) -> None:
        """Appends text to the slot's context and lets it speak again."""
        held = self._held[slot]
        held.length += len(ids)
        held.spoke_from = held.length
        self._extends[slot] = _Extend(ids, self._room(held.length, max_tokens))
        self._speaking.add(slot)
        self.counters.standing_tokens += len(ids)

    def tick(self) -> list[Spoken]:
        """Carries out what was asked for, decodes once, and returns the generations that ended."""
        with jax.set_mesh(self._mesh):
            self._open_contexts()
            self._append_text()
            self._catch_up()
            self._slots = self._decode(self._slots, self._params, self._root_key)
        self._rows = None
        self.counters.ticks += 1
        return self._ended()

    def take(self, slot: int) -> Recorded:
        """The slot's context as it stands after the last tick; the slot is free then."""
        if slot in self._speaking:
            raise RuntimeError(f"slot {slot} is still speaking")
        ids_SC, logprob_SC, sampled_SC = self._fetch()
        length = self._held.pop(slot).length
        return Recorded(
            tuple(ids_SC[slot, :length].tolist()),
            tuple(logprob_SC[slot, :length].tolist()),
            tuple(sampled_SC[slot, :length].tolist()),
        )

    def warm_up(self, params) -> None:
        """Compiles every program that a tick may need, on slots that hold nothing."""
        nobody_A = np.full(self._prefill_rows, self.settings.slots, np.int32)
        with jax.set_mesh(self._mesh):
            self._slots = self._begin(self._slots, *self._begin_arguments({}))
            for width in self.settings.prefill_buckets:
                self._slots = self._extend(self._slots, *self._extend_arguments({}, width))
                self._slots = self._prefill(self._slots, params, nobody_A, width=width)
            self._slots = self._decode(self._slots, params, self._root_key)

    @property
    def _prefill_rows(self) -> int:
        return min(self.settings.prefill_rows, self.settings.slots)

    def _room(self, length: int, max_tokens: int) -> int:
        return min(max_tokens, self.settings.context_tokens - length)

    def _bucket(self, tokens: int) -> int:
        """The narrowest compiled width that holds so many tokens, or the widest there is."""
        buckets = self.settings.prefill_buckets
        return next((width for width in buckets if width >= tokens), buckets[-1])

    def _open_contexts(self) -> None:
        if self._begins:
            self._slots = self._begin(self._slots, *self._begin_arguments(self._begins))
        self._begins = {}

    def _begin_arguments(self, begins: dict[int, _Begin]) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[Padded]]:
        slots = self.settings.slots
        starts_S = np.zeros(slots, bool)
        stream_S2 = np.zeros((slots, 2), np.uint32)
        room_S = np.zeros(slots, np.int32)
        for slot, begin in begins.items():
            starts_S[slot], stream_S2[slot], room_S[slot] = True, begin.stream, begin.room
        nothing = PromptIds((), (), (), (), ())
        prompts = [begins[slot].prompt if slot in begins else nothing for slot in range(slots)]
        rows_of_parts = zip(*(prompt.parts for prompt in prompts), strict=True)
        parts = [pad(rows, width) for rows, width in zip(rows_of_parts, self._widths.parts, strict=True)]
        return starts_S, stream_S2, room_S, parts

    def _append_text(self) -> None:
        waiting = self._extends
        while waiting:
            width = self._bucket(max(len(extend.ids) for extend in waiting.values()))
            self._slots = self._extend(self._slots, *self._extend_arguments(waiting, width))
            waiting = {
                slot: _Extend(extend.ids[width:], extend.room)
                for slot, extend in waiting.items()
                if len(extend.ids) > width
            }
        self._extends = {}

    def _extend_arguments(self, extends: dict[int, _Extend], width: int) -> tuple[Padded, np.ndarray]:
        slots = self.settings.slots
        added = pad([extends[slot].ids[:width] if slot in extends else () for slot in range(slots)], width)
        room_S = np.zeros(slots, np.int32)
        for slot, extend in extends.items():
            room_S[slot] = extend.room
        return added, room_S

    def _catch_up(self) -> None:
        while behind := [slot for slot in self._speaking if self._held[slot].behind > 0]:
            behind.sort(key=lambda slot: self._held[slot].behind, reverse=True)
            group = behind[: self._prefill_rows]
            width = self._bucket(self._held[group[0]].behind)
            row_A = np.full(self._prefill_rows, self.settings.slots, np.int32)
            row_A[: len(group)] = group
            self._slots = self._prefill(self._slots, self._params, row_A, width=width)
            for slot in group:
                tokens = min(width, self._held[slot].behind)
                self._held[slot].cached += tokens
                self.counters.prefilled_tokens += tokens

    def _ended(self) -> list[Spoken]:
        room_S, length_S = jax.device_get((self._slots.room_S, self._slots.length_S))
        ended = []
        for slot in sorted(self._speaking):
            held = self._held[slot]
            self.counters.generated_tokens += int(length_S[slot]) - held.length
            held.length = int(length_S[slot])
            held.cached = held.length - 1
            if room_S[slot] == 0:
                ids_SC, _, _ = self._fetch()
                ended.append(Spoken(slot, tuple(ids_SC[slot, held.spoke_from : held.length].tolist())))
        self._speaking -= {spoken.slot for spoken in ended}
        return ended

    def _fetch(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids, log-probabilities and marks of all slots, brought to the host at most once per tick."""
        if self._rows is None:
            self._rows = jax.device_get((self._slots.ids_SC, self._slots.logprob_SC, self._slots.sampled_SC))
        return self._rows
