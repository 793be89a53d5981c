"""Plans for absent TPUs: the printed plan, runs that do not fit, and bars of full-size runs as compiled for TPUs."""

import contextlib
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict

import jax
import pytest

from memsearcher_jax.config import RunConfig
from memsearcher_jax.launch import cli, plan_tpu
from memsearcher_jax.launch.pod.tpu_slices import find_slice
from memsearcher_jax.planning import roofline, tpu_plan
from memsearcher_jax.planning.hlo import Work
from memsearcher_jax.planning.host import HostTime
from memsearcher_jax.planning.planner import Planner
from memsearcher_jax.planning.roofline import Phase, Workload
from memsearcher_jax.planning.tpu_plan import ResidentMemory

NANO = "--config nano --topology v5e:4x4 --sampling.slots 4 --training.minibatch_rows 32 --training.seq_len 2048"
GB = 1e9
PARAMS_7B = 7_615_616_512
NO_REMAT = "--model.remat nothing_saveable"
# Without a reference, and with few slots.
ALONE = "--what update --sampling.slots 4 --sampling.kv_tokens 0 --training.kl_coefficient 0"
MICRO = "--training.grad_accum_steps 1 --training.minibatch_rows"
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


@pytest.fixture
def plan(start, tmp_path):
    """The plan of a run."""

    def plan(flags):
        process = start(f"{flags} --json {tmp_path / 'plan.json'}")
        output, errors = process.communicate()
        assert process.returncode == 0, output + errors
        return json.loads((tmp_path / "plan.json").read_text())

    return plan


def test_the_printed_plan(capsys):
    """The numbers are arbitrary and distinct."""
    config, topology = RunConfig(), roofline.Topology.of("v6e", (4, 8), range(32), range(4))
    memory = ResidentMemory(*(size * 10**9 for size in (3, 0, 4, 7, 1, 5, 6, 18)))
    plan_tpu.print_memory(topology, memory)
    sampling = [Phase("decode", 1, 28, 2)]
    training = [Phase("update", 22, 3, 4, 5)]
    estimate = plan_tpu.print_estimate(config, Workload(efficiency=0.5), topology, sampling, training, None)
    output = " ".join(capsys.readouterr().out.split())
    assert "32 chips of 8 hosts, 32 devices with 33.54 GB each" in output
    kept = "state 3.00, base 0.00, reference 4.00, training 7.00, gradients 1.00, sampler params 5.00, slots 6.00"
    assert f"GB that stay allocated on a device: {kept}, rollout 18.00" in output
    assert "decode 1.00 28.00 2.00 ? 0.00 memory" in output and "update 22.00 3.00 4.00 5.00 0.00 compute" in output
    assert "total 50.0 s; with devices at an assumed 50% of the roofline 100.0 s per step, " in output
    assert estimate["step_seconds"] == 100
    assert estimate["tokens_per_second"] == 1_280 * 3.5 * 1_340 / 100
    assert estimate["hours"] == config.rl.steps / 36 and estimate["chip_hours"] == 32 * estimate["hours"]
    assert estimate["phases"][1] == {**asdict(training[0]), "seconds": 22, "bound": "compute"}


def test_a_step_has_the_seconds_in_which_devices_wait_for_the_host(capsys):
    """Of 40 s of host time in rollouts, 28 are hidden at peak rates, and all where the devices take twice as long."""
    config = RunConfig()
    topology = roofline.Topology.of("v6e", (4, 8), range(32), range(4))
    sampling = [Phase("decode", 1, 28, 2)]
    host = HostTime(rollout=40.0, between=3.0, overlaps=True)
    estimate = plan_tpu.print_estimate(
        config, Workload(efficiency=0.5), topology, sampling, [Phase("update", 22)], host
    )
    output = " ".join(capsys.readouterr().out.split())
    assert [phase["name"] for phase in estimate["phases"]] == ["decode", "host", "update"]
    assert estimate["phases"][1]["bound"] == "host" and estimate["phases"][1]["seconds"] == 15
    assert "host 0.00 0.00 0.00 ? 15.00 host" in output
    assert "host: 40.00 s of rollouts, 28.00 of them hidden behind the devices; 3.00 s before the update" in output
    assert "total 65.0 s; with devices at an assumed 50% of the roofline 103.0 s per step" in output
    assert estimate["step_seconds"] == 103


@pytest.fixture
def run(tmp_path):
    """Runs the command for GPUs, for which nothing is compiled."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "JAX_"))}

    def run(flags, **share):
        command = [sys.executable, plan_tpu.__file__, *flags.split(), "--json", str(tmp_path / "x.json")]
        done = subprocess.run(command, env=environment | share, capture_output=True, text=True)
        return done.returncode, done.stdout, json.loads((tmp_path / "x.json").read_text())

    return run


def test_settings_are_suggested_from_preset_and_slice_alone(run):
    """Adapters need no weights for their plan, and one device has the sampler's weights alone."""
    status, output, plan = run("--config qwen7b --topology h200:1 --suggest --model.lora_rank 16")
    assert status == 0 and plan["fits"]
    assert "--sampling.tensor 1" in plan["flags"] and "--training.grad_accum_steps" in plan["flags"]
    assert f"settings for this slice: {plan['flags']}\n" in output
    space = "memory 35.5 (copy of the train state 0.5, index 35.0), disk 69.2 (weights 15.2, index 52.0, 4 checkpoints"
    assert f"GB of a host with 1 chips: {space}" in output
    assert plan["roofline"]["phases"][-3]["name"] == "host"


def test_settings_that_do_not_fit_end_with_settings_that_may(run):
    status, output, plan = run("--config qwen3b --topology h100:1 --sampling.tensor 1 --model.remat none")
    assert status == plan_tpu.DOES_NOT_FIT and not plan["fits"]
    sampler = "--sampling.slots 192 --sampling.kv_tokens 393216"
    words = f"--model.remat nothing_saveable {sampler} --training.grad_accum_steps 256"
    assert f"; try {words}, which fits by its lower bound\n" in output


def test_bounds_are_of_the_settings_with_the_least_memory(run):
    status, output, plan = run("--config qwen3b --topology h100:1 --bounds")
    assert status == 0 and plan["flags"].startswith("--sampling.slots 192 --sampling.tensor 1")
    assert "settings with the least memory: --sampling.slots 192" in output and not plan["programs"]
    assert re.search(r"fits 64\.14 GB; the peak of each phase is at least update \d\d\.\d\d, rollout 6\d\.\d\d", output)


def test_gpus_are_planned_by_formula(run):
    """Their rates are those of NVIDIA's data sheets. The weights in bfloat16 of 7B have 15.2 GB."""
    status, output, plan = run("--config qwen7b --topology h200:8")
    assert status == 0 and "8 chips of 1 hosts, 8 devices with 113.07 GB each" in output
    assert plan["resident"]["state"] == pytest.approx(12 * PARAMS_7B / 8, rel=0.01)
    phases = {phase["name"]: phase for phase in plan["roofline"]["phases"]}
    assert phases["update"]["bound"] == "compute" and phases["decode"]["bound"] == "memory"
    status, output, plan = run("--config qwen7b --topology h100:1 --sampling.tensor 1", XLA_CLIENT_MEM_FRACTION=".9")
    assert (
        "1 devices with 76.97 GB each" in output
        and status == plan_tpu.DOES_NOT_FIT
        and "does not fit: update needs at least" in output
        and "; try a larger slice, --model.lora_rank 16 (adapters)" in output
        and not plan["fits"]
    )


def test_a_program_without_text_is_named_and_its_operations_are_unknown(monkeypatch, capsys):
    """Its time may be too low, which a plan must say."""
    flags = cli.parse(plan_tpu.PlanTpu, ["--config", "nano", "--what", "sample"])
    topology = roofline.Topology.of("v5e", (1,), jax.devices()[:1], jax.devices()[:1])
    programs = [tpu_plan.Program("decode", "rollout", 1, 2, None), tpu_plan.Program("publish", "x", 1, 2, Work(3, 4e6))]
    monkeypatch.setattr(tpu_plan, "sampling_programs", lambda *_, **__: programs)
    planner = Planner(topology, Workload(), False, True, print, plan_tpu.print_program, print)
    plan_tpu.plan_run(flags.run, flags, planner)
    output = " ".join(capsys.readouterr().out.split())
    assert "decode 0.00 0.00 ? ? publish 0.00 0.00 3 4.0" in output
    assert "the compiler does not write as text: decode. Their operations are not counted" in output
    assert re.search(r"decode \d+\.\d\d \d+\.\d\d 0\.00 \? 0\.00 memory", output)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            "--workload.shared_tokens 1340",
            "--workload.context_tokens is less than its shared_tokens and generated_tokens",
        ),
        (
            "--workload.context_tokens 800",
            "--workload.context_tokens is more than sampling.context_tokens 768: lower it",
        ),
        ("--rl.epochs 2", "rl.epochs makes as many steps as the data holds"),
        ("--model.path package:tiny", "tiny does not hold the model of this run: set --model.vocab_size 1536"),
    ],
)
def test_a_step_that_the_run_cannot_have_is_refused(flags, line, refused, monkeypatch):
    monkeypatch.setattr(plan_tpu, "ENVIRONMENT", {})
    monkeypatch.setattr(plan_tpu, "announced", lambda: contextlib.nullcontext(lambda _: None))
    assert line in refused(plan_tpu.main, ["--config", "nano", "--topology", "h100:1", *flags.split()])


@pytest.mark.parametrize(
    ("flag", "body", "mistake"),
    [
        (
            "agent.workflow",
            "def mine(question, **_):\n    yield question.text\n",
            "no attribute 'text' (mine.py, line 2)",
        ),
        ("reward.function", "def mine(group):\n    return unknown\n", "'unknown' is not defined (mine.py, line 2)"),
    ],
)
def test_a_mistake_in_a_file_is_found_before_anything_is_compiled(flag, body, mistake, refused, tmp_path, monkeypatch):
    monkeypatch.setattr(plan_tpu, "ENVIRONMENT", {})
    (file := tmp_path / "mine.py").write_text(body)
    line = refused(plan_tpu.main, ["--config", "nano", "--topology", "none", f"--{flag}", str(file)])
    assert line.startswith(f"error: {flag} {file}") and line.endswith(mistake)


@compiles
def test_every_program_is_planned(start, tmp_path):
    """On four hosts, each of which samples on a quarter of the devices; while a program compiles, lines say so."""
    process = start(f"{NANO} --suggest --json {tmp_path / 'plan.json'}")
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    assert re.search(r"^trying (--|the settings as they are)", output, re.MULTILINE)
    assert re.search(r"^settings for this slice: .*\w", output, re.MULTILINE)
    assert "fits 16.91 GB; the peak of each phase is update" in output
    said = r"(loading the compiler|compiling \w+)( … \d+ s)?"
    assert all(re.fullmatch(said, line) for line in errors.splitlines()), errors
    plan = json.loads((tmp_path / "plan.json").read_text())
    names = [program["name"].split(",")[0] for program in plan["programs"]]
    assert names == ["update", "reference", "decode", "prefill", "prefill", "copy_pages", "publish"]
    for program in plan["programs"]:
        resident = plan["resident"]["rollout" if program["phase"] == "rollout" else "training"]
        assert program["total_bytes"] >= resident and program["work"]["operations"] > 0
    phases = [phase["name"] for phase in plan["roofline"]["phases"]]
    assert phases[:3] == ["publish", "prefill", "decode"] and phases[-2:] == ["reference", "update"]


@compiles
@pytest.mark.parametrize("name", ["v5e:1x1", "v6e:2x4", "v6e:4x8"])
def test_a_run_that_does_not_fit_exits_with_status_one_the_reason_and_a_way_out(name, start, tmp_path):
    """The hosts are those of the cloud: of one chip, of all eight, and of four each."""
    flags = f"--config qwen7b --topology {name} --model.remat none --sampling.tensor 1"
    process = start(f"{flags} --json {tmp_path / 'plan.json'}")
    output, _ = process.communicate()
    assert process.returncode == plan_tpu.DOES_NOT_FIT and f" chips of {find_slice(name).hosts} hosts, " in output
    assert "does not fit: update needs" in output and "; try " in output
    assert json.loads((tmp_path / "plan.json").read_text())["fits"] is False


@compiles
def test_a_step_of_7b_on_v6e_4x8(plan):
    """Seconds at full rates of the paper's settings, with carried trajectories in the slots that a step does not fill.

    Everything that a phase holds takes at most 31 GB.
    """
    step = plan("--config qwen7b --topology v6e:4x8 --rl.carry_over 2")
    phases = {phase["name"]: phase for phase in step["roofline"]["phases"]}
    assert phases["update"]["seconds"] <= 6.5 and phases["reference"]["seconds"] <= 2.1
    assert phases["decode"]["seconds"] <= 2.8
    assert sum(max(phase["compute"], phase["memory"], phase["links"]) for phase in phases.values()) <= 12.3
    assert max(program["total_bytes"] for program in step["programs"]) <= 31 * GB


@compiles
@pytest.mark.parametrize(
    ("flags", "peak"),
    [
        ("--config qwen7b --topology v5e:4x8", 12 * GB),  # with KL, and 256 slots
        (f"--config qwen7b --topology v5e:4x4 {ALONE} {MICRO} 16", 12.9 * GB),
        (f"--config qwen7b --topology v5p:2x2x4 {ALONE} {MICRO} 32", 23 * GB),
        (f"--config qwen3b --topology v5e:4x8 {ALONE} {MICRO} 32", 4.4 * GB),
    ],
)
def test_the_peak_of_an_update_which_donates_its_state(flags, peak, plan):
    """Without it the state would be there twice: the weights and both moments, in float32."""
    (program, *_) = plan(f"{flags} {NO_REMAT}")["programs"]
    assert program["name"] == "update" and program["peak_bytes"] <= peak


@compiles
def test_all_weights_of_3b_are_trained_on_one_host_of_v5e(plan):
    """The settings that --suggest chooses, in a cell of the table in docs/start.md; a rollout holds little else."""
    step = plan(
        "--config qwen3b --topology v5e:2x4 --what update --model.remat save_qkv_attention "
        "--training.grad_accum_steps 32 --rl.prompts_per_step 16 --rl.group_size 8"
    )
    assert step["peaks"]["update"] <= 14.5 * GB and step["peaks"]["reference"] <= 6.7 * GB
    assert step["resident"]["rollout"] <= 11 * GB


@compiles
def test_7b_with_lora_fits_one_host_of_v5e(plan):
    """Training with KL, and what a rollout holds. A host of v6e has twice the memory."""
    lora = f"--model.lora_rank 16 {NO_REMAT}"
    step = plan(f"--config qwen7b --topology v5e:2x4 --what update --training.grad_accum_steps 32 {lora}")
    assert {program["name"] for program in step["programs"]} == {"update", "reference"}
    assert max(program["total_bytes"] for program in step["programs"]) <= 10 * GB
    assert step["resident"]["rollout"] <= 10 * GB
