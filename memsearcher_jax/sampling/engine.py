"""The host's side of the sampler: which slot holds what, what waits for prefill, what has ended.

One thread drives an engine. Requests gather between ticks; a tick opens contexts, appends text, catches the caches up
and decodes for every slot that speaks. All programs have fixed shapes and are compiled by `warm_up`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from memsearcher_jax.model.axes import RULES
from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.sampling import sampler
from memsearcher_jax.sampling.buffer import Padded, PromptIds, PromptWidths, pad
from memsearcher_jax.sampling.config import SamplingConfig
from memsearcher_jax.sampling.ledger import Counters, Ledger, Recorded
from memsearcher_jax.sampling.parts import Parts
from memsearcher_jax.sampling.pieces import Block, seat_pieces


@dataclass(frozen=True)
class Spoken:
    """One ended generation."""

    slot: int
    ids: tuple[int, ...]  # the token that ended it included
    sound: bool = True  # False: it ended because the next logits were not finite; `ids` may be empty


@dataclass(frozen=True)
class _Begin:
    prompt: PromptIds
    stream: tuple[int, int]
    room: int


@dataclass(frozen=True)
class _Extend:
    ids: Sequence[int]
    room: int


@dataclass(frozen=True)
class _Share:
    """A slot that waits for the beginning of its context: the first `tokens` of what `source` caches."""

    source: int
    target: int
    tokens: int


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
        """`mesh` holds local devices only: an engine never waits for another host.

        Raises ValueError if the slots do not divide over the mesh's copies of the weights.
        """
        self.settings = settings
        self.counters = Counters()
        self._widths = widths
        self._mesh = mesh
        copies = math.prod(mesh.shape[axis] for axis in RULES["batch"])
        if settings.slots % copies:
            raise ValueError(f"{settings.slots} slots do not divide over {copies} copies of the weights")
        self._parts = Parts(copies, settings.slots // copies)
        self._decode_rows = [rows for rows in settings.decode_rows if rows < self._parts.size]
        self._params = None
        self._root_key = jax.random.key(0)
        self._ledger = Ledger(settings.slots, settings.context_tokens)
        self._prefix: tuple[int, ...] | None = None  # that the device holds for these weights
        self._spoke_from: dict[int, int] = {}  # by slot that holds a context: where its last generation began
        self._begins: dict[int, _Begin] = {}
        self._extends: dict[int, _Extend] = {}
        self._waiting: list[_Share] = []  # for their source to be caught up; empty between ticks
        self._speaking: set[int] = set()
        with jax.set_mesh(mesh):
            shardings = sampler.slot_shardings(mesh)
            jit = partial(jax.jit, donate_argnums=0, out_shardings=shardings)
            empty_slots = partial(sampler.empty_slots, model, settings, widths.prefix)
            self._slots = jax.jit(empty_slots, out_shardings=shardings)()
            self._hold_prefix = jit(partial(sampler.hold_prefix, model))
            self._begin = jit(sampler.begin)
            self._extend = jit(sampler.extend)
            self._share = jit(sampler.share)
            self._silence = jit(sampler.silence)
            self._prefill = jit(partial(sampler.prefill, model))
            decode = partial(sampler.decode, model, settings, tuple(stop_ids))
            self._decode = jax.jit(decode, donate_argnums=0, out_shardings=(shardings, None))

    @property
    def free(self) -> list[int]:
        """Slots that hold no context."""
        return [slot for slot in range(self.settings.slots) if slot not in self._spoke_from]

    @property
    def speaking(self) -> bool:
        """Whether a tick would generate anything."""
        return bool(self._speaking)

    def start(self, params, root_key: Array) -> None:
        """New weights and a new root key. Every slot must be free: caches of the weights before are worthless."""
        if self._spoke_from:
            raise RuntimeError(f"{len(self._spoke_from)} slots still hold contexts of the weights before")
        self._params, self._root_key = params, root_key
        self._ledger.forget()
        self._prefix = None
        self.counters = Counters()

    def fits(self, slot: int | None, tokens: int) -> bool:
        """Whether so many more tokens leave room to speak in the slot's context, or in a fresh one (None)."""
        held = 0 if slot is None else int(self._ledger.length_S[slot])
        return held + tokens < self.settings.context_tokens

    def begin(self, slot: int, prompt: PromptIds, stream: tuple[int, int], max_tokens: int) -> None:
        """Opens a fresh context that speaks; whatever the slot held is gone.

        `stream` names the context's random draws: (trajectory, context), the same wherever and whenever it runs.
        Raises ValueError, and leaves the slot as it is, for a part of the prompt that is wider than its buffer.
        """
        if not len(prompt):
            raise ValueError("a prompt must have at least one token")
        for name, part, width in zip(PromptWidths.__annotations__, prompt.parts, self._widths.parts, strict=True):
            if len(part) > width:
                raise ValueError(f"the {name} of a prompt has {len(part)} tokens and its buffer holds {width}")
        length = len(prompt)
        self._begins[slot] = _Begin(prompt, stream, self._room(length, max_tokens))
        self._let_speak(slot, length, length)

    def extend(self, slot: int, ids: Sequence[int], max_tokens: int) -> None:
        """Appends text to the slot's context and lets it speak again."""
        length = int(self._ledger.length_S[slot]) + len(ids)
        self._extends[slot] = _Extend(ids, self._room(length, max_tokens))
        self._let_speak(slot, length, len(ids))

    def tick(self) -> list[Spoken]:
        """Carries out what was asked for, decodes once, and returns the generations that ended."""
        return self.send()()

    def send(self) -> Callable[[], list[Spoken]]:
        """Gives a tick's work to the devices; what it returns is to be called once, and waits for the generations."""
        with jax.set_mesh(self._mesh):
            self._open_contexts()
            self._append_text()
            self._catch_up()
            seats, row_A = self._parts.fewest(sorted(self._speaking), self._decode_rows)
            self._slots, drawn = self._decode(self._slots, self._params, self._root_key, row_A)
        self.counters.ticks += 1
        self.counters.speaking_slots += len(self._speaking)
        self.counters.slots += self.settings.slots
        return lambda: self._ended(jax.device_get(drawn), seats)

    def take(self, slot: int) -> Recorded:
        """The slot's context as it stands after the last tick; the slot is free then."""
        if slot in self._speaking:
            raise RuntimeError(f"slot {slot} is still speaking")
        del self._spoke_from[slot]
        return self._ledger.record(slot)

    def release(self) -> None:
        """Frees every slot, whatever it was about to do."""
        if self._spoke_from:
            with jax.set_mesh(self._mesh):
                self._slots = self._silence(self._slots)
            self._begins, self._extends = {}, {}
            self._spoke_from, self._speaking = {}, set()

    def warm_up(self, params) -> None:
        """Compiles every program that a tick may need, on slots that hold nothing."""
        with jax.set_mesh(self._mesh):
            self._slots = self._hold_prefix(self._slots, params, *self._prefix_arguments(()))
            self._slots = self._begin(self._slots, *self._begin_arguments({}, {}))
            for width in self.settings.prefill_buckets:
                self._slots = self._extend(self._slots, *self._extend_arguments({}, width))
                self._slots = self._prefill(self._slots, params, *self._block({}, width).arrays)
            self._slots = self._share(self._slots, *self._share_arguments([], {}))
            for row_A in (None, *map(self._parts.nobody, self._decode_rows)):
                self._slots, _ = self._decode(self._slots, params, self._root_key, row_A)
            self._slots = self._silence(self._slots)

    def _room(self, length: int, max_tokens: int) -> int:
        return min(max_tokens, self.settings.context_tokens - length)

    def _let_speak(self, slot: int, length: int, added: int) -> None:
        self._spoke_from[slot] = length
        self._speaking.add(slot)
        self.counters.standing_tokens += added
        self.counters.prompt_tokens += length

    def _open_contexts(self) -> None:
        ready: list[_Share] = []
        kept: dict[int, int] = {}
        for slot, begin in self._begins.items():
            ids_T = np.array([id for part in begin.prompt.parts for id in part], np.int32)
            prefix_tokens = self._follow_prefix(begin.prompt)
            source, tokens = self._ledger.best_source(slot, ids_T[:-1], prefix_tokens, self._parts.around(slot))
            self.counters.shared_tokens += tokens
            kept[slot] = tokens if source == slot else prefix_tokens
            if source != slot:
                cached = self._ledger.cached_S[source] >= tokens
                (ready if cached else self._waiting).append(_Share(source, slot, tokens))
            self._ledger.open(slot, ids_T, kept[slot], prefix_tokens > 0)
        for some in _groups(list(self._begins), self.settings.rows_per_call):
            arguments = self._begin_arguments({slot: self._begins[slot] for slot in some}, kept)
            self._slots = self._begin(self._slots, *arguments)
        self._begins = {}
        # Before any prefill and in this order: a source may have been opened anew, and loses what it held.
        self._share_caches(ready)

    def _follow_prefix(self, prompt: PromptIds) -> int:
        """Tokens of the prompt that stand in the shared prefix, which is that of the first prompt after `start`."""
        prefix = prompt.prefix
        # Decode feeds the last token of a context, so that one has to stand behind the prefix.
        if not prefix or len(prompt) == len(prefix):
            return 0
        if self._prefix is None:
            self._prefix = prefix
            self._slots = self._hold_prefix(self._slots, self._params, *self._prefix_arguments(prefix))
            self.counters.prefilled_tokens += len(prefix)
            self.counters.shared_tokens -= len(prefix)  # the first that begins with it had it computed
        return len(prefix) if prefix == self._prefix else 0

    def _prefix_arguments(self, prefix: tuple[int, ...]) -> tuple[np.ndarray, np.int32]:
        return pad([prefix], max(1, self._widths.prefix)).ids_SW, np.int32(len(prefix))

    def _begin_arguments(self, begins: dict[int, _Begin], kept: dict[int, int]) -> tuple:
        nothing = _Begin(PromptIds((), (), (), (), ()), (0, 0), 0)
        rows = [*begins, *[self.settings.slots] * (self.settings.rows_per_call - len(begins))]
        begins_A = [begins.get(slot, nothing) for slot in rows]
        rows_of_parts = zip(*(begin.prompt.parts for begin in begins_A), strict=True)
        return (
            np.array(rows, np.int32),
            np.array([begin.stream for begin in begins_A], np.uint32),
            np.array([begin.room for begin in begins_A], np.int32),
            np.array([slot in begins and self._ledger.follows_S[slot] for slot in rows]),
            np.array([kept[slot] - self._held_apart(slot) if slot in begins else 0 for slot in rows], np.int32),
            [pad(ids, width) for ids, width in zip(rows_of_parts, self._widths.parts, strict=True)],
        )

    def _append_text(self) -> None:
        for slot, extend in self._extends.items():
            self._ledger.add_text(slot, extend.ids)
        waiting = self._extends
        while waiting:
            width = self.settings.prefill_bucket(max(len(extend.ids) for extend in waiting.values()))
            for some in _groups(list(waiting), self.settings.rows_per_call):
                arguments = self._extend_arguments({slot: waiting[slot] for slot in some}, width)
                self._slots = self._extend(self._slots, *arguments)
            waiting = {
                slot: _Extend(extend.ids[width:], extend.room)
                for slot, extend in waiting.items()
                if len(extend.ids) > width
            }
        self._extends = {}

    def _extend_arguments(self, extends: dict[int, _Extend], width: int) -> tuple[np.ndarray, np.ndarray, Padded]:
        rows = [*extends, *[self.settings.slots] * (self.settings.rows_per_call - len(extends))]
        extends_A = [extends.get(slot, _Extend((), 0)) for slot in rows]
        room_A = np.array([extend.room for extend in extends_A], np.int32)
        return np.array(rows, np.int32), room_A, pad([extend.ids[:width] for extend in extends_A], width)

    def _catch_up(self) -> None:
        """Caches all that stands, but for the last tokens: what a slot waits for first, so that it can be copied."""
        behind = set(self._speaking)
        while behind:
            ready = [share for share in self._waiting if self._ledger.cached_S[share.source] >= share.tokens]
            self._waiting = [share for share in self._waiting if share not in ready]
            self._share_caches(ready)
            behind = {slot for slot in behind if self._ledger.behind(slot)}
            able = behind - {share.target for share in self._waiting}
            if able:
                self._prefill_block(sorted(able, key=lambda slot: (-self._ledger.behind(slot), slot)))

    def _prefill_block(self, slots: Sequence[int]) -> None:
        """One call: the next tokens that these slots are behind, in order, as many as it has room for."""
        piece, behind = self.settings.prefill_piece, {slot: self._ledger.behind(slot) for slot in slots}
        wanted = [0] * self._parts.count
        for slot, missing in behind.items():
            wanted[slot // self._parts.size] += -(-missing // piece) * piece
        block = self._block(behind, self.settings.prefill_bucket(max(wanted)))
        self._slots = self._prefill(self._slots, self._params, *block.arrays)
        for slot, tokens in block.tokens.items():
            self._ledger.cached_S[slot] += tokens
            self.counters.prefilled_tokens += tokens

    def _block(self, behind: dict[int, int], tokens: int) -> Block:
        width, ledger = self.settings.prefill_piece, self._ledger
        missing = {slot: (int(ledger.cached_S[slot]), count) for slot, count in behind.items()}
        pieces = seat_pieces(missing, self._parts, tokens // width, width)
        return Block.of(pieces, self._parts, width, ledger.ids_SC, ledger.follows_S)

    def _held_apart(self, slot: int) -> int:
        """Tokens at the beginning of the slot's context that its own cache does not hold, because the prefix does."""
        return len(self._prefix) if self._ledger.follows_S[slot] else 0

    def _share_caches(self, shares: Sequence[_Share]) -> None:
        """Copies these beginnings, those within one part of the mesh in order."""
        left = {share.target: share for share in shares}
        while left:
            seats = self._parts.seats(left, self.settings.rows_per_call)
            some = [left.pop(target) for target in seats]
            self._slots = self._share(self._slots, *self._share_arguments(some, seats))
            for share in some:
                self._ledger.cached_S[share.target] = share.tokens

    def _share_arguments(
        self, shares: Sequence[_Share], seats: dict[int, int]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rows = self.settings.rows_per_call
        source_A = self._parts.named({seats[share.target]: share.source for share in shares}, rows)
        target_A = self._parts.named({seats[share.target]: share.target for share in shares}, rows)
        entries = {seats[share.target]: share.tokens - self._held_apart(share.target) for share in shares}
        length_A = self._parts.values(entries, rows)
        return source_A, target_A, length_A

    def _ended(self, drawn: sampler.Drawn, seats: dict[int, int]) -> list[Spoken]:
        ended = []
        for slot, seat in seats.items():
            added = int(drawn.length_S[seat] - self._ledger.length_S[slot])
            self.counters.generated_tokens += added
            self._ledger.add_drawn(slot, drawn.token_SJ[seat, :added], drawn.logprob_SJ[seat, :added])
            if drawn.room_S[seat] == 0:
                ids_T = self._ledger.ids_SC[slot, self._spoke_from[slot] : self._ledger.length_S[slot]]
                ended.append(Spoken(slot, tuple(ids_T.tolist()), bool(drawn.sound_S[seat])))
        self._speaking -= {spoken.slot for spoken in ended}
        return ended


def _groups(slots: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(slots), size):
        yield slots[start : start + size]
