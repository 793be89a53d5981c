"""Results are written before they are printed, and no terminal stops a command."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from memsearcher_jax.launch import cli, compare, evaluate
from tests.support import ScriptedPolicy


def test_a_full_stdout_loses_no_result(scripted, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(evaluate, "show_evaluation", full)
    flags = ["--evaluation.max_questions", "2", "--json", tmp_path / "j.json"]
    with pytest.raises(OSError, match="No space left"):
        scripted(lambda problem: ScriptedPolicy(["No.</think>\n\\boxed{unknown}"]), *flags, out="e")
    result = json.loads((tmp_path / "e" / "results.json").read_text())
    assert result == json.loads((tmp_path / "j.json").read_text())
    assert result["questions"] == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_behind_stdout_is_one_line():
    with Path("/dev/full").open("w") as full:
        source = "from memsearcher_jax.launch import cli; cli.run(lambda argv: print('result'))"
        done = subprocess.run([sys.executable, "-c", source], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == "error: stdout cannot be written (No space left on device): send it elsewhere\n"


def test_an_ascii_terminal_shows_escapes():
    source = "from memsearcher_jax.launch import cli; cli.run(lambda argv: print('Zoë 誰'))"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", source], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "Zo\\xeb \\u8ab0\n", "")


def test_error_lines_escape_control_characters(refused, tmp_path):
    line = refused(compare.main, [tmp_path / "\x1b[31mred\x07", tmp_path])
    assert "\\x1b[31mred\\x07" in line
    assert cli.printable("a\n b\t\x9b\u202e Zoë") == "a b \\x9b\\u202e Zoë"


def test_an_argument_that_is_not_utf8_is_an_error(refused):
    assert "the argument '\\udcff.jsonl' is not valid UTF-8" in refused(evaluate.main, ["--data", "\udcff.jsonl"])


def test_a_failing_report_does_not_fail_the_run(tmp_path, capsys):
    from memsearcher_jax.launch import tpu_train

    (tmp_path / "metrics.jsonl").write_text("damaged\x1b\n")
    tpu_train.write_report(tmp_path, tmp_path)
    line = capsys.readouterr().err
    assert line.startswith(f"{tmp_path}: no report (")
    assert line.endswith(f"launch/report.py {tmp_path}\n")
    assert line.count("\n") == 1
