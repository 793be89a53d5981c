"""The device check, rehearsed on a CPU: a chip that is held or an old libtpu is a row that fails."""

import json
import os
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from memsearcher_jax.device_check import environment
from memsearcher_jax.device_check.rows import Row
from memsearcher_jax.device_check.speed import Scale, chip_of, speed_rows
from memsearcher_jax.launch import check_device
from memsearcher_jax.launch.cli import load_preset
from memsearcher_jax.planning.roofline import CHIPS
from tests.support import NANO


def test_sampler_and_trainer_are_compared_and_timed():
    rows = list(speed_rows(replace(NANO, layers=1), jax.devices()[0], Scale.of(small=True)))
    assert [row.name for row in rows] == ["sampler against trainer", "decode", "prefill", "update"]
    assert rows[0].passed and "nats" in rows[0].found
    assert all("tokens/s" in row.found for row in rows[1:])


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU7x", "tpu7x"),
        ("cpu", ""),
    ],
)
def test_the_chip_is_known_by_what_jax_calls_it(kind, name):
    assert chip_of(kind) == CHIPS.get(name)


@pytest.mark.parametrize(
    ("version", "requirement", "expected"),
    [
        ("0.0.17", "==0.0.42.*", False),
        ("0.0.42.1", "==0.0.42.*", True),
        ("0.0.17", ">=0.0.41", False),
        ("0.0.51", ">=0.0.41,<0.1", True),
        ("0.1.0", ">=0.0.41,<0.1", False),
    ],
)
def test_an_older_libtpu_than_jax_requires_is_found(version, requirement, expected, monkeypatch):
    monkeypatch.setattr(environment, "_version", lambda name: version if name == "libtpu" else "1.0")
    monkeypatch.setattr(environment, "required_libtpu", lambda: requirement)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    rows = {row.name: row for row in environment.version_rows()}
    assert rows["libtpu"].passed is expected


def test_jax_says_which_libtpu_it_requires():
    assert environment.required_libtpu()[0] in "=<>~"


def test_a_process_that_holds_a_chip_and_a_stale_lock_file_are_named(tmp_path):
    descriptors = tmp_path / "proc" / "4711" / "fd"
    descriptors.mkdir(parents=True)
    (descriptors.parent / "cmdline").write_bytes(b"python\0train.py\0")
    lock = tmp_path / "lock"
    assert [row.passed for row in environment.holder_rows(tmp_path / "proc", lock)] == [True]
    lock.touch()
    rows = list(environment.holder_rows(tmp_path / "proc", lock))
    assert rows[1].passed is False and rows[1].way_out == f"rm {lock}"
    os.symlink("/dev/vfio/0", descriptors / "7")
    rows = list(environment.holder_rows(tmp_path / "proc", lock))
    assert rows[0].found == "process 4711 (python train.py) holds /dev/vfio/0"
    assert rows[0].passed is False and "rm " not in rows[1].way_out


def test_the_disk_and_the_memory_are_measured(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 4000000 kB\n")
    disk, memory = environment.host_rows(tmp_path, tmp_path / "meminfo")
    assert disk.found.endswith(" GB") and (memory.found, memory.passed) == ("4 GB", False)


@pytest.mark.parametrize(
    ("variables", "chips"),
    [({"TPU_ACCELERATOR_TYPE": "v5litepod-8"}, 8), ({"TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1"}, 4), ({}, None)],
)
def test_the_environment_names_the_slice(variables, chips):
    assert environment.expected_chips(variables) == chips


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
    assert ("packed attention: 1.0; train with --model.attention xla" in printed) == wrong
    assert json.loads(file.read_text())["failed"] == int(wrong)
    assert str(Path.home()) not in printed


@pytest.mark.slow
def test_the_command_passes_on_a_cpu(capsys):
    check_device.main([])
    printed = capsys.readouterr().out
    assert " 0 failed" in printed and "two steps of nano" in printed
    assert load_preset("qwen05b").model.heads == 14  # whose shapes are the default
