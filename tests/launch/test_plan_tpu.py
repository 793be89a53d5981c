"""Planning for TPUs that are not there: what it prints, and what it refuses."""

import json

import plan_tpu
import pytest


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """The program's own variables, gone after the test."""
    for name, value in plan_tpu.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def test_a_topology_that_there_is_not_ends_in_one_line(refused):
    line = refused(plan_tpu.main, ["--config", "nano", "--topology", "v0:1x1"])
    assert "--topology v0:1x1: " in line
    assert "pip install libtpu" in line


def test_resuming_a_plan_is_refused(refused, finished):
    assert "a plan has nothing to go on with" in refused(plan_tpu.main, ["--resume", "--out", finished])


@pytest.mark.tpu_compile
def test_every_program_is_listed_with_what_it_needs(tmp_path, capsys):
    pytest.importorskip("libtpu", reason="no TPU compiler: install the extra 'tpu'")
    plan_tpu.main(["--config", "nano", "--json", str(tmp_path / "plan.json")])
    lines = capsys.readouterr().out.splitlines()
    programs = ["decode", "prefill", "prefill", "prefix", "share", "in"]
    assert [line.split(",")[0].split(" ")[0] for line in lines] == programs
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["peak"] == max(program["peak"] for program in plan["programs"])
    assert all(program["arguments"] > 0 for program in plan["programs"])


@pytest.mark.tpu_compile
def test_what_does_not_fit_a_chip_says_so(refused):
    line = refused(plan_tpu.main, ["--config", "qwen7b", "--topology", "v5e:2x2", "--sampling.slots", "128"])
    assert "exceeds available HBM" in line or "out of memory" in line.lower()
