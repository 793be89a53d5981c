"""Plans a run on the devices of this process, before it uses them: whether it fits, and settings that do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax

from memsearcher_jax.config import RunConfig
from memsearcher_jax.ops.kernel_errors import KernelError
from memsearcher_jax.planning import roofline, suggest
from memsearcher_jax.planning.planner import GB, Planner
from memsearcher_jax.planning.roofline import GPUS, Topology, Workload
from memsearcher_jax.planning.tpu_plan import CompilerError
from memsearcher_jax.training.config import TeacherConfig

PLANAR = ("v5e", "v6e")  # generations whose slices have two axes


def present_topology(devices: Sequence[Any], local_devices: Sequence[Any]) -> Topology | None:
    """The topology of all JAX devices of a job, with those of this host; None if their rates are not known.

    A device that says how much memory it offers is believed, because other processes may hold some of it.
    """
    generation = roofline.generation_of(devices[0].device_kind)
    if generation is None:
        return None
    slices = 1
    if generation in GPUS:
        hosts = len(devices) // len(local_devices)
        lengths = [hosts, len(local_devices)] if hosts > 1 else [len(local_devices)]
    else:
        slices = len({getattr(device, "slice_index", 0) for device in devices})
        lengths = [_length(devices, axis) for axis in range(2 if generation in PLANAR else 3)]
    topology = Topology.of(generation, lengths, devices, local_devices, slices)
    limit = _memory_limit(local_devices[0])
    if limit is None:
        return topology
    return replace(topology, chip=replace(topology.chip, hbm_bytes=min(limit, topology.chip.hbm_bytes)))


def _length(devices: Sequence[Any], axis: int) -> int:
    """Chips of a slice along an axis."""
    places = [device.coords[axis] for device in devices]
    return max(places) - min(places) + 1


def _memory_limit(device: Any) -> float | None:
    """Bytes that programs may use of a device; None if it does not say."""
    try:
        statistics = device.memory_stats()
    except jax.errors.JaxRuntimeError:  # a device that is planned for and not present
        return None
    return (statistics or {}).get("bytes_limit")


def check_fits(config: RunConfig, topology: Topology) -> None:
    """Raises ValueError with the way out, in one line, if training exceeds the devices by its lower bounds."""
    planner = _planner(config, topology)
    if reason := planner.least(config).reason:
        raise ValueError(f"{reason}: try {planner.ways_out(config)}")


def smallest_settings(config: RunConfig, topology: Topology) -> dict[str, Any]:
    """`suggest.SETTINGS` with the least memory. Raises ValueError if they do not fit by their lower bounds either.

    A teacher, whose files may not be here yet, is left out.
    """
    without_teacher = replace(config, teacher=TeacherConfig())
    return suggest.chosen_settings(_planner(config, topology).smallest(without_teacher))


def fastest_settings(
    config: RunConfig, topology: Topology, notify: Callable[[str], object], say: Callable[[str], object]
) -> dict[str, Any]:
    """The fastest `suggest.SETTINGS` whose programs fit, which are compiled to find out.

    `notify` gets what begins to compile, `say` lines about what is tried and what is found. Raises ValueError in one
    line if nothing fits, or if the compiler fails.
    """

    def announce(base: RunConfig, tried: RunConfig) -> None:
        say(f"trying {suggest.flags_between(base, tried) or 'the settings as they are'}")

    try:
        found = _planner(config, topology, notify, say).fastest(config, announce)
    except (KernelError, CompilerError) as error:
        raise ValueError(str(error)) from error
    flags = suggest.flags_between(config, found.config) or "as they are"
    peaks = ", ".join(f"{phase} {size / GB:.1f}" for phase, size in found.plan.peaks.items())
    say(f"settings for {topology.name}: {flags}; {peaks} of {topology.chip.hbm_bytes / GB:.1f} GB")
    return suggest.chosen_settings(found.config)


def _planner(
    config: RunConfig,
    topology: Topology,
    notify: Callable[[str], object] = lambda _: None,
    say: Callable[[str], object] = lambda _: None,
) -> Planner:
    workload = Workload().of_run(config)
    return Planner(topology, workload, trains=True, samples=True, notify=notify, report=lambda _: None, say=say)
