"""Plans a run on a TPU slice that need not be present: memory, link traffic and time. Needs the extra `tpu`.

python launch/plan_tpu.py --config qwen7b --topology v6e:4x8
python launch/plan_tpu.py --config qwen7b --topology v5e:4x4 --what update --rows 1 --model.remat nothing_saveable
python launch/plan_tpu.py --config qwen3b --topology v5e:4x8 --suggest
python launch/plan_tpu.py --config qwen7b --topology v6e:4x8 --what rollout --trajectories FILE

The TPU compiler compiles the programs of the run, so a program that exceeds the memory of a chip fails here as it would
on the chip; then the exit status is 1. Nothing is executed and no weights are allocated. GB are 10^9 bytes. Times are
those of the roofline: every chip runs at its peak rate and never waits.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from memsearcher_jax.agent.registry import WORKFLOWS
from memsearcher_jax.config import RunConfig
from memsearcher_jax.launch import cli, outputs
from memsearcher_jax.logs.trajectories import read_trajectories
from memsearcher_jax.planning import roofline
from memsearcher_jax.planning.roofline import Phase, TpuSlice, Workload
from memsearcher_jax.ranges import CountOrZero

# These load JAX, which reads the environment when it is imported.
if TYPE_CHECKING:
    from memsearcher_jax.planning.tpu_plan import Program, ResidentMemory, Topology
    from memsearcher_jax.runtime.meshes import Meshes

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
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
CARRY_OVER = (0, 1, 2)
"""Values of rl.carry_over whose rollouts are simulated."""


@dataclass(frozen=True)
class PlanTpu(cli.Command):
    """Plan a run on a TPU slice that need not be present: memory, link traffic and time."""

    what: Literal["update", "sample", "rollout", "all"] = "all"
    """Programs to compile: those of training, those of the sampler and the publishing of weights, or all. rollout:
    compile nothing and simulate rollouts with the memory traffic of decoding."""
    topology: Annotated[str, tyro.conf.arg(metavar="NAME")] = "v6e:4x8"
    """The slice, such as v5e:4x8, v5p:2x2x4, v6e:4x8, tpu7x:2x2x2."""
    rows: CountOrZero = 0
    """Rows of a micro-batch per device, or per group of devices that shares rows; 0: as configured."""
    suggest: bool = False
    """Try meshes, remat policies, row lengths and rows per device, fastest first, and plan the first one that fits."""
    hlo: cli.Directory = None
    """Folder for the texts of the compiled programs."""
    workload: Workload = field(default_factory=Workload)
    """Assumed means of a step."""
    trajectories: cli.File = None
    """A trajectory file of a run (RUN/trajectories/step_000012.jsonl.gz): the simulated rollouts have its contexts and
    lengths. Without one they are drawn: any number of contexts with the workload's mean is as likely, and their lengths
    are exponential, cut at four times the mean."""


def main(argv: Sequence[str]) -> None:
    with cli.one_line_errors():
        flags = cli.parse(PlanTpu, argv)
        config = flags.run
        if WORKFLOWS[config.agent.workflow].reads_streams and "initial_policy" in (
            config.answerer.backend,
            config.judge.backend,
        ):
            raise ValueError(
                "a plan does not support frozen answerers and judges: set answerer.backend openai, judge.backend none"
            )
        if flags.trajectories and not flags.trajectories.is_file():
            raise FileNotFoundError(f"--trajectories {flags.trajectories}: no such file")
        if flags.suggest and flags.rows:
            raise ValueError("--suggest chooses the rows: omit --rows")
        os.environ.update(ENVIRONMENT)
        from memsearcher_jax.planning import tpu_plan

        topology = tpu_plan.find_topology(flags.topology)
        if flags.suggest:
            config = suggest_config(flags, topology)
        elif flags.rows:
            config = tpu_plan.with_rows(config, flags.rows, len(topology.devices))
        result = plan_run(config, flags, topology)
    outputs.write_json(flags.json, result)
    if result["reason"]:
        print(f"does not fit: {result['reason']}")
        raise SystemExit(DOES_NOT_FIT)


def plan_run(config: RunConfig, flags: PlanTpu, topology: Topology) -> dict[str, Any]:
    """Prints the plan and returns it for JSON. `reason` says why the run does not fit; `fits` is None if nothing was
    compiled."""
    from memsearcher_jax.planning import tpu_plan
    from memsearcher_jax.training.update import fit_to_mesh

    meshes, limit = topology.meshes(config), topology.tpu_slice.chip.hbm_bytes
    config = replace(config, training=fit_to_mesh(config.training, meshes.train))
    memory = tpu_plan.resident_memory(config, meshes)
    print_settings(config, topology.name, topology.tpu_slice, meshes.train.shape, meshes.local.shape["data"])
    print_memory(memory)
    if flags.what != "rollout":
        print(PROGRAM_HEADER)
    programs, reason = [], ""
    try:
        for program in compile_programs(config, meshes, flags.what, flags.hlo):
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
        "rows_per_device": config.training.minibatch_rows / config.training.grad_accum_steps / len(topology.devices),
        "hbm_bytes": limit,
        "resident": vars(memory) | {"state": memory.state, "training": memory.training, "rollout": memory.rollout},
        "programs": [vars(program) | {"total_bytes": program.total_bytes} for program in programs],
        "fits": not reason if programs or reason else None,
        "reason": reason,
    }
    if reason:
        return result
    phases = estimate_phases(config, flags, meshes, topology.tpu_slice, programs)
    if largest:
        used, free = largest.total_bytes / GB, (limit - largest.total_bytes) / GB
        peaks = ", ".join(f"{phase} {size / GB:.2f}" for phase, size in phase_peaks(programs).items())
        print(
            f"\nfits: the peak is {used:.2f} GB of {limit / GB:.2f}, in {largest.name}; {free:.2f} GB are free\n"
            f"peak GB by phase: {peaks}"
        )
        result["roofline"] = print_estimate(config, flags.workload, topology.tpu_slice, phases)
    if flags.what != "update":
        result["rollouts"] = print_rollouts(config, flags, topology.tpu_slice.hosts, phases)
    return result


def phase_peaks(programs: Sequence[Program]) -> dict[str, int]:
    """Peak bytes of a device in each phase of a step."""
    peaks: dict[str, int] = {}
    for program in programs:
        name = program.name.split(",")[0]
        phase = "rollout" if name in ("decode", "prefill", "copy_pages") else name
        peaks[phase] = max(peaks.get(phase, 0), program.total_bytes)
    return peaks


def compile_programs(config: RunConfig, meshes: Meshes, what: str, hlo: Path | None) -> Iterator[Program]:
    from memsearcher_jax.planning import tpu_plan

    if what in ("update", "all"):
        yield from tpu_plan.training_programs(config, meshes, hlo)
    if what in ("sample", "all"):
        yield from tpu_plan.sampling_programs(config, meshes, hlo)


def estimate_phases(
    config: RunConfig, flags: PlanTpu, meshes: Meshes, tpu_slice: TpuSlice, programs: Sequence[Program]
) -> list[Phase]:
    """The phases of a step that `what` names."""
    # Several prefill programs differ in width: the last one is the widest.
    by_name = {program.name.split(", ")[0]: program for program in programs}
    sent_bytes = {name: program.sent_bytes for name, program in by_name.items()}
    cycles = {name: program.cycles or 0.0 for name, program in by_name.items()}
    for work in (sent_bytes, cycles):
        work["decode"] = work.get("decode", 0.0) / config.sampling.decode_steps_per_call
    phases, axes = [], {axis: meshes.train.shape[axis] for axis in ("tensor", "data")}
    if flags.what != "update":
        phases += roofline.sampling_phases(config, flags.workload, tpu_slice, sent_bytes=sent_bytes, cycles=cycles)
    if flags.what in ("update", "all"):
        phases += roofline.training_phases(config, flags.workload, tpu_slice, sent_bytes=sent_bytes, **axes)
    return phases


def suggest_config(flags: PlanTpu, topology: Topology) -> RunConfig:
    """The config with the fastest candidate that fits. Raises ValueError if none fits."""
    from memsearcher_jax.planning import tpu_plan

    limit, too_large = topology.tpu_slice.chip.hbm_bytes, []
    for candidate in tpu_plan.candidates(flags.run, flags.workload, topology.tpu_slice):
        config = candidate.apply(flags.run)
        meshes = topology.meshes(config)
        memory = tpu_plan.resident_memory(config, meshes)
        min_bytes = max(memory.rollout, memory.training + candidate.rows * tpu_plan.min_row_bytes(config))
        if any(candidate.needs_more_memory_than(other) for other in too_large) or min_bytes > limit:
            continue
        try:
            update = next(tpu_plan.training_programs(config, meshes))
            fits, result = update.total_bytes <= limit, f"needs {update.total_bytes / GB:.2f} GB"
        except tpu_plan.DoesNotFitError as error:
            fits, result = False, str(error)
        verdict = "fits" if fits else "does not fit"
        print(f"{candidate}: {candidate.seconds:.1f} s at the roofline, {verdict}: {result}", flush=True)
        if fits:
            mesh = candidate.mesh
            print(
                f"suggested: --mesh.data {mesh.data} --mesh.fsdp {mesh.fsdp} --mesh.tensor {mesh.tensor} "
                f"--model.remat {candidate.remat} --training.seq_len {candidate.seq_len} "
                f"--training.grad_accum_steps {config.training.grad_accum_steps}\n"
            )
            return config
        too_large.append(candidate)
    raise ValueError(
        f"no mesh, remat policy and rows fit {topology.name}: choose a larger slice or lower sampling.slots"
    )


def print_settings(config: RunConfig, topology: str, tpu_slice: TpuSlice, mesh: dict[str, int], replicas: int) -> None:
    model, training, sampling = config.model, config.training, config.sampling
    shape = " x ".join(f"{name} {size}" for name, size in mesh.items())
    micro_rows = training.minibatch_rows // training.grad_accum_steps
    print(
        f"{topology}: {tpu_slice.chips} chips of {tpu_slice.hosts} hosts, {tpu_slice.devices} devices with "
        f"{tpu_slice.chip.hbm_bytes / GB:.2f} GB each for programs\n"
        f"training: mesh {shape}, remat {model.remat}, mini-batches of {training.minibatch_rows} rows of "
        f"{training.seq_len:,} tokens in {training.grad_accum_steps} micro-batches of {micro_rows}\n"
        f"sampling: {sampling.slots} slots of {sampling.context_tokens:,} tokens per host, "
        f"{replicas} x {sampling.tensor} devices"
    )


def print_memory(memory: ResidentMemory) -> None:
    """Prints the memory of a device that stays allocated during training and during rollouts."""
    print(
        f"resident per device: train state {memory.state / GB:.2f} GB, reference {memory.reference / GB:.2f}"
        f"{' (in host memory between uses)' if memory.offload_reference else ''}, during rollouts sampler weights "
        f"{memory.sampler_params / GB:.2f} and slots {memory.slots / GB:.2f}; "
        f"total {memory.training / GB:.2f} GB, during rollouts {memory.rollout / GB:.2f} GB"
    )


def print_program(program: Program) -> None:
    """Prints a line of the table of programs."""
    p = program
    cycles = "unknown" if p.cycles is None else f"{p.cycles / 1e6:.1f}"
    print(
        f"{p.name:24}{p.argument_bytes / GB:10.2f}{p.temp_bytes / GB:10.2f}{p.peak_bytes / GB:8.2f}"
        f"{p.donated_bytes / GB:9.2f}{p.total_bytes / GB:8.2f}{p.sent_bytes / GB:8.2f}"
        f"{p.flops / 1e12:9.1f}{p.operations:12,.0f}{cycles:>9}{p.compile_seconds:8.0f} s",
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
        flag = " (longer than its memory traffic)" if phase.operations > phase.memory else ""
        print(
            f"{phase.name:24}{phase.compute:10.2f}{phase.memory:10.2f}{phase.links:8.2f}{phase.operations:12.2f}"
            f"{'':>4}{phase.bound}{flag if phase.bound == 'operations' else ''}"
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


def print_rollouts(config: RunConfig, flags: PlanTpu, hosts: int, phases: Sequence[Phase]) -> list[dict[str, Any]]:
    """Simulates a host's rollouts for each of `CARRY_OVER`; prints their means and returns them for JSON."""
    from memsearcher_jax.planning import rollout_tail

    work, rl, slots = flags.workload, config.rl, config.sampling.slots
    if flags.trajectories:
        tokens, source = rollout_tail.sampled_tokens(read_trajectories(flags.trajectories)), str(flags.trajectories)
    else:
        turns, mean = round(2 * work.contexts - 1), work.generated_tokens
        tokens = rollout_tail.drawn_tokens(4_000, max_turns=turns, mean_tokens=mean, max_tokens=int(4 * mean))
        source = f"1 to {turns} contexts"
    decode = sum(phase.seconds for phase in phases if phase.name in ("decode", "draw"))
    token_seconds = decode / roofline.decode_steps(config, work, hosts)
    seconds = rollout_tail.context_seconds(tokens, token_seconds=token_seconds, search_seconds=work.search_seconds)
    print(
        f"\nsimulated rollouts: {rl.prompts_per_step * rl.group_size / hosts:,.0f} trajectories per host and step "
        f"({source}), {slots} slots, {1_000 * token_seconds:.1f} ms per token, {work.search_seconds:g} s per search"
    )
    rows = []
    for bound in CARRY_OVER:
        step = rollout_tail.mean_step(seconds, slots=slots, hosts=hosts, settings=replace(rl, carry_over=bound))
        rows.append({"carry_over": bound, **vars(step)})
        print(
            f"rl.carry_over {bound}: {step.seconds:.1f} s per step, {rows[0]['seconds'] / step.seconds:.2f} times as "
            f"fast as 0, idle slots {step.idle_share:.0%}, sampled again {step.interrupted_share:.0%}"
        )
    return rows


if __name__ == "__main__":
    cli.run(main)
