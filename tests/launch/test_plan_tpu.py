"""Plans for absent TPUs: the printed plan, invalid flags, and runs that do not fit."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from memsearcher_jax.config import RunConfig
from memsearcher_jax.launch import plan_tpu
from memsearcher_jax.planning import roofline
from memsearcher_jax.planning.roofline import Phase, Workload
from memsearcher_jax.planning.tpu_plan import Program, ResidentMemory

NANO = "--config nano --topology v5e:4x4 --sampling.slots 4 --training.minibatch_rows 32 --training.seq_len 2048"
compiles = pytest.mark.tpu_compile


@pytest.fixture
def start():
    """Starts the command; libtpu rejects the XLA flags of the tests."""
    pytest.importorskip("libtpu", reason="no TPU compiler: install the extra 'tpu'")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "JAX_", "TPU_"))}

    def start(flags):
        command = [sys.executable, plan_tpu.__file__, *flags.split()]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return start


def test_the_printed_plan(capsys):
    """The numbers are arbitrary and distinct."""
    config, tpu_slice = RunConfig(), roofline.make_slice("v6e", (4, 8), 32, 8)
    plan_tpu.print_settings(config, "v6e:4x8", tpu_slice, {"data": 1, "fsdp": 32, "tensor": 1})
    plan_tpu.print_memory(ResidentMemory(1 * 10**9, 2 * 10**9, 4 * 10**9, 5 * 10**9, 6 * 10**9))
    sizes = (size * 10**9 for size in (3, 7, 9, 2, 24))
    plan_tpu.print_program(Program("update", *sizes, 8e12, 40e9, 5e3, 6e6, compile_seconds=55.0))
    phases = [Phase("decode", 1, 28, 2), Phase("update", 22, 3, 4)]
    estimate = plan_tpu.print_estimate(config, Workload(efficiency=0.5), tpu_slice, phases)
    output = " ".join(capsys.readouterr().out.split())
    assert "32 chips of 8 hosts, 32 devices with 33.54 GB each" in output
    assert "train state 3.00 GB, reference 4.00, during rollouts sampler weights 5.00 and slots 6.00; " in output
    assert "total 7.00 GB, during rollouts 18.00 GB" in output
    assert "update 3.00 7.00 9.00 2.00 24.00 40.00 8.0 5,000 6.0 55 s" in output
    assert "decode 1.00 28.00 2.00 0.00 memory" in output
    assert "total 50.0 s; longest: decode, bound by memory" in output
    assert "100.0 s per step" in output and estimate["step_seconds"] == 100
    assert estimate["phases"][1] == {**vars(phases[1]), "seconds": 22, "bound": "compute"}


@compiles
def test_every_program_is_planned(start, tmp_path):
    """On four hosts, each of which samples on a quarter of the devices; while a program compiles, lines say so."""
    process = start(f"{NANO} --suggest --json {tmp_path / 'plan.json'}")
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    assert re.search(r"--mesh.fsdp 16 --mesh.tensor 1 .*: .* s at the roofline, fits, needs", output)
    assert "fits: the peak is" in output and "peak GB by phase: update" in output
    assert all(re.fullmatch(r"compiling \w+(, [\d x]+)?: \d+ s", line) for line in errors.splitlines()), errors
    plan = json.loads((tmp_path / "plan.json").read_text())
    names = [program["name"].split(",")[0] for program in plan["programs"]]
    assert names == ["update", "reference", "decode", "prefill", "prefill", "copy_pages", "publish"]
    update = plan["programs"][0]
    assert update["donated_bytes"] >= 0.99 * plan["resident"]["state"]
    assert update["sent_bytes"] > 0 and update["flops"] > 0 and update["temp_bytes"] > 0
    for name, program in zip(names, plan["programs"], strict=True):
        resident = plan["resident"]["rollout" if name in ("decode", "prefill", "copy_pages") else "training"]
        assert program["total_bytes"] >= resident and program["operations"] > 0
    phases = [phase["name"] for phase in plan["roofline"]["phases"]]
    assert phases[:3] == ["publish", "prefill", "decode"] and phases[-2:] == ["reference", "update"]


@compiles
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_a_compilation_within_seconds(number, start):
    process = start(f"{NANO} --what update")
    while not process.stdout.readline().startswith("GB per device"):
        assert process.poll() is None
    time.sleep(2)
    process.send_signal(number)
    before = time.monotonic()
    assert process.wait(60) == 130
    assert time.monotonic() - before < 5
    assert process.stderr.read().splitlines()[-1] == "stopped"


@compiles
def test_a_run_that_does_not_fit_exits_with_status_one_the_reason_and_a_way_out(start, tmp_path):
    flags = "--config qwen7b --topology v5e:2x2 --what sample --rows 1"
    process = start(f"{flags} --json {tmp_path / 'plan.json'}")
    output, _ = process.communicate()
    assert process.returncode == plan_tpu.DOES_NOT_FIT
    assert "does not fit: decode needs" in output and "try fewer sampling.slots" in output and "--suggest" in output
    assert json.loads((tmp_path / "plan.json").read_text())["fits"] is False
