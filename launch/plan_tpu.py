"""Plans a run on a TPU slice that need not be present: memory, link traffic and time. Needs the extra `tpu`.

python launch/plan_tpu.py --config qwen7b --topology v6e:4x8
python launch/plan_tpu.py --config qwen7b --topology v5e:4x4 --what update --rows 1 --model.remat nothing_saveable
python launch/plan_tpu.py --config qwen3b --topology v5e:4x8 --suggest

The TPU compiler compiles the programs of the run, so a program that exceeds the memory of a chip fails here as it would
on the chip; then the exit status is 1. Nothing is executed and no weights are allocated. GB are 10^9 bytes. Times are
those of the roofline: every chip runs at its peak rate and never waits.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from memsearcher_jax.config import RunConfig, agent_of
from memsearcher_jax.launch import cli, outputs
from memsearcher_jax.launch.pod.tpu_slices import find_slice
from memsearcher_jax.planning import roofline
from memsearcher_jax.planning.roofline import CHIPS, Phase, TpuSlice, Workload
from memsearcher_jax.ranges import CountOrZero

# These load JAX, which reads the environment when it is imported.
if TYPE_CHECKING:
    from memsearcher_jax.planning.tpu_plan import Program, ResidentMemory, Topology

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
PROGRAM_HEADER = (
    f"\n{'GB per device':24}{'arguments':>10}{'temporary':>10}{'peak':>8}{'donated':>9}{'total':>8}"
    f"{'sent':>8}{'TFLOP':>9}{'operations':>12}{'Mcycles':>9}{'compiled':>10}"
)


@dataclass(frozen=True)
class PlanTpu(cli.Command):
    """Plan a run on a TPU slice that need not be present: memory, link traffic and time."""

    what: Literal["update", "sample", "all"] = "all"
    """Programs to compile: those of training, those of the sampler and the publishing of weights, or all."""
    topology: Annotated[str, tyro.conf.arg(metavar="NAME")] = "v6e:4x8"
    """The slice, such as v5e:4x8, v5p:2x2x4, v6e:4x8, tpu7x:2x2x2."""
    rows: CountOrZero = 0
    """Rows of a micro-batch per device, or per group of devices that shares rows; 0: as configured."""
    suggest: bool = False
    """Try remat policies, row lengths, rows per device and tensor parallelism, fastest first, and plan the first that
    fits."""
    workload: Workload = field(default_factory=Workload)
    """Assumed means of a step."""


def main(argv: Sequence[str]) -> None:
    with cli.one_line_errors():
        flags = cli.parse(PlanTpu, argv)
        config = flags.run
        if agent_of(config).needs_completers and "initial_policy" in (config.answerer.backend, config.judge.backend):
            raise ValueError(
                "a plan does not support frozen answerers and judges: set answerer.backend openai, judge.backend none"
            )
        if flags.suggest and flags.rows:
            raise ValueError("--suggest chooses the rows: omit --rows")
        find_slice(flags.topology)
        if flags.topology.partition(":")[0] not in CHIPS:
            raise ValueError(f"--topology {flags.topology}: plans are for {', '.join(CHIPS)}")
        os.environ.update(ENVIRONMENT)
        from memsearcher_jax.planning import tpu_plan

        topology, training = tpu_plan.find_topology(flags.topology), None
        if flags.suggest:
            config, training = suggested(flags, topology)
        elif flags.rows:
            config = tpu_plan.with_rows(config, flags.rows, len(topology.devices))
        result = plan_run(config, flags, topology, training)
    outputs.write_json(flags.json, result)
    if not result["fits"]:
        ways = "" if flags.suggest else ", --suggest, --model.remat nothing_saveable"
        print(f"does not fit: {result['reason']}; try fewer sampling.slots or sampling.kv_tokens, a larger slice{ways}")
        raise SystemExit(DOES_NOT_FIT)


def plan_run(
    config: RunConfig, flags: PlanTpu, topology: Topology, training: Iterable[Program] | None = None
) -> dict[str, Any]:
    """Prints the plan and returns it for JSON; `reason` says why the run does not fit. `training`: its programs."""
    from memsearcher_jax.planning import tpu_plan
    from memsearcher_jax.training.update import fit_to_mesh

    tpu_slice, meshes = topology.tpu_slice, topology.meshes(config)
    config, limit = replace(config, training=fit_to_mesh(config.training, meshes.train)), tpu_slice.chip.hbm_bytes
    memory = tpu_plan.resident_memory(config, meshes)
    print_settings(config, topology.name, tpu_slice, meshes.train.shape)
    print_memory(memory)
    print(PROGRAM_HEADER)
    training = training or tpu_plan.training_programs(config, meshes)
    sampling = tpu_plan.sampling_programs(config, meshes) if flags.what != "update" else ()
    programs: list[Program] = []
    reason = ""
    try:
        for program in itertools.chain(training if flags.what != "sample" else (), sampling):
            print_program(program)
            programs.append(program)
    except tpu_plan.DoesNotFitError as error:
        reason = str(error)
    largest = max(programs, key=lambda program: program.total_bytes, default=None)
    if largest and not reason and largest.total_bytes > limit:
        reason = (
            f"{largest.name} needs {largest.total_bytes / GB:.2f} GB, including memory that the run keeps, "
            f"and programs may use {limit / GB:.2f} GB of a device"
        )
    result = {
        "topology": topology.name,
        "mesh": dict(meshes.train.shape),
        "remat": config.model.remat,
        "grad_accum_steps": config.training.grad_accum_steps,
        "hbm_bytes": limit,
        "resident": vars(memory) | {"state": memory.state, "training": memory.training, "rollout": memory.rollout},
        "programs": list(map(vars, programs)),
        "fits": not reason,
        "reason": reason,
    }
    if not reason and largest:
        peaks = ", ".join(f"{phase} {size / GB:.2f}" for phase, size in phase_peaks(programs).items())
        print(
            f"\nfits: the peak is {largest.total_bytes / GB:.2f} GB of {limit / GB:.2f}, in {largest.name}\n"
            f"peak GB by phase: {peaks}"
        )
        phases = estimated_phases(config, flags, meshes.train.shape, tpu_slice, programs)
        result["roofline"] = print_estimate(config, flags.workload, tpu_slice, phases)
    return result


def phase_peaks(programs: Sequence[Program]) -> dict[str, int]:
    """Peak bytes of a device in each phase of a step."""
    peaks: dict[str, int] = {}
    for program in programs:
        name = program.name.split(",")[0]
        phase = "rollout" if name in ("decode", "prefill", "copy_pages") else name
        peaks[phase] = max(peaks.get(phase, 0), program.total_bytes)
    return peaks


def estimated_phases(
    config: RunConfig, flags: PlanTpu, mesh: dict[str, int], tpu_slice: TpuSlice, programs: Sequence[Program]
) -> list[Phase]:
    """The phases of a step that `what` names."""
    # Several prefill programs differ in width: the last one is the widest.
    by_name = {program.name.split(", ")[0]: program for program in programs}
    work = {"sent_bytes": {name: program.sent_bytes for name, program in by_name.items()}}
    phases = []
    if flags.what != "update":
        cycles = {name: program.cycles for name, program in by_name.items()}
        phases += roofline.sampling_phases(config, flags.workload, tpu_slice, cycles=cycles, **work)
    if flags.what != "sample":
        phases += roofline.training_phases(config, flags.workload, tpu_slice, tensor=mesh["tensor"], **work)
    return phases


def suggested(flags: PlanTpu, topology: Topology) -> tuple[RunConfig, Iterator[Program]]:
    """The config of the fastest candidate that fits, and its programs. Raises ValueError if none fits."""
    from memsearcher_jax.planning import suggest, tpu_plan

    limit, too_large = topology.tpu_slice.chip.hbm_bytes, []
    for candidate in suggest.candidates(flags.run, flags.workload, topology.tpu_slice):
        meshes = topology.meshes(candidate.config)
        memory = tpu_plan.resident_memory(candidate.config, meshes)
        least = max(memory.rollout, memory.training + candidate.rows * suggest.min_row_bytes(candidate.config))
        if least > limit or any(candidate.needs_more_memory_than(other) for other in too_large):
            continue
        programs = tpu_plan.training_programs(candidate.config, meshes)
        try:
            update = next(programs)
            fits, verdict = update.total_bytes <= limit, f"needs {update.total_bytes / GB:.2f} GB"
        except tpu_plan.DoesNotFitError as error:
            fits, verdict = False, str(error)
        verdict = f"{'fits' if fits else 'does not fit'}, {verdict}"
        print(f"{candidate}: {candidate.seconds:.1f} s at the roofline, {verdict}", flush=True)
        if fits:
            return candidate.config, itertools.chain([update], programs)
        too_large.append(candidate)
    raise ValueError(f"nothing fits {topology.name}: choose a larger slice or lower sampling.slots")


def print_settings(config: RunConfig, topology: str, tpu_slice: TpuSlice, mesh: dict[str, int]) -> None:
    training, sampling = config.training, config.sampling
    shape = " x ".join(f"{name} {size}" for name, size in mesh.items())
    micro_rows = training.minibatch_rows // training.grad_accum_steps
    print(
        f"{topology}: {tpu_slice.chips} chips of {tpu_slice.hosts} hosts, {tpu_slice.devices} devices with "
        f"{tpu_slice.chip.hbm_bytes / GB:.2f} GB each for programs\n"
        f"training: mesh {shape}, remat {config.model.remat}, mini-batches of {training.minibatch_rows} rows of "
        f"{training.seq_len:,} tokens in {training.grad_accum_steps} micro-batches of {micro_rows}\n"
        f"sampling: {sampling.slots} slots of {sampling.context_tokens:,} tokens per host, "
        f"weights on {sampling.tensor} devices"
    )


def print_memory(memory: ResidentMemory) -> None:
    """Prints the memory of a device that stays allocated during training and during rollouts."""
    print(
        f"resident per device: train state {memory.state / GB:.2f} GB, reference {memory.reference / GB:.2f}"
        f"{' (in host memory between uses)' if memory.offload_reference else ''}, during rollouts sampler weights "
        f"{memory.sampler_params / GB:.2f} and slots {memory.slots / GB:.2f}; "
        f"total {memory.training / GB:.2f} GB, during rollouts {memory.rollout / GB:.2f} GB"
    )


def print_program(p: Program) -> None:
    """Prints a line of the table of programs."""
    print(
        f"{p.name:24}{p.argument_bytes / GB:10.2f}{p.temp_bytes / GB:10.2f}{p.peak_bytes / GB:8.2f}"
        f"{p.donated_bytes / GB:9.2f}{p.total_bytes / GB:8.2f}{p.sent_bytes / GB:8.2f}{p.flops / 1e12:9.1f}"
        f"{p.operations:12,.0f}{f'{p.cycles / 1e6:.1f}' if p.cycles else '?':>9}{p.compile_seconds:8.0f} s",
        flush=True,
    )


def print_estimate(
    config: RunConfig, workload: Workload, tpu_slice: TpuSlice, phases: Sequence[Phase]
) -> dict[str, Any]:
    """Prints the time of a step by phase and of the run; returns them for JSON."""
    trajectories = config.rl.prompts_per_step * config.rl.group_size
    estimate = roofline.estimate_run(config, workload, tpu_slice, phases)
    print(
        f"\nstep: {trajectories:,} trajectories, {trajectories * workload.contexts:,.0f} contexts of "
        f"{workload.context_tokens:,.0f} tokens ({workload.generated_tokens:,.0f} generated), "
        f"{roofline.rows_per_step(config, workload):,.0f} rows; assumptions, see --workload\n"
        f"{'seconds at peak rates':24}{'compute':>10}{'memory':>10}{'links':>8}{'operations':>12}{'':>4}bound by"
    )
    for phase in phases:
        print(
            f"{phase.name:24}{phase.compute:10.2f}{phase.memory:10.2f}{phase.links:8.2f}{phase.operations:12.2f}"
            f"{'':>4}{phase.bound}"
        )
    longest = max(phases, key=lambda phase: phase.seconds)
    print(
        f"total {sum(phase.seconds for phase in phases):.1f} s; longest: {longest.name}, bound by {longest.bound}\n"
        f"at an assumed {workload.efficiency:.0%} of the roofline: {estimate['step_seconds']:.1f} s per step, "
        f"{estimate['tokens_per_second']:,.0f} tokens/s, {config.rl.steps} steps in {estimate['hours']:.1f} hours, "
        f"{estimate['chip_hours']:,.0f} chip-hours"
    )
    return {
        "phases": [vars(phase) | {"seconds": phase.seconds, "bound": phase.bound} for phase in phases],
        **estimate,
        "workload": vars(workload),
    }


if __name__ == "__main__":
    cli.run(main)
