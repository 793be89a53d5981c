"""The environment that JAX reads when it is imported: its persistent compilation cache, and the devices of a CPU.

The cache is on by default, in the user's cache directory. `choose` runs before JAX is imported.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sys
from importlib.metadata import version
from pathlib import Path

from memsearcher_jax.hosts.preemption import ADDRESS
from memsearcher_jax.launch import preconditions

OFF = "off"
DIRECTORY = "JAX_COMPILATION_CACHE_DIR"
DEVICES = "JAX_NUM_CPU_DEVICES"
WRONG_FLAG = "xla_cpu_experimental_ynn_fusion_type"
LIMITS = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",  # most programs of a small model take less than JAX's second
    "JAX_COMPILATION_CACHE_MAX_SIZE": str(4 << 30),  # bytes; the oldest programs go first
}


def choose(directory: str, cpu_devices: int) -> None:
    """Sets the environment that JAX reads. `directory`: of the user's choice, OFF, or "" for the default.

    Programs for several CPU devices that were read from a cache can wait for each other forever in their collectives:
    these are compiled at every start. Raises ValueError if a directory is chosen for them, or for a flag of XLA with
    which their gradients are wrong.
    """
    if cpu_devices > 1 and WRONG_FLAG in os.environ.get("XLA_FLAGS", ""):
        raise ValueError(
            f"XLA_FLAGS sets {WRONG_FLAG}, without which gradients on several CPU devices are right: remove it, or set "
            "mesh.cpu_devices 1"
        )
    if cpu_devices > 1 and "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        os.environ.setdefault(DEVICES, str(cpu_devices))  # JAX fails if both are set
    is_uncachable = _on_several_cpu_devices()
    if is_uncachable and directory not in ("", OFF):
        raise ValueError(f"--compile_cache {directory}: programs for several CPU devices cannot be cached: omit it")
    if is_uncachable or directory == OFF:
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    elif directory or DIRECTORY not in os.environ:
        try:
            if directory and "://" not in directory:
                Path(directory).mkdir(parents=True, exist_ok=True)  # JAX would go on in silence without one
            os.environ[DIRECTORY] = directory or str(_own_directory())
            os.environ.update({name: os.environ.get(name, value) for name, value in LIMITS.items()})
        except OSError as error:
            print(f"no compilation cache ({error}): choose one with --compile_cache DIR", file=sys.stderr, flush=True)


def _on_several_cpu_devices() -> bool:
    flags = re.findall(r"host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    counts = [int(count) for count in (*flags, os.environ.get(DEVICES, "1"))]
    return not preconditions.has_accelerator() and (max(counts) > 1 or ADDRESS in os.environ)


def _own_directory() -> Path:
    """A directory that only this user can write, since it holds code that will run; one for each kind of processor."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "memsearcher_jax")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder} can be written by others")
    listed = Path("/proc/cpuinfo")
    text = listed.read_text() if listed.exists() else ""  # Linux alone has it
    processor = {*re.findall(r"^(?:model name|flags|Features)\s*:.*", text, re.MULTILINE), platform.machine()}
    kind = hashlib.sha256("\n".join(sorted(processor)).encode()).hexdigest()[:8]
    return folder / f"jax-{version('jax')}-{kind}"
