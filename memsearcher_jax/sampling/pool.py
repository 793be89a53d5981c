"""Several engines that look like one: each on devices of its own, and none waits for another.

In one program for several copies of the weights, every call takes as long as the copy needs that has most to do, and
all stand still while the host serves those that have ended. Engines of their own know neither: one is served while the
others decode. In exchange each compiles its own programs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import fields, replace

import jax
from jax import Array
from jax.sharding import Mesh, NamedSharding

from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.sampling.buffer import PromptIds, PromptWidths
from memsearcher_jax.sampling.config import SamplingConfig
from memsearcher_jax.sampling.engine import Engine, Spoken
from memsearcher_jax.sampling.ledger import Counters, Recorded


class Pool:
    """What an `Engine` does, by one engine for each copy of the weights on a host's mesh; slots are numbered through.

    A trajectory's tokens are the same: its draws are keyed by its own name, not by where it runs.
    """

    def __init__(
        self,
        model: ModelConfig,
        settings: SamplingConfig,
        widths: PromptWidths,
        stop_ids: Sequence[int],
        mesh: Mesh,
    ):
        """Raises ValueError if the slots do not divide over the mesh's copies of the weights."""
        self.settings = settings
        parts = mesh.devices.reshape(-1, 1, 1, mesh.shape["tensor"])
        if settings.slots % len(parts):
            raise ValueError(f"{settings.slots} slots do not divide over {len(parts)} copies of the weights")
        self._size = settings.slots // len(parts)
        self._meshes = [Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types) for devices in parts]
        own = replace(settings, slots=self._size)
        self._engines = [Engine(model, own, widths, stop_ids, part) for part in self._meshes]
        self._under_way: deque[tuple[int, Callable[[], list[Spoken]]]] = deque()

    @property
    def free(self) -> list[int]:
        """Slots that hold no context, those of all engines in turns: what begins is spread over them."""
        each = [[number * self._size + slot for slot in engine.free] for number, engine in enumerate(self._engines)]
        return [slot for row in range(self._size) for slots in each for slot in slots[row : row + 1]]

    @property
    def speaking(self) -> bool:
        """Whether a tick would generate anything, or is under way."""
        return any(engine.speaking for engine in self._engines)

    @property
    def counters(self) -> Counters:
        """Those of all engines, added up."""
        each = [engine.counters for engine in self._engines]
        return Counters(**{one.name: sum(getattr(counters, one.name) for counters in each) for one in fields(Counters)})

    def start(self, params, root_key: Array) -> None:
        """As `Engine.start`; `params` lie on the whole mesh, a copy on each part."""
        for engine, mesh in zip(self._engines, self._meshes, strict=True):
            engine.start(_part(params, mesh), root_key)

    def fits(self, slot: int | None, tokens: int) -> bool:
        """As `Engine.fits`."""
        engine, own = self._seat(slot or 0)
        return engine.fits(None if slot is None else own, tokens)

    def begin(self, slot: int, prompt: PromptIds, stream: tuple[int, int], max_tokens: int) -> None:
        """As `Engine.begin`."""
        engine, own = self._seat(slot)
        engine.begin(own, prompt, stream, max_tokens)

    def extend(self, slot: int, ids: Sequence[int], max_tokens: int) -> None:
        """As `Engine.extend`."""
        engine, own = self._seat(slot)
        engine.extend(own, ids, max_tokens)

    def tick(self) -> list[Spoken]:
        """Lets every engine decode that does not yet, waits for the one that began first, and returns what it ended."""
        at_work = {number for number, _ in self._under_way}
        for number, engine in enumerate(self._engines):
            if engine.speaking and number not in at_work:
                self._under_way.append((number, engine.send()))
        if not self._under_way:
            return []
        number, receive = self._under_way.popleft()
        return [replace(spoken, slot=number * self._size + spoken.slot) for spoken in receive()]

    def take(self, slot: int) -> Recorded:
        """As `Engine.take`."""
        engine, own = self._seat(slot)
        return engine.take(own)

    def release(self) -> None:
        """Frees every slot, whatever it was about to do; what is under way is lost."""
        self._under_way.clear()
        for engine in self._engines:
            engine.release()

    def warm_up(self, params) -> None:
        """As `Engine.warm_up`."""
        for engine, mesh in zip(self._engines, self._meshes, strict=True):
            engine.warm_up(_part(params, mesh))

    def _seat(self, slot: int) -> tuple[Engine, int]:
        return self._engines[slot // self._size], slot % self._size


def make_sampler(
    model: ModelConfig, settings: SamplingConfig, widths: PromptWidths, stop_ids: Sequence[int], mesh: Mesh
) -> Engine | Pool:
    """One engine for the whole mesh of a host, or one for each copy of the weights, as the settings say."""
    return (Pool if settings.apart else Engine)(model, settings, widths, stop_ids, mesh)


def _part(params, mesh: Mesh):
    """The copy of the weights that lies on these devices; nothing is moved."""

    def part(x: Array) -> Array:
        shards = {shard.device: shard.data for shard in x.addressable_shards}
        lies = NamedSharding(mesh, x.sharding.spec)
        return jax.make_array_from_single_device_arrays(x.shape, lies, [shards[device] for device in mesh.devices.flat])

    return jax.tree.map(part, params)
