"""Checks a TPU, GPU or CPU before the first run on it: versions, kernels, numerics, speed, and two steps of nano.

python launch/check_device.py
python launch/check_device.py --json device.json       # the table for a program, or for an issue

It takes at most five minutes, downloads nothing, and prints one table, which holds no address and no key. The exit
status is 1 if a row failed.
"""

from __future__ import annotations

if __name__ == "__main__":
    import memsearcher_jax.launch.__main__  # noqa: F401  (runs `main` below)

import contextlib
import io
import os
import platform
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from memsearcher_jax.device_check import environment
from memsearcher_jax.device_check.rows import Row
from memsearcher_jax.launch import cli, outputs, preconditions
from memsearcher_jax.logs.progress import announced

if TYPE_CHECKING:  # it loads JAX, which opens the devices
    from memsearcher_jax.device_check.kernels import Kernels

COLUMNS = "{:36} {:7} {:44} {}"


@dataclass(frozen=True)
class CheckDevice:
    """Check the devices of this machine before the first run on them."""

    config: Annotated[str, tyro.conf.arg(metavar="NAME")] = "qwen05b"
    """Preset whose shapes the kernels are compared at."""
    small: bool = False
    """Few tokens, and kernels interpreted: a rehearsal, which is always so on a CPU."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the table as JSON."""


def main(argv: Sequence[str], kernels: Kernels | None = None) -> None:
    """`kernels` replaces those of the package."""
    with cli.one_line_errors():
        flags = cli.parse_flags(CheckDevice, argv)
        model = cli.load_preset(flags.config).model
    rows: list[Row] = []
    print(COLUMNS.format("check", "", "found", "expected").rstrip(), flush=True)

    def show(found: Iterable[Row]) -> None:
        for row in found:
            row = row.without_names()
            rows.append(row)
            print(COLUMNS.format(row.name, row.verdict, row.found, row.expected).rstrip(), flush=True)

    began = time.monotonic()
    with announced() as begin:
        show(_before_jax())
        begin("loading JAX")
        import jax

        try:
            devices = jax.local_devices()
        except RuntimeError as error:  # no device, or held by another process
            reason = str(error).strip().splitlines()[0]
            show([Row("devices", reason[:200], "a device", False, "see the rows above for what holds the chips")])
            devices = []
        if devices:
            begin("comparing kernels")
            show(_device_rows(devices))
            show(_kernel_rows(model, flags.small, devices[0], kernels))
            begin("comparing sampler and trainer")
            show(_speed_rows(model, flags.small, devices[0]))
            begin("two steps of nano")
            show([_nano_row()])
    failed = [row for row in rows if row.passed is False]
    print(f"\n{len(rows)} rows in {time.monotonic() - began:.0f} s, {len(failed)} failed")
    for row in failed:
        print(f"{row.name}: {row.found}; {row.way_out}")
    if flags.json:
        outputs.write_json(flags.json, {"rows": [asdict(row) for row in rows], "failed": len(failed)})
    if failed:
        raise SystemExit(1)


def _before_jax() -> Iterator[Row]:
    yield Row("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield from environment.version_rows(preconditions.libtpu_fault())
    yield from environment.host_count_rows(os.environ)
    yield from environment.holder_rows()
    yield from environment.port_rows()
    yield from environment.host_rows(Path.cwd())


def _device_rows(devices: Sequence[Any]) -> Iterator[Row]:
    """The devices against what the environment names, and their memory."""
    device = devices[0]
    found = f"{len(devices)} x {device.device_kind} ({device.platform})"
    expected = environment.expected_chips(os.environ)
    if expected is None or device.platform != "tpu":
        on_tpu_vm = expected is not None or "TPU_ACCELERATOR_TYPE" in os.environ
        passed = device.platform == "tpu" or not on_tpu_vm
        yield Row("devices", found, "a TPU" if on_tpu_vm else "", passed, "pip install 'jax[tpu]'; unset JAX_PLATFORMS")
    else:
        devices_per_chip = 2 if "7x" in device.device_kind else 1
        passed = len(devices) >= expected * devices_per_chip
        yield Row("devices", found, f"{expected} chips", passed, "end what holds the other chips")
    statistics = device.memory_stats() or {}
    if "bytes_limit" in statistics:
        free = statistics["bytes_limit"] - statistics.get("bytes_in_use", 0)
        yield Row("free device memory", f"{free / 1e9:.1f} GB", passed=None)


def _kernel_rows(model: Any, small: bool, device: Any, kernels: Kernels | None) -> Iterator[Row]:
    """Kernels are those of TPUs: elsewhere they are interpreted, at small shapes."""
    from jax.experimental.pallas import tpu

    from memsearcher_jax.device_check.kernels import Kernels, Sizes, kernel_rows

    on_tpu = device.platform == "tpu"
    if device.platform == "gpu":
        yield Row("kernels", "none: GPUs run the XLA path", passed=None)
        return
    interpret: Any = True  # as programs of XLA: a simulated TPU takes far longer
    interpreted = contextlib.nullcontext() if on_tpu else tpu.force_tpu_interpret_mode(interpret)
    with interpreted:
        yield from kernel_rows(Sizes.of(model, small=small or not on_tpu), device.platform, kernels or Kernels())


def _speed_rows(model: Any, small: bool, device: Any) -> Iterator[Row]:
    from memsearcher_jax.device_check.speed import Scale, speed_rows

    if device.platform == "cpu":
        model = cli.load_preset("nano").model
        small = True
    try:
        yield from speed_rows(model, device, Scale.of(small=small))
    except Exception as error:  # of the compiler or the device, of any kind
        reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
        yield Row(
            "sampler and trainer", f"{type(error).__name__}: {reason}"[:200], "a result", False, "report this table"
        )


def _nano_row() -> Row:
    """Two steps of the smallest preset, as a user runs it."""
    from memsearcher_jax.launch import tpu_train

    printed = io.StringIO()
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        words = ["--config", "nano", "--rl.steps", "2", "--rl.trackers", "tensorboard", "--out", f"{folder}/nano"]
        try:
            tpu_train.main(words)
            reason = ""
        except (Exception, SystemExit) as error:
            lines = printed.getvalue().strip().splitlines()
            reason = lines[-1] if lines else f"{type(error).__name__}: {error}"
    if reason:
        return Row("two steps of nano", reason[:200], "two steps", False, "run launch/tpu_train.py --config nano")
    return Row("two steps of nano", f"done in {time.monotonic() - began:.0f} s", "two steps")
