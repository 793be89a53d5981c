"""Says what a run needs of a slice of TPUs that need not be there, and how long it takes; needs the extra `tpu`.

python launch/plan_tpu.py --config qwen7b --topology v6e:4x8
python launch/plan_tpu.py --config qwen7b --topology v5e:4x4 --what update --rows 1 --model.remat full
python launch/plan_tpu.py --config qwen3b --topology v5e:4x8 --suggest

The programs that would run are compiled by the TPU's own compiler, so that one that does not fit a chip fails here as
it would there; then the exit status is 1. Nothing is executed and no weight is made. GB are 10^9 bytes. Times are those
of the roofline: every chip at its full rate, nothing waiting for anything.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import cli
import tyro
from plan_text import GB, Text

from memsearcher_jax.config import RunConfig
from memsearcher_jax.rl import roofline
from memsearcher_jax.rl.roofline import CHIPS, Load, Slice

if TYPE_CHECKING:
    from memsearcher_jax.rl.plan import Meshes, Program

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # there is no TPU machine to ask what it is
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # nothing runs, so that others may use the compiler or a TPU meanwhile
    "TF_CPP_MIN_LOG_LEVEL": "3",  # libtpu misses the variables of a TPU machine, at length
}
DOES_NOT_FIT = 1  # exit status


@dataclass(frozen=True)
class PlanTpu(cli.Command):
    """Say what a run needs of a slice of TPUs that need not be there, and how long it takes."""

    what: Literal["update", "sample", "all"] = "all"
    """Which programs to compile: those of training, those of the sampler with the handing over of weights, or all."""
    topology: Annotated[str, tyro.conf.arg(metavar="NAME")] = "v6e:4x8"
    """The slice, such as v5e:4x8, v5p:2x2x4, v6e:4x8, tpu7x:2x2x2."""
    rows: int = 0
    """Rows of a micro-batch for each device, or group of devices that shares rows; 0: as the settings have it."""
    suggest: bool = False
    """Try meshes, remat policies and rows per device, the quickest first, and plan the best that fits."""
    load: Load = field(default_factory=Load)
    """What a step is assumed to hold."""


def main(argv: Sequence[str]) -> None:
    with cli.one_line_errors():
        flags = cli.parse(PlanTpu, argv)
        cli.refuse_resume(flags, "a plan")
        config = flags.run
        if config.agent.workflow == "memalpha" and "start" in (config.answerer.who, config.judge.who):
            raise ValueError("a plan knows no frozen answerer or judge: set answerer.who endpoint and judge.who nobody")
        os.environ.update(ENVIRONMENT)
        devices, host, where = find_slice(flags.topology)
        if flags.suggest:
            config = suggested(flags, devices, host, where)
        elif flags.rows:
            config = with_rows(config, flags.rows, len(devices))
        result, reason = planned(config, flags, devices, host, where)
    cli.write_json(flags.json, result)
    if reason:
        print(f"does not fit: {reason}")
        raise SystemExit(DOES_NOT_FIT)


def find_slice(topology: str) -> tuple[Sequence[Any], Sequence[Any], Slice]:
    """The devices of a slice, those of one host alone, and what the slice is worth.

    Raises ValueError for one that there is not.
    """
    # JAX takes seconds to load, and reads the environment when it does.
    from jax.experimental import topologies

    def found(name: str) -> Sequence[Any]:
        return topologies.get_topology_desc(name, platform="tpu").devices

    generation, _, shape = topology.partition(":")
    if generation not in CHIPS:
        raise ValueError(f"--topology {topology}: begin it with one of {', '.join(f'{name}:' for name in CHIPS)}")
    try:
        devices = found(topology)
        lengths = tuple(int(length) for length in shape.split("x"))
        # The compiler refuses programs for some of a slice's devices, but the chips of a host are a slice as well.
        first = [device.coords for device in devices if device.process_index == devices[0].process_index]
        own = "x".join(str(len({coords[axis] for coords in first})) for axis in range(len(lengths)))
        host = devices if own == shape else found(f"{generation}:{own}")
    except Exception as error:  # whatever libtpu raises, and its absence
        raise ValueError(f"--topology {topology}: {error}; the compiler is in `pip install libtpu`") from error
    return devices, host, roofline.slice_of(generation, lengths, len(devices), len(devices) // len(host))


def with_rows(config: RunConfig, rows: int, devices: int) -> RunConfig:
    """The config with as many micro-batches as that many rows per device make."""
    from memsearcher_jax.rl.plan import parts

    training, at_once = config.training, rows * parts(config.mesh, devices)
    if training.rows_per_update % at_once:
        raise ValueError(
            f"--rows {rows} makes micro-batches of {at_once} rows, which do not divide training.rows_per_update "
            f"{training.rows_per_update}"
        )
    return replace(config, training=replace(training, accumulate=training.rows_per_update // at_once))


def planned(
    config: RunConfig, flags: PlanTpu, devices: Sequence[Any], host: Sequence[Any], where: Slice
) -> tuple[dict[str, Any], str]:
    """Prints the plan; returns it for JSON, and why it does not fit, which is empty where it does."""
    from memsearcher_jax.rl import plan
    from memsearcher_jax.training.update import on_mesh

    on = plan.meshes(config, devices, host)
    config = replace(config, training=on_mesh(config.training, on.train))
    stays, text = plan.resident(config, on), Text(config, flags.load, where)
    text.setting(flags.topology, dict(on.train.shape), on.local.size // config.sampling.tensor)
    text.stays(stays)
    programs, reason = [], ""
    try:
        for program in compiled(config, on, flags.what):
            text.program(program)
            programs.append(program)
    except plan.DoesNotFit as error:
        reason = str(error)
    most = max(programs, key=lambda program: program.whole, default=None)
    if most and not reason and most.whole > where.chip.hbm_bytes:
        reason = (
            f"{most.name} needs {most.whole / GB:.2f} GB with what stays beside it, "
            f"and programs may use {where.chip.hbm_bytes / GB:.2f} GB of a device"
        )
    result = {
        "topology": flags.topology,
        "mesh": dict(on.train.shape),
        "remat": config.model.remat,
        "accumulate": config.training.accumulate,
        "rows_per_device": config.training.rows_per_update // config.training.accumulate / len(devices),
        "hbm_bytes": where.chip.hbm_bytes,
        "resident": vars(stays) | {"state": stays.state, "all": stays.all},
        "programs": [vars(program) | {"whole": program.whole} for program in programs],
        "fits": not reason,
        "reason": reason,
    }
    if most and not reason:
        text.fits(most)
        result["roofline"] = text.step(phases(config, flags, on, where, programs))
    return result, reason


def compiled(config: RunConfig, on: Meshes, what: str) -> Iterable[Program]:
    from memsearcher_jax.rl import plan

    if what != "sample":
        yield from plan.training_programs(config, on)
    if what != "update":
        yield from plan.sampling_programs(config, on)


def phases(
    config: RunConfig, flags: PlanTpu, on: Meshes, where: Slice, programs: Sequence[Program]
) -> list[roofline.Phase]:
    """A step's phases, of the programs that were compiled."""
    sent = {program.name.split(", ")[0]: program.sent for program in programs}  # of prefill, the widest
    sent["decode"] = sent.get("decode", 0.0) / config.sampling.decode_tokens
    found = []
    if flags.what != "update":
        found += roofline.sampling_phases(config, flags.load, where, sent=sent)
    if flags.what != "sample":
        found += roofline.training_phases(config, flags.load, where, tensor=on.train.shape["tensor"], sent=sent)
    return found


def suggested(flags: PlanTpu, devices: Sequence[Any], host: Sequence[Any], where: Slice) -> RunConfig:
    """The quickest choice that fits, of those that `rl.suggest` has. Raises ValueError if none does."""
    from memsearcher_jax.rl import plan, suggest

    refused: list[suggest.Choice] = []
    for choice in suggest.choices(flags.run, flags.load, where):
        config = choice.applied(flags.run)
        on = plan.meshes(config, devices, host)
        least = plan.resident(config, on).all + choice.rows * suggest.row_bytes(config)
        if any(choice.needs_more_than(other) for other in refused) or least > where.chip.hbm_bytes:
            continue
        try:
            update = next(iter(plan.training_programs(config, on)))
            fits, why = update.whole <= where.chip.hbm_bytes, f"needs {update.whole / GB:.2f} GB"
        except plan.DoesNotFit as error:
            fits, why = False, str(error)
        print(
            f"{choice}: {choice.seconds:.1f} s at the roofline, {'fits' if fits else 'does not fit'}: {why}", flush=True
        )
        if fits:
            print(
                f"suggested: --mesh.data {choice.mesh.data} --mesh.fsdp {choice.mesh.fsdp} "
                f"--mesh.tensor {choice.mesh.tensor} --model.remat {choice.remat} "
                f"--training.accumulate {config.training.accumulate}\n"
            )
            return config
        refused.append(choice)
    raise ValueError(
        f"no mesh, remat policy and rows per device fit {flags.topology}: take a larger slice, or lower sampling.slots"
    )


if __name__ == "__main__":
    cli.run(main)
