"""The TPU slices that Google Cloud offers, each named GENERATION:TOPOLOGY, and the programs that request them.

Sources: node labels, machines, topologies and hosts from cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus;
accelerator types and what their number counts from cloud.google.com/tpu/docs (the pages v4, v5e, v5p, v6e). Compared
with AI-Hypercomputer/xpk, src/xpk/core/system_characteristics.py, whose 2x4 of v5e and v6e is two hosts of 4 chips:
here that is 2x4-4t, and 2x4 is the one host of 8 that a TPU VM of that type is.
"""

from __future__ import annotations

import math
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

PLANES = "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16"
CUBES = "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x4x12 4x8x8 8x8x8 8x8x12 8x8x16 8x16x16"
HOST_CHIPS = {"1x1": 1, "1x1x1": 1, "2x4": 8}  # of one host; others have 4
TWO_HOSTS = "-4t"  # after a topology: on machines of four chips, so that 2x4 is two hosts; only GKE has it


@dataclass(frozen=True)
class CloudSlice:
    """One slice, as GKE and as the TPU API name it."""

    topology: str  # such as 4x8
    gke_accelerator: str  # node label
    machine: str
    hosts: int
    chips_per_host: int
    devices: int  # of JAX
    accelerator_type: str  # of TPU VMs, such as v6e-32; "" if only GKE has it
    runtime_version: str  # software of TPU VMs


@dataclass(frozen=True)
class Generation:
    """What the slices of one generation share."""

    gke_accelerator: str
    machine: str  # without the number of its chips
    devices_per_chip: int = 1  # of JAX
    accelerator_type: str = ""  # without its number
    counted_cores: int = 1  # of a chip, in the number of an accelerator type
    runtime_version: str = ""


V4 = Generation(
    "tpu-v4-podslice",
    "ct4p-hightpu",
    accelerator_type="v4",
    counted_cores=2,
    runtime_version="tpu-ubuntu2204-base",
)
V5E = Generation(
    "tpu-v5-lite-podslice",
    "ct5lp-hightpu",
    accelerator_type="v5litepod",
    runtime_version="v2-alpha-tpuv5-lite",
)
V5P = Generation(
    "tpu-v5p-slice",
    "ct5p-hightpu",
    accelerator_type="v5p",
    counted_cores=2,
    runtime_version="v2-alpha-tpuv5",
)
V6E = Generation(
    "tpu-v6e-slice",
    "ct6e-standard",
    accelerator_type="v6e",
    runtime_version="v2-alpha-tpuv6e",
)
TPU7X = Generation("tpu7x", "tpu7x-standard", devices_per_chip=2)


def _slices(name: str, generation: Generation, topologies: str) -> dict[str, CloudSlice]:
    """The slices of a generation by their names."""
    slices = {}
    for words in topologies.split():
        topology = words.removesuffix(TWO_HOSTS)
        chips = math.prod(map(int, topology.split("x")))
        chips_per_host = HOST_CHIPS.get(words, 4)
        has_type = generation.accelerator_type and words == topology
        slices[f"{name}:{words}"] = CloudSlice(
            topology=topology,
            gke_accelerator=generation.gke_accelerator,
            machine=f"{generation.machine}-{chips_per_host}t",
            hosts=chips // chips_per_host,
            chips_per_host=chips_per_host,
            devices=chips * generation.devices_per_chip,
            accelerator_type=f"{generation.accelerator_type}-{chips * generation.counted_cores}" if has_type else "",
            runtime_version=generation.runtime_version if has_type else "",
        )
    return slices


SLICES = {
    **_slices("v4", V4, CUBES),
    **_slices("v5e", V5E, f"{PLANES} 2x4{TWO_HOSTS}"),
    **_slices("v5p", V5P, CUBES),
    **_slices("v6e", V6E, f"{PLANES} 2x4{TWO_HOSTS}"),
    **_slices("tpu7x", TPU7X, f"1x1x1 {CUBES}"),
}


def find_slice(name: str) -> CloudSlice:
    """Raises ValueError that lists the known slices, of this generation if there is such a one."""
    if name not in SLICES:
        generation = name.partition(":")[0]
        of_generation = [known for known in SLICES if known.startswith(f"{generation}:")]
        raise ValueError(f"--topology {name} is none of {', '.join(of_generation or SLICES)}")
    return SLICES[name]


def run_program(command: Sequence[str], stdin: str | None = None) -> None:
    """Runs another program and exits with its status if it fails. Raises OSError if it is not installed."""
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(f"{command[0]} is not installed: see cloud.google.com/sdk, or --dry_run")
    status = subprocess.run(command, input=stdin, encoding="utf-8", check=False).returncode
    if status:
        raise SystemExit(status)
