"""Planning for TPUs that are not there: what it prints, what it refuses, and what does not fit."""

import json

import plan_text
import plan_tpu
import pytest

from memsearcher_jax.config import RunConfig
from memsearcher_jax.rl import roofline
from memsearcher_jax.rl.plan import Program, Resident
from memsearcher_jax.rl.roofline import Load, Phase

NANO = ("--config", "nano", "--topology", "v5e:2x2", "--sampling.slots", "4")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """The program's own variables, gone after the test."""
    for name, value in plan_tpu.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def test_a_generation_that_there_is_not_ends_in_one_line(refused):
    line = refused(plan_tpu.main, ["--config", "nano", "--topology", "v0:1x1"])
    assert "--topology v0:1x1: begin it with one of v5e:, v5p:, v6e:, tpu7x:" in line


def test_a_topology_that_there_is_not_ends_in_one_line(refused):
    line = refused(plan_tpu.main, ["--config", "nano", "--topology", "v5e:5x7x9"])
    assert "--topology v5e:5x7x9: " in line
    assert "pip install libtpu" in line


def test_resuming_a_plan_is_refused(refused, finished):
    assert "a plan has nothing to go on with" in refused(plan_tpu.main, ["--resume", "--out", finished])


def test_rows_for_each_device_must_divide_a_mini_batch():
    config = RunConfig()
    assert plan_tpu.with_rows(config, 4, 32).training.accumulate == 2
    with pytest.raises(ValueError, match="--rows 3 makes micro-batches of 96 rows"):
        plan_tpu.with_rows(config, 3, 32)


def test_what_is_printed_can_be_read(capsys):
    """Numbers of no real program, so that each can be told apart."""
    text = plan_text.Text(RunConfig(), Load(efficiency=0.5), roofline.slice_of("v6e", (4, 8), 32, 8))
    text.setting("v6e:4x8", {"data": 1, "fsdp": 32, "tensor": 1}, copies=4)
    text.stays(Resident(params=10**9, moments=2 * 10**9, reference=4 * 10**9, weights=5 * 10**9, cache=6 * 10**9))
    program = Program("update", 3 * 10**9, 7 * 10**9, 9 * 10**9, 3 * 10**9, 15 * 10**9, 8e12, 40e9, 55.0, 99.0)
    text.program(program)
    text.fits(program)
    found = text.step([Phase("decode", 1, 30, 2), Phase("update", 20, 3, 4)])
    said = capsys.readouterr().out
    assert "32 chips of 8 hosts, 32 devices with 33.54 GB each" in said
    assert "state 3.00 GB, reference 4.00, sampler's weights 5.00 and slots 6.00; in all 18.00 GB" in said
    assert "update 3.00 7.00 9.00 3.00 24.00 40.00 8.0 55 s" in " ".join(said.split())
    assert "fits: the most is 24.00 GB of 33.54, in update; 9.54 GB are left" in said
    assert "in all 50.0 s, most of it decode, bound by memory" in said
    assert "100.0 s a step" in said and found["step_seconds"] == 100
    assert found["phases"][1] == {
        "name": "update",
        "compute": 20,
        "memory": 3,
        "links": 4,
        "seconds": 20,
        "bound": "compute",
    }


@pytest.mark.tpu_compile
def test_every_program_is_listed_with_what_it_needs(tmp_path, capsys):
    """Of four hosts, each of which samples with its own quarter of the devices."""
    pytest.importorskip("libtpu", reason="no TPU compiler: install the extra 'tpu'")
    rows = ("--training.rows_per_update", "32", "--training.row_tokens", "2048", "--training.accumulate", "2")
    plan_tpu.main([*NANO, "--topology", "v5e:4x4", *rows, "--json", str(tmp_path / "plan.json")])
    assert "fits: the most is" in capsys.readouterr().out
    plan = json.loads((tmp_path / "plan.json").read_text())
    names = [program["name"].split(",")[0] for program in plan["programs"]]
    assert names == ["update", "reference", "decode", "prefill", "prefill", "prefix", "share", "publish"]
    update = plan["programs"][0]
    assert update["donated"] >= 0.99 * plan["resident"]["state"]
    assert update["sent"] > 0 and update["flops"] > 0 and update["temporary"] > 0
    for program in plan["programs"]:
        assert program["whole"] >= plan["resident"]["all"]
    phases = [phase["name"] for phase in plan["roofline"]["phases"]]
    assert phases == ["publish", "prefill", "decode", "reference", "update"]


@pytest.mark.tpu_compile
def test_what_does_not_fit_ends_with_status_one_and_the_reason(tmp_path, capsys):
    pytest.importorskip("libtpu", reason="no TPU compiler: install the extra 'tpu'")
    file = tmp_path / "plan.json"
    flags = ["--config", "qwen7b", "--topology", "v5e:2x2", "--what", "sample", "--rows", "1", "--json", str(file)]
    with pytest.raises(SystemExit) as stop:
        plan_tpu.main(flags)
    assert stop.value.code == plan_tpu.DOES_NOT_FIT
    assert "does not fit: publish" in capsys.readouterr().out
    assert json.loads(file.read_text())["fits"] is False


@pytest.mark.tpu_compile
def test_a_suggestion_is_planned(capsys):
    pytest.importorskip("libtpu", reason="no TPU compiler: install the extra 'tpu'")
    rows = ("--training.rows_per_update", "8", "--training.row_tokens", "2048", "--training.accumulate", "2")
    plan_tpu.main([*NANO, *rows, "--what", "update", "--suggest"])
    said = capsys.readouterr().out
    assert "suggested: --mesh.data 1 --mesh.fsdp" in said
    assert "fits: the most is" in said
