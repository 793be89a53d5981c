"""benchmarks/gpu.py end to end at tiny sizes on the CPU, so that no minute of a rented GPU is lost."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.slow
def test_every_part_is_measured_on_a_cpu():
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, BENCHMARKS / "gpu.py", "--small", "--minutes", "15"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {line[10:82].strip(): line[82:].split() for line in done.stdout.splitlines()}
    left_out = {what.split(" left out")[0] for what in rows if "left out" in what}
    assert left_out <= {"torch", "shares"}, left_out
    assert rows["programs compiled after the warm-up"][0] == "0"
    for other in ("alone", "on the CPU"):
        assert rows[f"contexts that are sampled as {other}"] == ["8", "of", "8"]
    for what in ("tiny, 4 slots, tokens/s", "tiny, tokens/s", "seconds of a step", "- rollout"):
        assert float(rows[what][0].replace(",", "")) > 0
    assert "→" in rows["exact match before and after 1 steps"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [(["--train", "none"], "no such file: none"), ([], "there is no GPU: --small rehearses on a CPU")],
)
def test_what_cannot_run_at_all_is_one_line(flags, message):
    command = [sys.executable, BENCHMARKS / "gpu.py", *flags]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert (done.returncode, done.stderr) == (1, f"{message}\n")


def test_a_script_may_save_when_its_time_is_over(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import common

    script = tmp_path / "script.py"
    handler = "signal.signal(signal.SIGTERM, lambda *_: print('saved') or exit(3))"
    script.write_text(f"import signal, time\n{handler}\ntime.sleep(60)")
    assert common.run_child(script, seconds=1, stop=True) == "saved\n"
    with pytest.raises(SystemExit, match=r"script.py  took more than 1 s"):
        common.run_child(script, seconds=1)
