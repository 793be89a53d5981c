"""Plans a run on a TPU slice or GPUs that need not be present: memory, link traffic and time.

python launch/plan_tpu.py --config qwen7b --topology v6e:4x8
python launch/plan_tpu.py --config qwen7b --topology v5e:4x4 --what update --model.remat nothing_saveable
python launch/plan_tpu.py --config qwen3b --topology v5e:4x8 --suggest
python launch/plan_tpu.py --config qwen3b --topology h100:8               # one host of eight GPUs; 2x8: two of them

The TPU compiler of the extra `tpu` compiles the programs of the run, so a program that exceeds the memory of a chip
fails here as it would on the chip; then the exit status is 1. Nothing is executed and no weights are allocated. GB are
10^9 bytes. Times are those of the roofline: every chip runs at its peak rate and never waits. For GPUs nothing is
compiled: memory is that of the weights and caches, and a lower bound of what a row saves, by formula.
"""

from __future__ import annotations

if __name__ == "__main__":  # first, so that Ctrl-C ends the command in one line also during the imports below
    from memsearcher_jax.launch.main import run_file

    run_file(__file__)

import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from memsearcher_jax.config import RunConfig, agent_of
from memsearcher_jax.launch import cli, outputs
from memsearcher_jax.launch.activity import announced
from memsearcher_jax.launch.pod.tpu_slices import find_slice
from memsearcher_jax.planning import roofline
from memsearcher_jax.planning.roofline import CHIPS, GPUS, Phase, Topology, Workload

# These load JAX, which reads the environment when it is imported.
if TYPE_CHECKING:
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
    """The slice, such as v5e:4x8, v5p:2x2x4, v6e:4x8, tpu7x:2x2x2; or GPUs: h100:8, h200:1, h100:2x8 on two hosts."""
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
        generation, _, shape = flags.topology.partition(":")
        if generation not in CHIPS | GPUS:
            raise ValueError(f"--topology {flags.topology}: plans are for {', '.join(CHIPS | GPUS)}")
        os.environ.update(ENVIRONMENT)
        if generation in CHIPS:
            find_slice(flags.topology)
        elif re.fullmatch(r"([1-9]\d{0,2}x)?[1-8]", shape):
            os.environ["JAX_NUM_CPU_DEVICES"] = str(math.prod(map(int, shape.split("x"))))
        else:
            raise ValueError(f"--topology {flags.topology}: write GPUS or HOSTSxGPUS, with at most 8 GPUs on a host")
        with announced() as begin:
            begin("loading the compiler")
            from memsearcher_jax.planning import tpu_plan

            topology, training = tpu_plan.find_topology(flags.topology), None
            if flags.suggest:
                config, training = suggested(flags, topology, begin)
            result = plan_run(config, flags, topology, begin, training)
    outputs.write_json(flags.json, result)
    if not result["fits"]:
        ways = "" if flags.suggest else ", --suggest, --model.remat nothing_saveable"
        print(f"does not fit: {result['reason']}; try fewer sampling.slots or sampling.kv_tokens, a larger slice{ways}")
        raise SystemExit(DOES_NOT_FIT)


def plan_run(
    config: RunConfig,
    flags: PlanTpu,
    topology: Topology,
    begin: Callable[[str], None],
    training: Iterable[Program] | None = None,
) -> dict[str, Any]:
    """Prints the plan and returns it for JSON; `reason` says why the run does not fit. `training`: its programs."""
    from memsearcher_jax.planning import suggest, tpu_plan
    from memsearcher_jax.runtime.meshes import make_meshes
    from memsearcher_jax.training.update import fit_to_mesh

    meshes, limit = make_meshes(config, topology.devices, topology.host_devices), topology.chip.hbm_bytes
    config, mesh = replace(config, training=fit_to_mesh(config.training, meshes.train)), dict(meshes.train.shape)
    memory = tpu_plan.resident_memory(config, meshes)
    print_settings(config, flags.topology, topology, mesh, memory)
    if flags.topology.partition(":")[0] in GPUS:
        rows = config.training.minibatch_rows // config.training.grad_accum_steps * mesh["tensor"] / meshes.train.size
        saved = math.ceil(rows) * suggest.min_row_bytes(config)
        needed = max(memory.rollout, memory.training + saved)
        print(f"saved for the backward pass: at least {saved / GB:.2f} GB, of {math.ceil(rows)} rows")
        result = {"topology": flags.topology, "resident": asdict(memory), "row_bytes": saved, "fits": needed <= limit}
        result["reason"] = f"it needs at least {needed / GB:.2f} GB, and a device has {limit / GB:.2f}"
        sent = roofline.fsdp_bytes(config.model, meshes.train.size)
        return result | {"roofline": print_phases(config, flags, topology, mesh, sent, {})}
    print(PROGRAM_HEADER)
    training = training or tpu_plan.training_programs(config, meshes, begin)
    sampling = tpu_plan.sampling_programs(config, meshes, begin) if flags.what != "update" else ()
    programs: list[Program] = []
    peaks, reason = dict[str, int](), ""
    try:
        for program in itertools.chain(training if flags.what != "sample" else (), sampling):
            print_program(program)
            programs.append(program)
            name = program.name.split(",")[0]
            phase = "rollout" if name in ("decode", "prefill", "copy_pages") else name
            peaks[phase] = max(peaks.get(phase, 0), program.total_bytes)
    except tpu_plan.DoesNotFitError as error:
        reason = str(error)
    largest = max(programs, key=lambda program: program.total_bytes, default=None)
    if largest and not reason and largest.total_bytes > limit:
        reason = (
            f"{largest.name} needs {largest.total_bytes / GB:.2f} GB, including memory that the run keeps, "
            f"and programs may use {limit / GB:.2f} GB of a device"
        )
    result = {
        "topology": flags.topology,
        "mesh": mesh,
        "remat": config.model.remat,
        "grad_accum_steps": config.training.grad_accum_steps,
        "hbm_bytes": limit,
        "resident": asdict(memory),
        "programs": list(map(asdict, programs)),
        "fits": not reason,
        "reason": reason,
    }
    if largest and not reason:
        print(
            f"\nfits: the peak is {largest.total_bytes / GB:.2f} GB of {limit / GB:.2f}, in {largest.name}\n"
            f"peak GB by phase: {', '.join(f'{phase} {size / GB:.2f}' for phase, size in peaks.items())}"
        )
        # Several prefill programs differ in width: the last one is the widest.
        by_name = {program.name.split(", ")[0]: program for program in programs}
        sent = {name: program.sent_bytes for name, program in by_name.items()}
        cycles = {name: program.cycles for name, program in by_name.items()}
        result["roofline"] = print_phases(config, flags, topology, mesh, sent, cycles)
    return result


def print_phases(
    config: RunConfig,
    flags: PlanTpu,
    topology: Topology,
    mesh: dict[str, int],
    sent_bytes: dict[str, float],
    cycles: dict[str, float],
) -> dict[str, Any]:
    """Prints the estimate of the phases that --what names, and returns it."""
    phases, work = list[Phase](), (config, flags.workload, topology)
    if flags.what != "update":
        phases += roofline.sampling_phases(*work, sent_bytes=sent_bytes, cycles=cycles)
    if flags.what != "sample":
        phases += roofline.training_phases(*work, tensor=mesh["tensor"], sent_bytes=sent_bytes)
    return print_estimate(*work, phases)


def suggested(flags: PlanTpu, topology: Topology, begin: Callable[[str], None]) -> tuple[RunConfig, Iterator[Program]]:
    """The config of the fastest candidate that fits, and its programs. Raises ValueError if none fits."""
    from memsearcher_jax.planning import suggest, tpu_plan
    from memsearcher_jax.runtime.meshes import make_meshes

    limit, too_large = topology.chip.hbm_bytes, []
    for candidate in suggest.candidates(flags.run, flags.workload, topology):
        meshes = make_meshes(candidate.config, topology.devices, topology.host_devices)
        memory = tpu_plan.resident_memory(candidate.config, meshes)
        least = max(memory.rollout, memory.training + candidate.rows * suggest.min_row_bytes(candidate.config))
        if least > limit or any(candidate.needs_more_memory_than(other) for other in too_large):
            continue
        if flags.topology.partition(":")[0] in GPUS:
            print(f"{candidate}: {candidate.seconds:.1f} s at the roofline, needs at least {least / GB:.2f} GB")
            return candidate.config, iter(())
        programs = tpu_plan.training_programs(candidate.config, meshes, begin)
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
    raise ValueError(f"nothing fits {flags.topology}: choose a larger slice or lower sampling.slots")


def print_settings(
    config: RunConfig, name: str, topology: Topology, mesh: dict[str, int], memory: ResidentMemory
) -> None:
    """Prints how the run is laid out, and the memory of a device that stays allocated."""
    training, sampling = config.training, config.sampling
    micro_rows = training.minibatch_rows // training.grad_accum_steps
    moved = " (in host memory between uses)" if memory.training < memory.state + memory.base + memory.reference else ""
    print(
        f"{name}: {topology.chips} chips of {topology.hosts} hosts, {len(topology.devices)} devices with "
        f"{topology.chip.hbm_bytes / GB:.2f} GB each for programs\n"
        f"training: mesh {' x '.join(f'{axis} {size}' for axis, size in mesh.items())}, remat {config.model.remat}, "
        f"mini-batches of {training.minibatch_rows} rows of {training.seq_len:,} tokens in "
        f"{training.grad_accum_steps} micro-batches of {micro_rows}\n"
        f"sampling: {sampling.slots} slots of {sampling.context_tokens:,} tokens per host, "
        f"weights on {sampling.tensor} devices\n"
        f"resident per device: train state {memory.state / GB:.2f} GB, frozen base {memory.base / GB:.2f}, "
        f"{'teacher' if config.teacher.path else 'reference'} {memory.reference / GB:.2f}{moved}, "
        f"during rollouts sampler weights {memory.sampler_params / GB:.2f} and slots {memory.slots / GB:.2f}; "
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
    config: RunConfig, workload: Workload, topology: Topology, phases: Sequence[Phase]
) -> dict[str, Any]:
    """Prints the time of a step by phase and of the run; returns them for JSON."""
    trajectories = config.rl.prompts_per_step * config.rl.group_size
    estimate = roofline.estimate_run(config, workload, topology, phases)
    print(
        f"\nstep: {trajectories:,} trajectories, {trajectories * workload.contexts:,.0f} contexts of "
        f"{workload.context_tokens:,.0f} tokens ({workload.generated_tokens:,.0f} generated), "
        f"{roofline.rows_per_step(config, workload):,.0f} rows; assumptions, see --workload\n"
        f"{'seconds at peak rates':24}{'compute':>10}{'memory':>10}{'links':>8}{'operations':>12}    bound by"
    )
    for one in phases:
        print(
            f"{one.name:24}{one.compute:10.2f}{one.memory:10.2f}{one.links:8.2f}{one.operations:12.2f}    {one.bound}"
        )
    longest = max(phases, key=lambda phase: phase.seconds)
    print(
        f"total {sum(phase.seconds for phase in phases):.1f} s; longest: {longest.name}, bound by {longest.bound}\n"
        f"at an assumed {workload.efficiency:.0%} of the roofline: {estimate['step_seconds']:.1f} s per step, "
        f"{estimate['tokens_per_second']:,.0f} tokens/s, {config.rl.steps} steps in {estimate['hours']:.1f} hours, "
        f"{estimate['chip_hours']:,.0f} chip-hours"
    )
    times = [phase._asdict() | {"seconds": phase.seconds, "bound": phase.bound} for phase in phases]
    return {"phases": times, **estimate, "workload": asdict(workload)}
