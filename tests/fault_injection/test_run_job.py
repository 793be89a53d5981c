"""Jobs of several hosts that are killed and stopped, and the checks of run_job.py."""

import json
import re
import time
from pathlib import Path

import pytest
import run_job
from faulty_host import Fault

from memsearcher_jax.logs.metrics import read_metrics

SMALL = """
    --model.layers 1 --model.embed_size 32 --model.ffn_size 64 --agent.completion_tokens 8 --agent.max_turns 2
    --sampling.slots 8 --rl.prompts_per_step 4 --rl.group_size 2 --rl.steps 4 --evaluation.max_questions 4
"""


def run(capsys, out: Path, flags: str, trainer: str) -> tuple[list[str], list[str]]:
    """Runs a job; returns the lines about attempts, and all lines."""
    run_job.main([*f"--config nano {flags} --out".split(), str(out), "--", *SMALL.split(), *trainer.split()])
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if line.startswith("attempt")], lines


@pytest.mark.slow
def test_a_job_survives_kills_and_a_stop(tmp_path, capsys, fast_compile):
    """The coordinator is killed during an update; another host gets SIGTERM during a rollout."""
    flags = "--sigterm 1@step1:rollout --kill 0@step2:update --kill 1@step3:write+0.2"
    attempts, lines = run(capsys, tmp_path / "all", flags, "--rl.checkpoint_every 1")
    assert "host 0 stopped (85), host 1 stopped (85)" in attempts[0]
    # A rollout of a fraction of a second may end before the host handles the signal: then it stops one step later.
    assert attempts[0].endswith(("newest checkpoint: step 1", "newest checkpoint: step 2"))
    assert "host 0 killed, host 1 stopped (85)" in attempts[1]
    # The checkpoint of step 2 is written during step 3: after an earlier kill, step 2 is repeated.
    assert attempts[1].endswith(("newest checkpoint: step 1", "newest checkpoint: step 2"))
    assert "killed" in attempts[2]
    assert "host 0 done, host 1 done" in attempts[3]
    assert lines[-1] == "passed: 3 restarts; the result is bit-identical to a job without faults"
    steps = read_metrics(tmp_path / "all" / "run" / "metrics.jsonl")
    assert all(step["logprob_diff_max"] < 1e-4 for step in steps), "each host samples with the published weights"
    assert any(re.search(r"stopped after step [12] \(SIGTERM on host 1\); checkpoint saved", line) for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "metric", "values"),
    [
        ("--rl.carry_over 1", "interrupted_tokens", None),
        ("--rl.refill 1", "refills", [1] * 4),  # the rewards are 0, so every group is replaced
        (
            "--rl.evaluate_every 2 --health.on_collapse rollback --health.max_entropy 0.001 --health.patience 2",
            "rollbacks",
            [0, 1, 1, 2],
        ),
    ],
)
def test_hosts_agree_after_a_kill_and_a_stop(settings, metric, values, tmp_path, capsys, fast_compile):
    """On what they carry, replace and roll back."""
    flags = f"--sigterm 1@step1:rollout --kill 0@step{2 if values is None else 3}:update"
    _, lines = run(capsys, tmp_path / "all", flags, f"--rl.checkpoint_every 1 {settings}")
    assert lines[-1] == "passed: 2 restarts; the result is bit-identical to a job without faults"
    steps = [step[metric] for step in read_metrics(tmp_path / "all" / "run" / "metrics.jsonl")]
    assert len(steps) == 4 and values in (None, steps)


@pytest.mark.slow
def test_a_single_host_saves_on_sigterm(tmp_path, capsys, fast_compile):
    flags = "--hosts 1 --devices 8 --sigterm 0@step1:update --sigterm 0@step3:rollout"
    attempts, lines = run(capsys, tmp_path / "all", flags, "--rl.checkpoint_every 4 --rl.evaluate_every 2")
    # A phase of a fraction of a second may end before the host handles the signal: then it stops one step later, and
    # after the last step not at all.
    assert attempts[0].endswith(("newest checkpoint: step 2", "newest checkpoint: step 3"))
    assert attempts[1].endswith(("newest checkpoint: step 3", "newest checkpoint: step 4"))
    assert lines[-1].startswith(("passed: 1 restart", "passed: 2 restarts"))


def test_a_fault_round_trips():
    for text in ("1@step2:update", "0@step0:rollout+0.5"):
        assert str(Fault.parse("kill", text)) == f"kill {text}"
    for text in ("step2:update", "1@2:update", "1@step2:sleep", "1@step2", "1@step2:update+-1"):
        with pytest.raises(ValueError, match="write HOST@stepN:PHASE"):
            Fault.parse("kill", text)


def test_invalid_flags_are_rejected(refused, misused):
    error = refused(run_job.main, ["--config", "nano", "--kill", "2@step0:update"])
    assert "--kill: there is no host 2: they are 0 to 1" in error
    assert "Perhaps you meant: --rl.steps" in misused(run_job.main, ["--config", "nano", "--", "--rl.stepz", "3"])


def finished(folder: Path, *, checksum="00ff", position=8, loss=0.5, step=2) -> Path:
    """Writes the files of a finished job that `differences` reads."""
    checkpoint = folder / "checkpoints" / str(step)
    (checkpoint / "meta").mkdir(parents=True)
    (checkpoint / "_CHECKPOINT_METADATA").write_text("{}")
    checksums = {item: {"embed": checksum, "norm": "1"} for item in ("params", "optimizer")}
    meta = {"array_checksums": checksums, "run": {"position": position}}
    (checkpoint / "meta" / "metadata").write_text(json.dumps(meta))
    lines = [json.dumps({"step": step, "loss": loss, "time/update": time.time()}) + "\n" for step in range(2)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"checksum": "00fe"}, ["params: 1 of 2 arrays, such as embed", "optimizer: 1 of 2 arrays, such as embed"]),
        ({"position": 9}, ["position: {'position': 8} and {'position': 9}"]),
        ({"loss": 0.25}, ["loss of steps [0, 1]"]),
        ({"step": 1}, ["the newest checkpoints are of steps 2 and 1"]),
    ],
)
def test_differences_reports_every_difference(changes, expected, tmp_path):
    assert run_job.differences(finished(tmp_path / "first"), finished(tmp_path / "other", **changes)) == expected
