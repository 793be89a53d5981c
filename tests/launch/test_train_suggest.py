"""Training whose settings are chosen for the devices that are present: in place of a TPU, those of the tests."""

import re
from dataclasses import replace

import jax
import pytest

from memsearcher_jax.config import settings
from memsearcher_jax.launch import tpu_train
from memsearcher_jax.planning import present_devices, suggest, tpu_plan
from memsearcher_jax.planning.roofline import Topology
from memsearcher_jax.runs.run_dir import read_run_config
from memsearcher_jax.training.checkpoint import latest_step
from tests.support import with_flags


@pytest.fixture
def on_tpu(monkeypatch):
    """Commands take the eight devices of the tests for a v5e:2x4 with this much memory of each."""

    def stand_in(hbm_bytes=16e9):
        topology = Topology.of("v5e", (2, 4), jax.devices(), jax.local_devices())
        topology = replace(topology, chip=replace(topology.chip, hbm_bytes=hbm_bytes))
        monkeypatch.setattr(present_devices, "present_topology", lambda *_: topology)

    return stand_in


@pytest.mark.slow
def test_a_run_is_trained_with_the_settings_that_are_chosen_and_keeps_them(small, on_tpu, tmp_path, capsys):
    """Six slots are too few for eight devices, so the settings as they are would be refused."""
    on_tpu()
    out = tmp_path / "run"
    flags = with_flags(small, "--sampling.slots", "6", "--rl.steps", "1")
    tpu_train.main([*flags, "--suggest", "--out", str(out)])
    errors = capsys.readouterr().err
    found = re.search(rf"^{out}: settings for v5e:2x4: (.*); update \d", errors, re.MULTILINE)
    assert found, errors
    stored = read_run_config(out)
    for flag, value in re.findall(r"--(\S+) (\S+)", found[1]):
        assert flag in suggest.SETTINGS and str(settings(stored)[flag]) == value
    assert stored.sampling.slots == 8 and latest_step(out / "checkpoints") == 1

    flags = ["--resume", "--suggest", "--out", str(out), "--rl.steps", "2"]
    tpu_train.main(flags)
    errors = capsys.readouterr().err
    assert f"{out}: --suggest changes nothing after the first checkpoint, of step 1\n" in errors
    assert "trying" not in errors and suggest.chosen_settings(read_run_config(out)) == suggest.chosen_settings(stored)


def test_settings_that_exceed_the_devices_are_refused_before_weights_are_loaded(small, on_tpu, refused, tmp_path):
    on_tpu(hbm_bytes=1e5)
    line = refused(tpu_train.main, [*small, "--out", tmp_path / "run"])
    assert "update needs at least 0.00 GB" in line and "try a larger slice" in line
    line = refused(tpu_train.main, [*small, "--suggest", "--out", tmp_path / "run"])
    assert "nothing fits v5e:2x4 by its lower bound: try a larger slice" in line
    assert not (tmp_path / "run").exists()


def test_a_compiler_that_fails_ends_the_run_in_one_line(small, on_tpu, refused, tmp_path, monkeypatch, capsys):
    def programs(*_):
        raise tpu_plan.CompilerError("the TPU compiler failed on the program 'update'")

    on_tpu()
    monkeypatch.setattr(tpu_plan, "training_programs", programs)
    with pytest.raises(SystemExit):
        tpu_train.main([*small, "--suggest", "--out", str(tmp_path / "run")])
    assert capsys.readouterr().err.splitlines()[-1] == "error: the TPU compiler failed on the program 'update'"


def test_what_cannot_be_planned_is_refused(small, refused, tmp_path):
    out = ["--suggest", "--out", tmp_path / "run"]
    line = refused(tpu_train.main, [*small, *out])
    assert line == "error: --suggest is for TPUs, and this is cpu: omit it"
    line = refused(tpu_train.main, ["--config", "tiny_memalpha", *out])
    assert "frozen answerers and judges are not planned: set their backend" in line
