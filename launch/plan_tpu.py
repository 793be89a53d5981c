"""Plans a run on a TPU slice or GPUs that need not be present: memory, link traffic and time.

python launch/plan_tpu.py --config qwen7b --topology v6e:4x8
python launch/plan_tpu.py --config qwen7b --topology v5e:4x4 --what update --model.remat nothing_saveable
python launch/plan_tpu.py --config qwen3b --topology v5e:2x4 --suggest
python launch/plan_tpu.py --config qwen3b --topology h100:8               # one host of eight GPUs; 2x8: two of them

The TPU compiler of the extra `tpu` compiles the programs of the run, so a program that exceeds the memory of a chip
fails here as it would on the chip; then the exit status is 1. Nothing is executed, no weights are allocated, and for
GPUs nothing is compiled. GB are 10^9 bytes. Times are those of the roofline: every chip runs at its peak rate.
"""

from __future__ import annotations

if __name__ == "__main__":
    import memsearcher_jax.launch.__main__  # noqa: F401  (runs `main` below)

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import tyro

from memsearcher_jax.config import RunConfig
from memsearcher_jax.launch import cli, outputs, preconditions
from memsearcher_jax.launch.pod.tpu_slices import find_slice
from memsearcher_jax.logs.progress import announced
from memsearcher_jax.planning import roofline
from memsearcher_jax.planning.host import HostSpace, HostTime, host_space, host_time
from memsearcher_jax.planning.roofline import CHIPS, Phase, Topology, Workload
from memsearcher_jax.ranges import Count
from memsearcher_jax.runs.run_dir import located

# These load JAX, which reads the environment when it is imported.
if TYPE_CHECKING:
    from memsearcher_jax.planning.planner import MemoryPlan, Planner
    from memsearcher_jax.planning.tpu_plan import Program, ResidentMemory

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_COMPILATION_CACHE": "false",  # what is compiled for absent devices cannot be read back
    "TPU_SKIP_MDS_QUERY": "1",  # do not query the metadata server of a TPU VM
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # nothing runs, so other processes may use libtpu meanwhile
    # libtpu prints errors without these variables of a TPU VM; the planned slice does not depend on them
    "TPU_ACCELERATOR_TYPE": "v6e-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
DOES_NOT_FIT = 1  # exit status
GB = 1e9
PROGRAM_ROW = "{:24}{:>8}{:>8}{:>12}{:>9}"
PHASE_COLUMNS = ("compute", "memory", "links", "operations", "host")
PHASE_ROW = "{:24}{:>10}{:>10}{:>8}{:>12}{:>8}    {}"


@dataclass(frozen=True)
class PlanTpu(cli.Command):
    """Plan a run on a TPU slice that need not be present: memory, link traffic and time."""

    needs_weights: ClassVar[bool] = False

    what: Literal["update", "sample", "all"] = "all"
    """What is planned: training alone, a host that only samples (an evaluation, a service), or a run."""
    topology: Annotated[str, tyro.conf.arg(metavar="NAME")] = "v6e:4x8"
    """The slice, such as v5e:4x8, v5p:2x2x4, v6e:4x8, tpu7x:2x2x2; or GPUs: h100:8, h200:1, h100:2x8 on two hosts."""
    slices: Count = 1
    """Slices of this topology, which exchange gradients over the data-centre network."""
    suggest: bool = False
    """Choose settings for the slice: remat policy, row length, rows per device, tensor parallelism, and the sampler's
    slots, cache and copies of the weights. The fastest that fit are planned."""
    bounds: bool = False
    """Compile nothing, which takes seconds: plan the settings with the least memory, by lower bounds."""
    workload: Workload = field(default_factory=Workload)
    """Assumed means of a step."""

    def with_settings(self) -> PlanTpu:
        return replace(self, workload=self.workload.of_run(self.run))


def main(argv: Sequence[str]) -> None:
    with cli.one_line_errors():
        flags = cli.parse(PlanTpu, argv)
        config = flags.run.resolved()
        check_plannable(config, flags.workload)
        if flags.topology.partition(":")[0] in CHIPS:
            find_slice(flags.topology)
            preconditions.require_extra("tpu", "libtpu")
            if fault := preconditions.libtpu_fault():
                raise ValueError(fault)
        os.environ.update(ENVIRONMENT)
        with announced() as begin:
            begin("loading the compiler")
            from memsearcher_jax.model import weights
            from memsearcher_jax.ops.kernel_errors import KernelError
            from memsearcher_jax.planning import tpu_plan
            from memsearcher_jax.planning.planner import Planner
            from memsearcher_jax.rl.probe import probe_files

            folder = located(config.model.path)
            if config.model.path and (folder / "config.json").is_file():
                weights.check_same_model(folder, config.model, weights.read_config(folder))
            probe_files(config)
            planner = Planner(
                tpu_plan.find_topology(flags.topology, flags.slices),
                flags.workload,
                trains=flags.what != "sample",
                samples=flags.what != "update",
                notify=begin,
                report=print_program,
                say=print,
            )
            try:
                if flags.bounds:
                    result = plan_bounds(config, flags, planner)
                elif flags.suggest:
                    result = plan_fastest(config, flags, planner)
                else:
                    result = plan_run(config, flags, planner)
            except (KernelError, tpu_plan.CompilerError) as error:
                raise ValueError(str(error)) from error
    outputs.write_json(flags.json, result)
    if not result["fits"]:
        print(f"does not fit: {result['reason']}; try {planner.ways_out(config)}")
        raise SystemExit(DOES_NOT_FIT)


def check_plannable(config: RunConfig, workload: Workload) -> None:
    """Raises ValueError for a step that the run cannot have, and for runs that are not planned."""
    longest = config.sampling.context_tokens
    if workload.context_tokens > longest:
        raise ValueError(f"--workload.context_tokens is more than sampling.context_tokens {longest}: lower it")
    if workload.shared_tokens + workload.generated_tokens > workload.context_tokens:
        raise ValueError("--workload.context_tokens is less than its shared_tokens and generated_tokens: raise it")
    if config.rl.epochs:
        raise ValueError("rl.epochs makes as many steps as the data holds: plan with rl.epochs 0 and rl.steps")
    preconditions.require_planned_completers(config)


def plan_run(config: RunConfig, flags: PlanTpu, planner: Planner) -> dict[str, Any]:
    """Prints the plan of a config and returns it for JSON; `reason` says why the run does not fit."""
    print_memory(planner.topology, planner.memory(config))
    print_header(planner)
    return finish(config, flags, planner, planner.plan(config))


def plan_fastest(config: RunConfig, flags: PlanTpu, planner: Planner) -> dict[str, Any]:
    """The same of the fastest settings that fit. Raises ValueError if none do."""
    from memsearcher_jax.planning.suggest import flags_between

    def announce(base: RunConfig, tried: RunConfig) -> None:
        print(f"\ntrying {flags_between(base, tried) or 'the settings as they are'}", flush=True)

    print_header(planner)
    found = planner.fastest(config, announce)
    print()
    print_memory(planner.topology, planner.memory(found.config))
    words = flags_between(config, found.config)
    print(f"\nsettings for this slice: {words or 'those of the preset'}")
    return finish(found.config, flags, planner, found.plan) | {"flags": words}


def plan_bounds(config: RunConfig, flags: PlanTpu, planner: Planner) -> dict[str, Any]:
    """The same of the settings with the least memory, without compiling. Raises ValueError if none fit."""
    from memsearcher_jax.planning.suggest import flags_between

    chosen = planner.smallest(config)
    print_memory(planner.topology, planner.memory(chosen))
    words = flags_between(config, chosen)
    print(f"\nsettings with the least memory: {words or 'those of the preset'}")
    return finish(chosen, flags, planner, planner.least(chosen)) | {"flags": words}


def finish(config: RunConfig, flags: PlanTpu, planner: Planner, plan: MemoryPlan) -> dict[str, Any]:
    """Prints whether a plan fits, what it needs of hosts, and the time of a step; returns it for JSON."""
    from memsearcher_jax.planning.tpu_plan import count_weights

    config = planner.fitted(config)
    memory = planner.memory(config)
    topology = planner.topology
    workload = flags.workload
    result = {
        "settings": {"remat": config.model.remat, "grad_accum_steps": config.training.grad_accum_steps},
        "resident": asdict(memory),
        "programs": list(map(asdict, plan.programs)),
        "peaks": plan.peaks,
        "fits": not plan.reason,
        "reason": plan.reason,
    }
    if plan.reason:
        return result
    print_fit(planner, plan)
    if topology.slices > 1:
        print("mesh.data crosses the data-centre network: slices exchange the sums of their gradients once per update")
    space = host_space(config, workload, topology, memory, count_weights(config.model))
    print_space(topology, space)
    # Several prefill programs differ in width: the last one is the widest.
    work = {program.name.partition(",")[0]: program.work for program in plan.programs if program.work}
    sampling = roofline.sampling_phases(config, workload, topology, work) if planner.samples else []
    training = roofline.training_phases(config, workload, topology) if planner.trains else []
    if not planner.trains:
        sampling = [phase for phase in sampling if phase.name != "publish"]
    time = host_time(config, workload, topology) if planner.samples and planner.trains else None
    return result | {
        "host": asdict(space) | {"excess": space.excess},
        "roofline": print_estimate(config, workload, topology, sampling, training, time),
    }


def print_header(planner: Planner) -> None:
    if planner.compiles:
        print("\nGB per device               peak   total  operations  Mcycles", flush=True)


def print_program(program: Program) -> None:
    """Prints the memory of a program, and its operations where the compiler writes it as text."""
    sizes = (f"{size / GB:.2f}" for size in (program.peak_bytes, program.total_bytes))
    counts = ("?", "?")
    if program.work:
        counts = (f"{program.work.operations:,.0f}", f"{program.work.cycles / 1e6:.1f}")
    print(PROGRAM_ROW.format(program.name, *sizes, *counts), flush=True)


def print_fit(planner: Planner, plan: MemoryPlan) -> None:
    """Prints the peak of each phase of a plan that fits."""
    listed = ", ".join(f"{phase} {size / GB:.2f}" for phase, size in plan.peaks.items())
    at_least = "" if plan.programs else "at least "
    print(f"\nfits {planner.topology.chip.hbm_bytes / GB:.2f} GB; the peak of each phase is {at_least}{listed}")
    if names := "; ".join(program.name for program in plan.programs if not program.work):
        print(f"the compiler does not write as text: {names}. Their operations are not counted: times may be too low")


def print_space(topology: Topology, space: HostSpace) -> None:
    """Prints memory and disk of a host, and what exceeds them."""

    def listed(sizes: dict[str, float], limit: float | None) -> str:
        parts = ", ".join(f"{name} {size / GB:.1f}" for name, size in sizes.items() if size)
        of_limit = f" of {limit / GB:,.0f}" if limit else ""
        return f"{sum(sizes.values()) / GB:.1f}{of_limit} ({parts or 'nothing large'})"

    print(
        f"GB of a host with {topology.host_chips} chips: memory {listed(space.memory, space.memory_limit)}, "
        f"disk {listed(space.disk, space.disk_limit)}"
    )
    for line in space.excess:
        print(line)


def print_memory(topology: Topology, memory: ResidentMemory) -> None:
    """Prints the devices, and the memory of one that stays allocated."""
    resident = (f"{part.replace('_', ' ')} {size / GB:.2f}" for part, size in asdict(memory).items())
    slices = f"{topology.slices} slices {topology.name}" if topology.slices > 1 else topology.name
    print(
        f"{slices}: {topology.chips} chips of {topology.hosts} hosts, {len(topology.devices)} devices with "
        f"{topology.chip.hbm_bytes / GB:.2f} GB each for programs\n"
        f"GB that stay allocated on a device: {', '.join(resident)}"
    )


def print_estimate(
    config: RunConfig,
    workload: Workload,
    topology: Topology,
    sampling: Sequence[Phase],
    training: Sequence[Phase],
    host: HostTime | None,
) -> dict[str, Any]:
    """Prints the time of a step by phase and of the run; returns them for JSON."""
    trajectories = config.rl.prompts_per_step * config.rl.group_size
    contexts = trajectories * workload.contexts
    phases = [*sampling, *training]
    device_seconds = sum(phase.seconds for phase in phases)
    rollout_seconds = sum(phase.seconds for phase in sampling)
    seconds = device_seconds / workload.efficiency
    if host:
        phases.insert(len(sampling), Phase("host", host=host.waited(rollout_seconds)))
        seconds += host.waited(rollout_seconds / workload.efficiency)
    total = sum(phase.seconds for phase in phases)
    hours = seconds * config.rl.steps / 3600
    estimate = {"step_seconds": seconds, "tokens_per_second": contexts * workload.context_tokens / seconds}
    estimate |= {"hours": hours, "chip_hours": hours * topology.chips}
    print(
        f"\nstep: {trajectories:,} trajectories, {contexts:,.0f} contexts of "
        f"{workload.context_tokens:,.0f} tokens ({workload.generated_tokens:,.0f} generated), "
        f"{roofline.rows_per_step(config, workload):,.0f} rows; assumptions, see --workload\n"
        f"{PHASE_ROW.format('seconds at peak rates', *PHASE_COLUMNS, 'bound by')}"
    )
    for phase in phases:
        limits = (f"{phase.limits[name]:.2f}" if name in phase.limits else "?" for name in PHASE_COLUMNS)
        print(PHASE_ROW.format(phase.name, *limits, phase.bound))
    if host:
        print(
            f"host: {host.rollout:.2f} s of rollouts, {host.hidden(rollout_seconds):.2f} of them hidden behind the "
            f"devices; {host.between:.2f} s before the update, which nothing hides"
        )
    if config.agent.harness:
        print("host: what the harness does between its requests is not counted, see benchmarks/host.py --harness")
    print(
        f"total {total:.1f} s; with devices at an assumed {workload.efficiency:.0%} of the roofline {seconds:.1f} s "
        f"per step, {estimate['tokens_per_second']:,.0f} tokens/s, {config.rl.steps} steps in {hours:.1f} hours, "
        f"{estimate['chip_hours']:,.0f} chip-hours"
    )
    times = [asdict(phase) | {"seconds": phase.seconds, "bound": phase.bound} for phase in phases]
    return {"phases": times, **estimate, "workload": asdict(workload)}
