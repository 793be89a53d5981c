"""The speeds that the device check shows, and its table and exit status, with rows that are given."""

import json
import os
from pathlib import Path

import pytest

from memsearcher_jax.device_check.rows import Row
from memsearcher_jax.device_check.speed import _speed_row
from memsearcher_jax.launch import check_device


def test_the_speed_is_a_share_of_the_peak_rate_and_of_a_plan():
    row = _speed_row("decode", tokens=900, seconds=2.0, bound=0.45)
    assert row.found == "450 tokens/s, 22% of the peak rate, 50% of a plan"
    assert row.expected == "900 tokens/s in a plan"
    assert _speed_row("decode", 900, 2.0, None).expected == "peak rates of this device are not known"


@pytest.mark.parametrize("wrong", [False, True])
def test_the_command_prints_one_table_and_exits_with_1_where_a_row_failed(wrong, tmp_path, monkeypatch, capsys):
    failing = Row("packed attention", "1.0", "at most 1e-04", False, "train with --model.attention xla")
    monkeypatch.setattr(check_device, "_kernel_rows", lambda *_: [failing] if wrong else [])
    monkeypatch.setattr(check_device, "_speed_rows", lambda *_: [Row("decode", "9 tokens/s", passed=None)])
    monkeypatch.setattr(check_device, "_nano_row", lambda: Row("two steps of nano", "done"))
    monkeypatch.setattr(check_device, "_before_jax", lambda: [Row("jax", "0.10.2")])
    file = tmp_path / "device.json"
    with pytest.raises(SystemExit) if wrong else open(os.devnull):
        check_device.main(["--json", str(file)])
    printed = capsys.readouterr().out
    last = printed.strip().splitlines()[-1]
    assert (last == "packed attention: 1.0; train with --model.attention xla") == wrong
    assert json.loads(file.read_text())["failed"] == int(wrong)
    assert str(Path.home()) not in printed


def test_a_row_names_neither_folders_nor_users_nor_the_machine(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setattr("getpass.getuser", lambda: "ada")
    monkeypatch.setattr("socket.gethostname", lambda: "t1v-n-42")
    row = Row("devices", "no /home/ada/x of ada on t1v-n-42, adapters", way_out="rm /home/ada/lock").without_names()
    assert row.found == "no ~/x of USER on HOST, adapters" and row.way_out == "rm ~/lock"
