"""The TPU slices that Google Cloud offers, each named GENERATION:TOPOLOGY, and the programs that request them.

Sources: node labels, machines, topologies and hosts from cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus;
accelerator types and what their number counts from cloud.google.com/tpu/docs (the pages v4, v5e, v5p, v6e). Compared
with AI-Hypercomputer/xpk, src/xpk/core/system_characteristics.py, which has 2x4 of v5e and v6e as two hosts of 4 chips;
here it is the one host of 8 that a TPU VM of that type is.
"""

from __future__ import annotations

import math
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

PLANES = "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16"
CUBES = "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16"
HOST_CHIPS = {"1x1": 1, "2x4": 8}  # of one host; others have 4


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


def _slices(
    generation: str, topologies: str, label: str, machine: str, vm: str = "", runtime: str = "", *, cores=1, devices=1
) -> dict[str, CloudSlice]:
    """`vm`: the accelerator type without its number, which counts `cores` of a chip; `devices`: of JAX, per chip."""
    slices = {}
    for topology in topologies.split():
        chips, own = math.prod(map(int, topology.split("x"))), HOST_CHIPS.get(topology, 4)
        accelerator_type, hosts = f"{vm}-{chips * cores}" if vm else "", chips // own
        of_machine = f"{machine}-{own}t", hosts, own, chips * devices
        slices[f"{generation}:{topology}"] = CloudSlice(topology, label, *of_machine, accelerator_type, runtime)
    return slices


SLICES = {
    **_slices("v4", CUBES, "tpu-v4-podslice", "ct4p-hightpu", "v4", "tpu-ubuntu2204-base", cores=2),
    **_slices("v5e", PLANES, "tpu-v5-lite-podslice", "ct5lp-hightpu", "v5litepod", "v2-alpha-tpuv5-lite"),
    **_slices("v5p", CUBES, "tpu-v5p-slice", "ct5p-hightpu", "v5p", "v2-alpha-tpuv5", cores=2),
    **_slices("v6e", PLANES, "tpu-v6e-slice", "ct6e-standard", "v6e", "v2-alpha-tpuv6e"),
    **_slices("tpu7x", CUBES, "tpu7x", "tpu7x-standard", devices=2),
}


def find_slice(name: str) -> CloudSlice:
    """Raises ValueError that lists the known slices, of this generation if there is such a one."""
    if name not in SLICES:
        generation = [known for known in SLICES if known.startswith(f"{name.partition(':')[0]}:")]
        raise ValueError(f"--topology {name} is none of {', '.join(generation or SLICES)}")
    return SLICES[name]


def run_program(command: Sequence[str], stdin: str | None = None) -> None:
    """Runs another program and exits with its status if it fails. Raises OSError if it is not installed."""
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(f"{command[0]} is not installed: see cloud.google.com/sdk, or --dry_run")
    status = subprocess.run(command, input=stdin, encoding="utf-8", check=False).returncode
    if status:
        raise SystemExit(status)
