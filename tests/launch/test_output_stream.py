"""Results are written before they are printed, and no terminal stops a command."""

import errno
import json
import signal
import subprocess
import sys
import time
from functools import partial
from subprocess import PIPE

import jax
import pytest

from memsearcher_jax.launch import cli, compare, evaluate, outputs
from tests.support import ScriptedPolicy


def test_a_full_stdout_loses_no_result(scripted, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(evaluate, "show_results", full)
    flags = ["--evaluation.max_questions", "2", "--json", tmp_path / "j.json"]
    with pytest.raises(OSError, match="No space left"):
        scripted(lambda problem: ScriptedPolicy(["No.</think>\n\\boxed{unknown}"]), *flags, out="e")
    result = json.loads((tmp_path / "e" / "results.json").read_text())
    assert result == json.loads((tmp_path / "j.json").read_text())
    assert result["questions"] == 2


def test_a_command_whose_output_nobody_reads_does_not_succeed():
    """A training whose log collector has died is not complete."""
    main = "lambda _: (logging.getLogger('gcsfs').error('raised, too'), sys.stderr.write('x\\n'))"
    source = f"import logging, sys; from memsearcher_jax.launch import cli; cli.run({main})"
    assert subprocess.run([sys.executable, "-c", source], stderr=PIPE, text=True).stderr == "x\n"
    with subprocess.Popen([sys.executable, "-c", source], stdout=PIPE, stderr=PIPE) as process:
        process.stderr.close()
        assert process.wait(60) == 141
    assert subprocess.run(["sh", "-c", '"$0" -c "$1" >&- 2>&-', sys.executable, source]).returncode == 0, "without both"


@pytest.mark.parametrize(
    ("runs", "number"),
    [
        ("cli.run(lambda argv: (print('started', flush=True), time.sleep(60)))", signal.SIGINT),
        ("cli.run(lambda argv: (print('started', flush=True), time.sleep(60)))", signal.SIGTERM),
        ("cli.run(lambda argv: (print('started', flush=True), wait_in_c()))", signal.SIGINT),
        ("cli.run(swallowed)", signal.SIGTERM),
        ("interrupts.end_at_once(); print('started', flush=True); time.sleep(60)", signal.SIGINT),
    ],
)
def test_an_interrupt_ends_a_command_with_one_line(number, runs):
    """Also while it waits in C, as for a compiler, while it imports, and where a library makes another error of it."""
    source = f"""
import hashlib, time
from memsearcher_jax.launch import cli, interrupts
def wait_in_c():
    hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)
def swallowed(argv):
    try:
        print('started', flush=True)
        time.sleep(60)
    except BaseException as error:
        raise ImportError from error
{runs}
"""
    # Whoever starts the tests in the background ignores SIGINT, and a child inherits that.
    heed = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    command = [sys.executable, "-c", source]
    with subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True, preexec_fn=heed) as process:
        try:
            assert process.stdout.readline() == "started\n"
            process.send_signal(number)
            before = time.monotonic()
            assert process.wait(60) == 130
            assert time.monotonic() - before < 10  # 3 by the command, the others for a loaded machine
            assert process.stderr.read() == "stopped\n"
        finally:
            process.kill()


def test_error_lines_escape_control_characters_and_arguments_are_utf8(refused, tmp_path):
    line = refused(compare.main, [tmp_path / "\x1b[31mred\x07", tmp_path])
    assert "\\x1b[31mred\\x07" in line
    assert outputs.printable("a\n b\t\x9b\u202e Zoë") == "a b \\x9b\\u202e Zoë"
    assert "the argument '\\udcff.jsonl' is not valid UTF-8" in refused(evaluate.main, ["--data", "\udcff.jsonl"])
    for flag in ("--json", "--out"):
        assert f"{flag} gs://b/x: only --out of training" in refused(evaluate.main, [flag, "gs://b/x"])


def test_a_platform_that_jax_does_not_find_is_an_error(refused):
    def main(argv):
        with cli.one_line_errors():
            jax.devices("none")

    assert "JAX finds no device (RuntimeError: Unknown backend none" in refused(main, [])


def test_the_memory_of_a_device_that_does_not_suffice_is_a_line_with_a_way_out(capsys):
    """XLA's other lines list what is allocated. An error of another kind is a bug."""
    message = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 18.2G of 15.7G hbm.\nallocations: ..."
    with pytest.raises(SystemExit) as stop, cli.one_line_errors("rerun with --resume"):
        raise jax.errors.JaxRuntimeError(message)
    assert stop.value.code == 1
    assert capsys.readouterr().err == (
        "error: the memory of a device does not suffice (RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. "
        "Used 18.2G of 15.7G hbm.): plan_tpu.py --suggest finds settings that fit, and tpu_train.py --suggest uses "
        "them; rerun with --resume\n"
    )
    with pytest.raises(jax.errors.JaxRuntimeError), cli.one_line_errors("rerun with --resume"):
        raise jax.errors.JaxRuntimeError("INTERNAL: RESOURCE_EXHAUSTED is not at the beginning")


def test_a_failing_report_does_not_fail_the_run(tmp_path, capsys):
    from memsearcher_jax.launch import job_output

    (tmp_path / "metrics.jsonl").write_text("damaged\x1b\n")
    assert job_output.write_report(tmp_path, tmp_path) == ""
    line = capsys.readouterr().err
    assert line.startswith(f"{tmp_path}: no report (")
    assert line.endswith(f"launch/report.py {tmp_path}\n")
    assert line.count("\n") == 1
