"""The TPU slices that Google Cloud offers, from tpus.toml, and the programs that request them."""

from __future__ import annotations

import functools
import math
import shutil
import subprocess
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TPUS = Path(__file__).with_name("tpus.toml")


@dataclass(frozen=True)
class CloudSlice:
    """One slice, as GKE and as the TPU API name it."""

    topology: str  # such as 4x8
    gke_accelerator: str  # node label
    machine: str
    hosts: int
    chips_per_host: int
    devices: int  # of JAX
    accelerator_type: str  # of TPU VMs, such as v6e-32; v4 and v5p count cores, two per chip. "" if only GKE has it
    runtime_version: str


@functools.cache
def known_slices() -> dict[str, CloudSlice]:
    """Every slice by its name, such as v6e:4x8."""
    slices = {}
    for generation, tpu in tomllib.loads(TPUS.read_text(encoding="utf-8")).items():
        for machine, topology in ((one, name) for one in tpu["machines"] for name in one["topologies"]):
            chips = math.prod(int(length) for length in topology.split("x"))
            slices[f"{generation}:{topology}"] = CloudSlice(
                topology,
                tpu["gke_accelerator"],
                machine["name"],
                chips // machine["chips"],
                machine["chips"],
                chips * tpu.get("devices_per_chip", 1),
                f"{tpu['accelerator']}-{chips * tpu['cores_per_chip']}" if "accelerator" in tpu else "",
                tpu.get("runtime_version", ""),
            )
    return slices


def find_slice(name: str) -> CloudSlice:
    """Raises ValueError that lists the known slices, of this generation if there is such a one."""
    if name not in known_slices():
        generation = [known for known in known_slices() if known.startswith(f"{name.partition(':')[0]}:")]
        raise ValueError(f"--topology {name} is none of {', '.join(generation or known_slices())}")
    return known_slices()[name]


def run_program(command: Sequence[str], stdin: str | None = None) -> None:
    """Runs another program and exits with its status if it fails. Raises OSError if it is not installed."""
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(f"{command[0]} is not installed: see cloud.google.com/sdk, or --dry_run")
    status = subprocess.run(command, input=stdin, encoding="utf-8", check=False).returncode
    if status:
        raise SystemExit(status)
