"""Plans a run on a TPU slice or GPUs that need not be present: memory, link traffic and time.

python launch/plan_tpu.py --config qwen7b --topology v6e:4x8
python launch/plan_tpu.py --config qwen7b --topology v5e:4x4 --what update --model.remat nothing_saveable
python launch/plan_tpu.py --config qwen3b --topology v5e:4x8 --suggest
python launch/plan_tpu.py --config qwen3b --topology h100:8               # one host of eight GPUs; 2x8: two of them

The TPU compiler of the extra `tpu` compiles the programs of the run, so a program that exceeds the memory of a chip
fails here as it would on the chip; then the exit status is 1. Nothing is executed, no weights are allocated, and for
GPUs nothing is compiled. GB are 10^9 bytes. Times are those of the roofline: every chip runs at its peak rate.
"""

from __future__ import annotations

if __name__ == "__main__":
    import memsearcher_jax.launch.__main__  # noqa: F401  (runs `main` below)

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from memsearcher_jax.config import RunConfig, agent_of, differences
from memsearcher_jax.launch import cli, outputs, preconditions
from memsearcher_jax.launch.pod.tpu_slices import find_slice
from memsearcher_jax.logs.progress import announced
from memsearcher_jax.planning import roofline
from memsearcher_jax.planning.roofline import CHIPS, Phase, Topology, Workload
from memsearcher_jax.runs.run_dir import located

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
PROGRAM_ROW = "{:24}{:>8}{:>8}{:>12}{:>9}"
PHASE_ROW = "{:24}{:>10}{:>10}{:>8}{:>12}    {}"


@dataclass(frozen=True)
class PlanTpu(cli.Command):
    """Plan a run on a TPU slice that need not be present: memory, link traffic and time."""

    what: Literal["update", "sample", "all"] = "all"
    """What is compiled and added up: the programs of training, those of the sampler and of publishing, or all."""
    topology: Annotated[str, tyro.conf.arg(metavar="NAME")] = "v6e:4x8"
    """The slice, such as v5e:4x8, v5p:2x2x4, v6e:4x8, tpu7x:2x2x2; or GPUs: h100:8, h200:1, h100:2x8 on two hosts."""
    suggest: bool = False
    """Try remat policies, row lengths, rows per device and tensor parallelism, fastest first, and plan the first that
    fits."""
    workload: Workload = field(default_factory=Workload)
    """Assumed means of a step."""

    def with_settings(self) -> PlanTpu:
        return replace(self, workload=self.workload.of_run(self.run))


def main(argv: Sequence[str]) -> None:
    with cli.one_line_errors():
        flags = cli.parse(PlanTpu, argv)
        config, workload = flags.run.resolved(), flags.workload
        if workload.context_tokens > (longest := config.sampling.context_tokens):
            raise ValueError(f"--workload.context_tokens is more than sampling.context_tokens {longest}: lower it")
        if workload.shared_tokens + workload.generated_tokens > workload.context_tokens:
            raise ValueError("--workload.context_tokens is less than its shared_tokens and generated_tokens: raise it")
        if config.rl.epochs:
            raise ValueError("rl.epochs makes as many steps as the data holds: plan with rl.epochs 0 and rl.steps")
        if agent_of(config).needs_completers and "initial_policy" in (config.answerer.backend, config.judge.backend):
            raise ValueError("frozen answerers and judges are not planned: set their backend to openai or none")
        if flags.topology.partition(":")[0] in CHIPS:
            find_slice(flags.topology)
            preconditions.require_extra("tpu", "libtpu")
            if fault := preconditions.libtpu_fault():
                raise ValueError(fault)
        os.environ.update(ENVIRONMENT)
        with announced() as begin:
            begin("loading the compiler")
            from memsearcher_jax.model import weights
            from memsearcher_jax.planning import tpu_plan
            from memsearcher_jax.rl.probe import probe_files

            if config.model.path and ((folder := located(config.model.path)) / "config.json").is_file():
                weights.check_same_model(folder, config.model, weights.read_config(folder))
            probe_files(config)
            topology = tpu_plan.find_topology(flags.topology)
            result = (plan_fastest if flags.suggest else plan_run)(config, flags, topology, begin)
    outputs.write_json(flags.json, result)
    if not result["fits"]:
        ways = "fewer sampling.slots or sampling.kv_tokens, a larger slice, --suggest, --model.remat nothing_saveable"
        print(f"does not fit: {result['reason']}; try {ways}")
        raise SystemExit(DOES_NOT_FIT)


def plan_fastest(config: RunConfig, flags: PlanTpu, topology: Topology, begin: Callable[[str], None]) -> dict[str, Any]:
    """The plan of the fastest candidate that fits. Raises ValueError if none does."""
    from memsearcher_jax.planning import suggest

    too_large = list[suggest.Candidate]()
    for one in suggest.candidates(config, flags.workload, topology):
        if any(one.config.mesh == other.config.mesh and one.saved_bytes >= other.saved_bytes for other in too_large):
            continue
        words = (f"--{name} {value}" for name, _, value in differences(config, one.config))
        print(f"{' '.join(words)}: {one.seconds:.1f} s at the roofline", flush=True)
        result = plan_run(one.config, flags, topology, begin)
        if result["fits"]:
            return result
        print(f"does not fit: {result['reason']}\n", flush=True)
        too_large.append(one)
    raise ValueError(f"nothing fits {flags.topology}: choose a larger slice or lower sampling.slots")


def plan_run(config: RunConfig, flags: PlanTpu, topology: Topology, begin: Callable[[str], None]) -> dict[str, Any]:
    """Prints the plan of a config and returns it for JSON; `reason` says why the run does not fit.

    Nothing is compiled if a lower bound of its memory does not fit, and nothing after the first program that does not.
    """
    from memsearcher_jax.hosts.meshes import make_meshes
    from memsearcher_jax.planning import suggest, tpu_plan
    from memsearcher_jax.training.update import fit_to_mesh

    meshes, limit = make_meshes(config, topology.devices, topology.host_devices), topology.chip.hbm_bytes
    config = replace(config, training=fit_to_mesh(config.training, meshes.train))
    memory = tpu_plan.resident_memory(config, meshes)
    print_memory(flags.topology, topology, memory)
    programs: list[Program] = []
    sources, peaks = [], dict[str, float]()
    if flags.what != "sample":
        sources.append(tpu_plan.training_programs(config, meshes, begin))
        peaks["update"] = memory.training + suggest.min_saved_bytes(config, len(topology.devices))
    if flags.what != "update":
        sources.append(tpu_plan.sampling_programs(config, meshes, begin))
        peaks["rollout"] = memory.rollout
    reason = excess(peaks, limit, "at least ")
    if topology.chip in CHIPS.values() and not reason:
        print("\nGB per device               peak   total  operations  Mcycles")
        try:
            for program in itertools.chain(*sources):
                work, sizes = program.work, (program.peak_bytes, program.total_bytes)
                counts = (f"{work.operations:,.0f}", f"{work.cycles / 1e6:.1f}") if work else ("?", "?")
                print(PROGRAM_ROW.format(program.name, *(f"{x / GB:.2f}" for x in sizes), *counts), flush=True)
                programs.append(program)
                peaks[program.phase] = max(peaks.get(program.phase, 0), program.total_bytes)
                if reason := excess(peaks, limit):
                    break
        except tpu_plan.DoesNotFitError as error:
            reason = str(error)
    result = {
        "settings": {"remat": config.model.remat, "grad_accum_steps": config.training.grad_accum_steps},
        "resident": asdict(memory),
        "programs": list(map(asdict, programs)),
        "peaks": peaks,
        "fits": not reason,
        "reason": reason,
    }
    if reason:
        return result
    listed = ", ".join(f"{phase} {size / GB:.2f}" for phase, size in peaks.items())
    print(f"\nfits {limit / GB:.2f} GB; the peak of each phase is {'' if programs else 'at least '}{listed}")
    if names := "; ".join(program.name for program in programs if not program.work):
        print(f"the compiler does not write as text: {names}. Their operations are not counted: times may be too low")
    # Several prefill programs differ in width: the last one is the widest.
    work, workload = {one.name.partition(",")[0]: one.work for one in programs if one.work}, flags.workload
    phases = roofline.sampling_phases(config, workload, topology, work) if flags.what != "update" else []
    phases += roofline.training_phases(config, workload, topology) if flags.what != "sample" else []
    return result | {"roofline": print_estimate(config, workload, topology, phases)}


def excess(peaks: Mapping[str, float], limit: float, least: str = "") -> str:
    """Why the phase with the highest peak does not fit; "" if it does."""
    phase, size = max(peaks.items(), key=lambda peak: peak[1])
    needs = f"{phase} needs {least}{size / GB:.2f} GB, including memory that the run keeps"
    return f"{needs}, and programs may use {limit / GB:.2f} GB of a device" if size > limit else ""


def print_memory(name: str, topology: Topology, memory: ResidentMemory) -> None:
    """Prints the devices, and the memory of one that stays allocated."""
    resident = (f"{part.replace('_', ' ')} {size / GB:.2f}" for part, size in asdict(memory).items())
    print(
        f"{name}: {topology.chips} chips of {topology.hosts} hosts, {len(topology.devices)} devices with "
        f"{topology.chip.hbm_bytes / GB:.2f} GB each for programs\n"
        f"GB that stay allocated on a device: {', '.join(resident)}"
    )


def print_estimate(
    config: RunConfig, workload: Workload, topology: Topology, phases: Sequence[Phase]
) -> dict[str, Any]:
    """Prints the time of a step by phase and of the run; returns them for JSON."""
    trajectories = config.rl.prompts_per_step * config.rl.group_size
    contexts, total = trajectories * workload.contexts, sum(phase.seconds for phase in phases)
    seconds = total / workload.efficiency
    hours = seconds * config.rl.steps / 3600
    estimate = {"step_seconds": seconds, "tokens_per_second": contexts * workload.context_tokens / seconds}
    estimate |= {"hours": hours, "chip_hours": hours * topology.chips}
    print(
        f"\nstep: {trajectories:,} trajectories, {contexts:,.0f} contexts of "
        f"{workload.context_tokens:,.0f} tokens ({workload.generated_tokens:,.0f} generated), "
        f"{roofline.rows_per_step(config, workload):,.0f} rows; assumptions, see --workload\n"
        f"{PHASE_ROW.format('seconds at peak rates', *Phase._fields[1:], 'bound by')}"
    )
    for phase in phases:
        limits = ("?" if seconds is None else f"{seconds:.2f}" for seconds in phase[1:])
        print(PHASE_ROW.format(phase.name, *limits, phase.bound))
    print(
        f"total {total:.1f} s; at an assumed {workload.efficiency:.0%} of the roofline {seconds:.1f} s per step, "
        f"{estimate['tokens_per_second']:,.0f} tokens/s, {config.rl.steps} steps in {hours:.1f} hours, "
        f"{estimate['chip_hours']:,.0f} chip-hours"
    )
    times = [phase._asdict() | {"seconds": phase.seconds, "bound": phase.bound} for phase in phases]
    return {"phases": times, **estimate, "workload": asdict(workload)}
