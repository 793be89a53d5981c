"""Plans for absent TPUs: the printed plan, invalid flags, and runs that do not fit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from memsearcher_jax.config import RunConfig
from memsearcher_jax.launch import cli, plan_tpu
from memsearcher_jax.logs.atomic_write import atomic_write
from memsearcher_jax.logs.trajectories import compress_trajectories
from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.planning import roofline
from memsearcher_jax.planning.roofline import Phase, Workload
from memsearcher_jax.planning.tpu_plan import Program, ResidentMemory, with_rows
from memsearcher_jax.runtime.run_dir import located
from memsearcher_jax.types import Context, Outcome, Problem, ScoredTrajectory, StopReason, Trajectory

NANO = ("--config", "nano", "--topology", "v5e:2x2", "--sampling.slots", "4")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Restores the variables that the program sets."""
    for name, value in plan_tpu.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    "command",
    [
        "plan_tpu.py --config nano --topology v5e:2x2 --what rollout",
        "export_hf.py --config tiny --checkpoint TINY --out DIR",
    ],
)
def test_without_a_tpu_libtpu_prints_nothing(command, tmp_path):
    pytest.importorskip("libtpu")
    environment = {name: value for name, value in os.environ.items() if name not in plan_tpu.ENVIRONMENT}
    environment["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # another process may hold it, which would hide the messages
    words = command.replace("DIR", str(tmp_path / "out")).replace("TINY", str(located("package:tiny"))).split()
    launch = Path(plan_tpu.__file__).parent
    done = subprocess.run(
        [sys.executable, launch / words[0], *words[1:]], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("topology", "message"),
    [("v0:1x1", "begin it with one of v5e:, v5p:, v6e:, tpu7x:"), ("v5e:5x7x9", "pip install libtpu")],
)
def test_an_unknown_topology_is_a_one_line_error(topology, message, refused):
    line = refused(plan_tpu.main, ["--config", "nano", "--topology", topology])
    assert f"--topology {topology}: " in line
    assert message in line


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--trajectories", "none", "--trajectories none: no such file"),
        ("--rows", "-1", "--rows is -1: it must be at least 0"),
        ("--workload.efficiency", "0", "--workload.efficiency is 0.0: it must be above 0 and at most 1"),
        ("--workload.context_tokens", "nan", "--workload.context_tokens is nan: it must be above 0 and finite"),
    ],
)
def test_an_invalid_flag_is_an_error_before_anything_is_compiled(flag, value, message, refused):
    assert message in refused(plan_tpu.main, ["--config", "nano", flag, value])


def test_rows_per_device_must_divide_a_mini_batch():
    config = RunConfig()
    assert with_rows(config, 4, 32).training.grad_accum_steps == 2
    with pytest.raises(ValueError, match="--rows 3 makes micro-batches of 96 rows"):
        with_rows(config, 3, 32)


@pytest.mark.parametrize(("mesh", "steps"), [(MeshConfig(1, -1, 4), 32), (MeshConfig(2, 16, 1), 8)])
def test_rows_are_per_group_of_tensor_devices(mesh, steps):
    assert with_rows(RunConfig(mesh=mesh), 1, 32).training.grad_accum_steps == steps


def test_the_printed_plan(capsys):
    """The numbers are arbitrary and distinct."""
    config, tpu_slice = RunConfig(), roofline.make_slice("v6e", (4, 8), 32, 8)
    plan_tpu.print_settings(config, "v6e:4x8", tpu_slice, {"data": 1, "fsdp": 32, "tensor": 1}, replicas=4)
    plan_tpu.print_memory(ResidentMemory(1 * 10**9, 2 * 10**9, 4 * 10**9, 5 * 10**9, 6 * 10**9))
    sizes = (size * 10**9 for size in (3, 7, 9, 2, 15))
    plan_tpu.print_program(
        Program("update", *sizes, 8e12, 40e9, 5e3, 6e6, compile_seconds=55.0, compile_cpu_seconds=99.0)
    )
    phases = [Phase("decode", 1, 28, 2), Phase("draw", 0, 1, 0, 2), Phase("update", 20, 3, 4)]
    estimate = plan_tpu.print_estimate(config, Workload(efficiency=0.5), tpu_slice, phases)
    output = capsys.readouterr().out
    assert "32 chips of 8 hosts, 32 devices with 33.54 GB each" in output
    assert "train state 3.00 GB, reference 4.00, during rollouts sampler weights 5.00 and slots 6.00; " in output
    assert "total 7.00 GB, during rollouts 18.00 GB" in output
    assert "update 3.00 7.00 9.00 2.00 24.00 40.00 8.0 5,000 6.0 55 s" in " ".join(output.split())
    assert "draw 0.00 1.00 0.00 2.00 operations (longer than its memory traffic)" in " ".join(output.split())
    assert "total 50.0 s; longest: decode, bound by memory" in output
    assert "100.0 s per step" in output and estimate["step_seconds"] == 100
    assert estimate["phases"][2] == {
        "name": "update",
        "compute": 20,
        "memory": 3,
        "links": 4,
        "operations": 0.0,
        "seconds": 20,
        "bound": "compute",
    }


def test_rollouts_are_simulated_from_the_trajectories_of_a_run(tmp_path, capsys):
    """Each has two contexts of 100 tokens and a search: 2.5 s, all at the same time."""
    context = Context((1,) * 100, (0.0,) * 100, (True,) * 100)
    outcome = Outcome(StopReason.ANSWERED)
    lengths = [
        ScoredTrajectory(Trajectory(Problem("q", "?", ()), 0, outcome, (context, context)[:n], ""), 1.0) for n in (0, 2)
    ]
    atomic_write(tmp_path / "file.jsonl.gz", compress_trajectories(lengths))
    flags = cli.parse(
        plan_tpu.PlanTpu,
        ["--config", "qwen7b", "--trajectories", str(tmp_path / "file.jsonl.gz"), "--sampling.slots", "160"],
    )
    steps = roofline.decode_steps(flags.run, flags.workload, 8)
    waiting, *_ = plan_tpu.print_rollouts(
        flags.run, flags, 8, [Phase("decode", 0.009 * steps, 0, 0), Phase("draw", 0.001 * steps, 0, 0)]
    )
    assert waiting == {"carry_over": 0, "seconds": 2.5, "idle_share": 0.0, "interrupted_share": 0.0}
    output = capsys.readouterr().out
    assert "160 trajectories per host and step" in output and "10.0 ms per token, 0.5 s per search" in output
    assert "rl.carry_over 0: 2.5 s per step, 1.00 times as fast as 0, idle slots 0%, sampled again 0%" in output


@pytest.mark.tpu_compile
def test_rollouts_are_simulated_without_a_compilation(tmp_path, capsys):
    pytest.importorskip("libtpu", reason="no TPU compiler: install the extra 'tpu'")
    plan_tpu.main(
        ["--config", "qwen7b", "--sampling.slots", "64", "--what", "rollout", "--json", str(tmp_path / "plan.json")]
    )
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["programs"] == [] and plan["fits"] is None and "arguments" not in capsys.readouterr().out
    waiting, carrying, _ = plan["rollouts"]
    assert waiting["seconds"] > 1.4 * carrying["seconds"] and carrying["idle_share"] < 0.1


@pytest.mark.tpu_compile
def test_every_program_is_planned(tmp_path, capsys):
    """On four hosts, each of which samples on a quarter of the devices."""
    pytest.importorskip("libtpu", reason="no TPU compiler: install the extra 'tpu'")
    rows = ("--training.minibatch_rows", "32", "--training.seq_len", "2048", "--training.grad_accum_steps", "2")
    files = ("--json", str(tmp_path / "plan.json"), "--hlo", str(tmp_path / "hlo"))
    plan_tpu.main([*NANO, "--topology", "v5e:4x4", *rows, *files])
    assert "fits: the peak is" in capsys.readouterr().out
    plan = json.loads((tmp_path / "plan.json").read_text())
    names = [program["name"].split(",")[0] for program in plan["programs"]]
    assert names == ["update", "reference", "decode", "prefill", "prefill", "copy_pages", "publish"]
    update = plan["programs"][0]
    assert update["donated_bytes"] >= 0.99 * plan["resident"]["state"]
    assert update["sent_bytes"] > 0 and update["flops"] > 0 and update["temp_bytes"] > 0
    for program in plan["programs"]:
        sampler = program["name"].startswith(("decode", "prefill", "copy_pages"))
        assert program["total_bytes"] >= plan["resident"]["rollout" if sampler else "training"]
        assert program["operations"] > 0
        text = tmp_path / "hlo" / f"{program['name'].replace(', ', '_').replace(' ', '_')}.txt"
        assert text.read_text().startswith("HloModule")
    phases = [phase["name"] for phase in plan["roofline"]["phases"]]
    assert phases[:4] == ["publish", "prefill", "decode", "draw"] and phases[-2:] == ["reference", "update"]
    assert [row["carry_over"] for row in plan["rollouts"]] == [0, 1, 2]


@pytest.mark.tpu_compile
def test_a_run_that_does_not_fit_exits_with_status_one_and_the_reason(tmp_path, capsys):
    pytest.importorskip("libtpu", reason="no TPU compiler: install the extra 'tpu'")
    file = tmp_path / "plan.json"
    flags = ["--config", "qwen7b", "--topology", "v5e:2x2", "--what", "sample", "--rows", "1", "--json", str(file)]
    with pytest.raises(SystemExit) as stop:
        plan_tpu.main(flags)
    assert stop.value.code == plan_tpu.DOES_NOT_FIT
    assert "does not fit: decode needs" in capsys.readouterr().out
    assert json.loads(file.read_text())["fits"] is False


@pytest.mark.tpu_compile
def test_the_suggestion_is_planned(capsys):
    pytest.importorskip("libtpu", reason="no TPU compiler: install the extra 'tpu'")
    rows = ("--training.minibatch_rows", "8", "--training.seq_len", "2048", "--training.grad_accum_steps", "2")
    plan_tpu.main([*NANO, *rows, "--what", "update", "--suggest"])
    output = capsys.readouterr().out
    assert "suggested: --mesh.data 1 --mesh.fsdp" in output
    assert "fits: the peak is" in output
