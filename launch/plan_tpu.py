"""Compiles a preset's programs for TPUs that need not be there, and says what they need. `pip install libtpu` first.

python launch/plan_tpu.py --what sample --config qwen7b --topology v5e:2x2
python launch/plan_tpu.py --what sample --config qwen7b --topology v6e:2x2 --sampling.slots 128

The real XLA compiler for TPUs runs, so that a program that does not fit a chip fails here as it would there. Nothing
is executed and no weight is made. GB are 10^9 bytes, of one device.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import cli
import tyro

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # there is no TPU machine to ask what it is
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # nothing runs, so that others may use the compiler or a TPU meanwhile
}
PREFIX_TOKENS = 512  # room for what every prompt begins with: in the paper 449 tokens


@dataclass(frozen=True)
class PlanTpu(cli.Command):
    """Compile a preset's programs for TPUs that need not be there, and say what they need."""

    what: Literal["sample"] = "sample"
    """Which programs: those of the sampler, on one host."""
    topology: Annotated[str, tyro.conf.arg(metavar="NAME")] = "v5e:2x2"
    """Devices of one host, such as v5e:2x2, v6e:2x2, v5p:2x2x1."""


@dataclass(frozen=True)
class Need:
    """Memory of one compiled program on one device, in bytes."""

    program: str
    arguments: int
    temporary: int
    peak: int


def main(argv: Sequence[str]) -> None:
    with cli.one_line_errors():
        flags = cli.parse(PlanTpu, argv)
        cli.refuse_resume(flags, "a plan")
        os.environ.update(ENVIRONMENT)
        needs = []
        for need in sampler_needs(flags):
            needs.append(need)
            print(
                f"{need.program:34} arguments {need.arguments / 1e9:6.2f} GB  "
                f"temporary {need.temporary / 1e9:6.3f} GB  peak {need.peak / 1e9:6.2f} GB",
                flush=True,
            )
    result = {"topology": flags.topology, "programs": [vars(need) for need in needs]}
    result |= {"peak": max(need.peak for need in needs), "temporary": max(need.temporary for need in needs)}
    print(f"in all: temporary {result['temporary'] / 1e9:.3f} GB, peak {result['peak'] / 1e9:.2f} GB of one device")
    cli.write_json(flags.json, result)


def sampler_needs(flags: PlanTpu) -> Iterator[Need]:
    """What each of the sampler's large programs needs."""
    # JAX takes seconds to load, and reads the environment when it does.
    import jax
    from jax.experimental import topologies

    from memsearcher_jax.model import sharding
    from memsearcher_jax.model.config import MeshConfig
    from memsearcher_jax.sampling import plan

    try:
        devices = topologies.get_topology_desc(flags.topology, platform="tpu").devices
    except Exception as error:  # whatever libtpu raises, and its absence
        raise ValueError(f"--topology {flags.topology}: {error}; the compiler is in `pip install libtpu`") from error
    settings = flags.run.sampling
    mesh = sharding.make_mesh(MeshConfig(data=-1, fsdp=1, tensor=settings.tensor), devices)
    sharding.check_divides(flags.run.model, dict(mesh.shape))
    try:
        for name, compiled in plan.compiled_programs(flags.run.model, settings, PREFIX_TOKENS, mesh):
            memory = compiled.memory_analysis()
            yield Need(name, memory.argument_size_in_bytes, memory.temp_size_in_bytes, memory.peak_memory_in_bytes)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"it does not compile for {flags.topology}: {str(error).splitlines()[0]}") from error


if __name__ == "__main__":
    cli.run(main)
