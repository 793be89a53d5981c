"""What surrounds the devices: versions, processes that hold them, ports, memory and disk. Imports no JAX.

A second process that opens the chips of a TPU fails or hangs, so what holds them is looked for before JAX is loaded.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from memsearcher_jax.device_check.rows import Row

CHIP_FILES = re.compile(r"/dev/(vfio/\d+|accel\d+)")
LOCK_FILE = Path("/tmp/libtpu_lockfile")
ACCELERATOR_TYPE = re.compile(r"(v4|v5litepod|v5e|v5p|v6e)-(\d+)")
PORTS = {8471: "TPU", 8476: "coordinator, TPU VMs", 8482: "coordinator"}
LEAST_DISK = 20e9  # bytes: weights of 3B, checkpoints and compiled programs
LEAST_MEMORY = 8e9  # bytes


def version_rows(libtpu_fault: str) -> Iterator[Row]:
    """The versions of JAX, jaxlib and libtpu. `libtpu_fault`: what is wrong with libtpu and the way out, or ""."""
    for name in ("jax", "jaxlib"):
        yield Row(name, _version(name) or "not installed", passed=_version(name) is not None)
    found = _version("libtpu")
    if found is None:
        yield Row("libtpu", "not installed", "on a TPU alone", None)
    else:
        yield Row("libtpu", found, "as jax requires", not libtpu_fault, libtpu_fault)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def holder_rows(proc: Path = Path("/proc"), lock_file: Path = LOCK_FILE) -> Iterator[Row]:
    """Processes that hold the chips of a TPU, and a lock file that a process has left."""
    holders: dict[str, str] = {}
    for process in proc.glob("[0-9]*"):
        if process.name == str(os.getpid()):
            continue
        name = _held_chip(process)
        if name:
            holders[process.name] = name
    listed = ", ".join(f"process {number} ({_command(proc / number)}) holds {name}" for number, name in holders.items())
    way_out = f"end it, for instance by kill {' '.join(holders)}; a notebook's kernel holds the chips until it restarts"
    yield Row("holders of the chips", listed or "none", "none", not holders, way_out)
    if lock_file.exists():
        stale = not holders
        found = f"{lock_file} exists, and {'no process holds the chips' if stale else 'a process holds the chips'}"
        way_out = f"rm {lock_file}" if stale else "end the process above"
        yield Row("lock file", found, "none", False, way_out)


def _held_chip(process: Path) -> str:
    """The device file of a TPU that a process has open; "" for none, or for a process of another user."""
    try:
        for file in (process / "fd").iterdir():
            target = os.readlink(file)
            if CHIP_FILES.fullmatch(target):
                return target
    except OSError:
        return ""
    return ""


def _command(process: Path) -> str:
    """The program and its script. Other words may be keys, and folders names of users."""
    try:
        words = (process / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return "unknown"
    script = words[1] if len(words) > 1 and not words[1].startswith("-") else ""
    return " ".join(Path(word).name for word in (words[0], script) if word) or "unknown"


def port_rows() -> Iterator[Row]:
    """Ports that jobs of several hosts listen on."""
    for port, name in PORTS.items():
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("127.0.0.1", port))
                free = True
            except OSError:
                free = False
        way_out = "set JAX_COORDINATOR_PORT to a free one, the same on all hosts"
        yield Row(
            f"port {port} ({name})",
            "free" if free else "taken",
            "free, for jobs of several hosts",
            free or None,
            way_out,
        )


def host_rows(folder: Path, meminfo: Path = Path("/proc/meminfo")) -> Iterator[Row]:
    """Memory and disk of the host. Raises no error where the system does not say."""
    disk = shutil.disk_usage(folder).free
    way_out = "choose --out on a larger disk; an index of all of Wikipedia alone needs 46 to 52 GB"
    yield Row("free disk", f"{disk / 1e9:,.0f} GB", f"at least {LEAST_DISK / 1e9:.0f} GB", disk >= LEAST_DISK, way_out)
    if not meminfo.exists():
        yield Row("free host memory", "unknown", passed=None)
        return
    available = re.search(r"MemAvailable:\s+(\d+)", meminfo.read_text())
    memory = int(available[1]) * 1024 if available else 0
    expected = f"at least {LEAST_MEMORY / 1e9:.0f} GB"
    yield Row("free host memory", f"{memory / 1e9:,.0f} GB", expected, memory >= LEAST_MEMORY, "end other processes")


def host_count_rows(environment: Mapping[str, str]) -> Iterator[Row]:
    """The hosts of the slice, where there are several: each of them waits for the others as soon as JAX is loaded."""
    hosts = len(environment.get("TPU_WORKER_HOSTNAMES", "").split(","))
    if hosts > 1:
        yield Row("hosts of the slice", str(hosts), "this command on all of them at the same time", None)


def expected_chips(environment: Mapping[str, str]) -> int | None:
    """Chips that this host should see, by the variables of a TPU VM, Kaggle or GKE; None: they do not say."""
    bounds = environment.get("TPU_CHIPS_PER_HOST_BOUNDS", "")
    if re.fullmatch(r"\d+,\d+,\d+", bounds):
        x, y, z = map(int, bounds.split(","))
        return x * y * z
    named = ACCELERATOR_TYPE.fullmatch(environment.get("TPU_ACCELERATOR_TYPE", ""))
    if named is None:
        return None
    counts_cores = named[1] in ("v4", "v5p")
    chips = int(named[2]) // (2 if counts_cores else 1)
    return chips if chips == 1 or (chips == 8 and not counts_cores) else min(chips, 4)
