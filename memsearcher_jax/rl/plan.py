"""What a run's programs need of a slice of TPUs, from the programs themselves, compiled without the slice.

Nothing is executed and no weight is made. Bytes are of one device, 10^9 to a GB.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from jax.stages import Lowered

from memsearcher_jax.config import RunConfig
from memsearcher_jax.model import sharding
from memsearcher_jax.model.arithmetic import forward_work, row_work, training_flops
from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.rl.collectives import link_bytes
from memsearcher_jax.rl.trainer import OBJECTIVES
from memsearcher_jax.sampling import plan as sampling_plan
from memsearcher_jax.training import plan as training_plan
from memsearcher_jax.training import update

PREFIX_TOKENS = 512  # room for what every prompt begins with: in the paper 449 tokens


class DoesNotFit(Exception):
    """A program for which a device has too little memory; the message is one line."""


@dataclass(frozen=True)
class Meshes:
    """Where training runs, and where each host samples; of the first host, for all are alike."""

    devices: tuple[jax.Device, ...]
    train: Mesh
    local: Mesh

    @property
    def hosts(self) -> int:
        return self.train.size // self.local.size


@dataclass(frozen=True)
class Program:
    """One compiled program. Bytes and operations are of one device and one call."""

    name: str
    arguments: int
    temporary: int
    peak: int  # arguments, results and temporaries together, at the worst moment
    donated: int  # of the arguments, what the results take the place of
    beside: int  # what the run keeps in memory meanwhile that is no argument
    flops: float  # by formula
    sent: float  # over links; of update and scoring, with one micro-batch
    compile_seconds: float
    compile_processor_seconds: float  # which a busy machine makes no more of

    @property
    def whole(self) -> int:
        """What a device must hold while the program runs."""
        return self.peak + self.beside


@dataclass(frozen=True)
class Resident:
    """What a run keeps on each device from program to program, in bytes."""

    params: int  # of the state
    moments: int  # the rest of the state
    reference: int
    weights: int  # the sampler's
    cache: int  # and all that its slots hold

    @property
    def state(self) -> int:
        return self.params + self.moments

    @property
    def all(self) -> int:
        return self.state + self.reference + self.weights + self.cache


def parts(mesh: MeshConfig, devices: int) -> int:
    """Groups of devices that have rows of their own."""
    return devices // mesh.tensor if -1 in (mesh.data, mesh.fsdp) else mesh.data * mesh.fsdp


def meshes(config: RunConfig, devices: Sequence[jax.Device], host: Sequence[jax.Device]) -> Meshes:
    """Both meshes of a run on these devices, and on those of one host. Raises ValueError where one does not divide."""
    train = sharding.make_mesh(config.mesh, devices)
    sharding.check_divides(config.model, dict(train.shape))
    together = config.sampling.tensor
    if len(host) % together:
        raise ValueError(f"sampling.tensor {together} does not divide the {len(host)} devices of a host")
    local = sharding.make_mesh(MeshConfig(data=-1, fsdp=1, tensor=together), host)
    sharding.check_divides(config.model, dict(local.shape))
    if config.sampling.slots % local.shape["data"]:
        raise ValueError(
            f"sampling.slots {config.sampling.slots} does not divide over the {local.shape['data']} samplers of a host"
        )
    return Meshes(tuple(devices), train, local)


def resident(config: RunConfig, on: Meshes) -> Resident:
    """What stays. Takes no time: only shapes are looked at."""
    state = update.abstract_state(config.model, update.make_optimizer(config.training), on.train)
    reference = training_plan.abstract_reference(config.model, on.train) if config.training.kl_coefficient else ()
    slots = sampling_plan.abstract_slots(config.model, config.sampling, PREFIX_TOKENS, on.local)
    engines = 2 if config.rl.evaluate_every else 1  # evaluation has slots of its own
    return Resident(
        params=_bytes(state.params),
        moments=_bytes(state.opt_state),
        reference=_bytes(reference),
        weights=_bytes(sampling_plan.abstract_weights(config.model, on.local)),
        cache=engines * _bytes(slots),
    )


def training_programs(config: RunConfig, on: Meshes) -> Iterator[Program]:
    """The update, and what scores the rows before it. Raises DoesNotFit."""
    model, settings = sharding.with_kernels(config.model, on.train), config.training
    temperature, stays = config.sampling.temperature, resident(config, on)
    objective = OBJECTIVES[config.rl.method]
    rows = settings.rows_per_update / on.train.size
    work = row_work(model, settings.row_tokens, settings.row_tokens)
    lowered = training_plan.lowered_update(model, settings, on.train, temperature=temperature, objective=objective)
    yield _compiled("update", lowered, stays.all - stays.state, rows * training_flops(model, work))
    scorings = training_plan.lowered_scoring(model, settings, on.train, temperature=temperature)
    for name, lowered in scorings:
        own = stays.reference if name == "reference" else stays.params
        yield _compiled(name, lowered, stays.all - own, rows * work.forward)


def sampling_programs(config: RunConfig, on: Meshes) -> Iterator[Program]:
    """The programs of each host's sampler, and the handing over of weights to it. Raises DoesNotFit."""
    model, settings, stays = config.model, config.sampling, resident(config, on)
    for name, lowered in sampling_plan.lowered_programs(model, settings, PREFIX_TOKENS, on.local):
        tokens = _tokens(name, config, on.local)
        work = forward_work(model, tokens, 0, tokens if name == "decode" else 0)
        own = stays.cache if name == "share" else stays.cache + stays.weights
        yield _compiled(name, lowered, stays.all - own, work.forward / on.local.size, loops=settings.decode_tokens)
    params = update.abstract_params(model, on.train)
    everywhere = sharding.copy_for_each_host(model, on.local, on.devices)
    lowered = sharding.lowered_publish(params, everywhere, model.compute_dtype)
    # The sampler still holds the weights before. Last: where that is too much, what the others need has been said.
    yield _compiled("publish", lowered, stays.all - stays.params, 0.0)


def _tokens(name: str, config: RunConfig, local: Mesh) -> int:
    """Tokens that one call of a sampler's program computes, on all of its devices."""
    kind, *rest = name.split(", ")
    if kind == "decode":
        return config.sampling.slots * config.sampling.decode_tokens
    if kind == "prefill":
        return local.shape["data"] * int(rest[0].split(" x ")[1])
    return PREFIX_TOKENS * local.shape["data"] if kind == "prefix" else 0


def _compiled(name: str, lowered: Lowered, beside: int, flops: float, *, loops: int = 1) -> Program:
    with tempfile.TemporaryDirectory(prefix="plan-") as folder:
        began, began_to_work = time.perf_counter(), time.process_time()
        try:
            # The text as the executable gives it cannot be read back for every program.
            compiled = lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise DoesNotFit(f"{name}: {_reason(error)}") from error
        seconds, worked = time.perf_counter() - began, time.process_time() - began_to_work
        (text,) = Path(folder).glob("*.after_optimizations.txt")
        sent = link_bytes(text.read_text(), loops=loops)
    memory = compiled.memory_analysis()
    return Program(
        name,
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.peak_memory_in_bytes,
        memory.alias_size_in_bytes,
        beside,
        flops,
        sum(sent.values()),
        seconds,
        worked,
    )


def _reason(error: Exception) -> str:
    """The compiler's sentence without its codes."""
    line = str(error).splitlines()[0]
    return line[line.rfind("Ran out of") :] if "Ran out of" in line else line


def _bytes(tree: Any) -> int:
    """Of one device's part."""
    return sum(x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(tree))
