"""Jobs of several hosts that are killed and stopped; what a rehearsal says of them."""

import argparse
import json
import os
import signal
import time
from pathlib import Path

import cli
import host
import jax
import pytest
from pod import rehearse, rehearsed

from memsearcher_jax.rl.hosts import Hosts, Interrupted, Stopped

SMALL = """
    --model.layers 1 --model.embed_size 32 --model.ffn_size 64 --agent.reply_tokens 8 --agent.max_turns 2
    --sampling.slots 8 --rl.problems 4 --rl.rollouts 2 --rl.steps 4 --evaluation.questions 4
"""


@pytest.mark.slow
def test_a_job_survives_kills_and_a_stop(tmp_path, capsys, quick_to_compile):
    """The host that all others depend on is killed while it updates; another is told to stop while it samples."""
    faults = ["--term", "1@step1:rollout", "--kill", "0@step2:update", "--kill", "1@step3:write+0.2"]
    rehearse.main(
        [
            "--config",
            "nano",
            *faults,
            "--out",
            str(tmp_path / "all"),
            "--",
            *SMALL.split(),
            "--rl.checkpoint_every",
            "1",
        ]
    )
    said = capsys.readouterr().out.splitlines()
    attempts = [line for line in said if line.startswith("attempt")]
    assert "host 0 85, start again, host 1 85, start again" in attempts[0]
    assert "newest checkpoint: step 1" in attempts[0]
    assert "host 0 killed, host 1 85, start again" in attempts[1]
    # The checkpoint of step 2 is written beside step 3: where the kill came first, one more step is done again.
    assert attempts[1].endswith(("newest checkpoint: step 1", "newest checkpoint: step 2"))
    assert "killed" in attempts[2]
    assert "host 0 done, host 1 done" in attempts[3]
    assert said[-1] == "right: 3 restarts, and all is bit for bit as in an undisturbed job"
    assert any("stopped after step 1 (SIGTERM on host 1); all until then is saved" in line for line in said)


@pytest.mark.slow
def test_one_host_alone_saves_when_it_is_told_to_stop(tmp_path, capsys, quick_to_compile):
    flags = [*SMALL.split(), "--rl.checkpoint_every", "4", "--rl.evaluate_every", "2"]
    stops = ["--term", "0@step1:update", "--term", "0@step3:rollout"]
    shape = ["--processes", "1", "--devices", "8"]
    rehearse.main(["--config", "nano", *shape, *stops, "--out", str(tmp_path / "all"), "--", *flags])
    said = capsys.readouterr().out.splitlines()
    attempts = [line for line in said if line.startswith("attempt")]
    assert "newest checkpoint: step 2" in attempts[0]
    assert "newest checkpoint: step 3" in attempts[1]
    assert said[-1].startswith("right: 2 restarts")


def test_sigterm_breaks_a_rollout_off_and_ends_with_85(capsys):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as end, host.joined() as hosts:
        hosts.check()
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(100):
            if hosts.stopping.is_set():
                break
            time.sleep(0.05)
        with pytest.raises(Interrupted):
            hosts.check()
        raise hosts.stopped(7)
    assert end.value.code == 85
    assert capsys.readouterr().err == "stopped after step 7 (SIGTERM on host 0); all until then is saved\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_where_nobody_looks_sigterm_is_left_as_it_is():
    before = signal.getsignal(signal.SIGTERM)
    with host.joined(stops=False):
        assert signal.getsignal(signal.SIGTERM) is before


def test_other_errors_go_through():
    with pytest.raises(KeyError), host.joined():
        raise KeyError("x")


def test_the_loss_of_another_host_is_told_from_an_error_of_its_own():
    """The messages are those of JAX 0.10.2."""
    gloo = ValueError("UNKNOWN: Gloo AllGather failed: [pair.cc:547] Connection closed by peer [127.0.0.1]:25495")
    barrier = jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: Barrier timed out. Id: save")
    for lost in (gloo, barrier):
        with pytest.raises(SystemExit) as end:
            try:
                try:
                    raise lost
                except Exception as error:
                    raise OSError("a checkpoint is not written") from error
            except OSError:
                raise SystemExit(1) from None
        assert host._is_of_another(lost)
        assert host._is_of_another(end.value)
    for own in (
        ValueError("UNAVAILABLE"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"),
        SystemExit(2),
    ):
        assert not host._is_of_another(own)


def test_a_stop_names_its_reason():
    hosts = Hosts()
    hosts.stop("SIGTERM on host 3")
    hosts.stop("later")
    assert isinstance(hosts.stopped(2), Stopped)
    assert str(hosts.stopped(2)) == "stopped after step 2 (SIGTERM on host 3); all until then is saved"


@pytest.mark.parametrize("text", ["1@step2:update", "0@step0:rollout+0.5"])
def test_faults_are_read_and_written_alike(text):
    assert rehearsed.named(rehearse.fault("kill")(text)) == f"kill {text}"


@pytest.mark.parametrize("text", ["step2:update", "1@2:update", "1@step2:sleep", "1@step2", "1@step2:update+-1"])
def test_what_is_no_fault_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is no HOST@stepN:PHASE"):
        rehearse.fault("kill")(text)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--config nano --kill 2@step0:update", "--kill is for host 2, and there are 2, from 0"),
        ("--config nano --kill step0:update", "is no HOST@stepN:PHASE"),
        ("--config nano -- --rl.stepz 3", "did you mean --rl.steps"),
        ("--processes 2", "--config"),
    ],
)
def test_a_wrong_rehearsal_is_refused(flags, line, refused):
    assert line in refused(rehearse.main, flags.split())


def finished(folder: Path, **changes) -> Path:
    """What a job leaves, as far as a rehearsal looks at it."""
    values = {"digest": "00ff", "position": 8, "loss": 0.5, "step": 2} | changes
    step = folder / "checkpoints" / str(values["step"])
    (step / "meta").mkdir(parents=True)
    (step / "_CHECKPOINT_METADATA").write_text("{}")
    digests = {item: {"embed": values["digest"], "norm": "1"} for item in ("params", "optimizer")}
    (step / "meta" / "metadata").write_text(json.dumps({"digests": digests, "run": {"position": values["position"]}}))
    lines = [{"step": step, "loss": values["loss"], "seconds/update": time.time()} for step in range(2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, []),
        ({"digest": "00fe"}, ["params: 1 of 2 arrays, embed among them", "optimizer: 1 of 2 arrays, embed among them"]),
        ({"position": 9}, ["position: {'position': 8} and {'position': 9}"]),
        ({"loss": 0.25}, ["loss of steps [0, 1]"]),
        ({"step": 1}, ["the newest checkpoints are of steps 2 and 1"]),
    ],
)
def test_every_difference_is_found(changes, found, tmp_path):
    assert rehearse.differences(finished(tmp_path / "one"), finished(tmp_path / "other", **changes)) == found


def test_statuses_in_words():
    assert rehearse.said([0, 85, -9, -14, 1]) == (
        "host 0 done, host 1 85, start again, host 2 killed, host 3 hung, host 4 ended with 1"
    )
    assert cli.INTERRUPTED != host.STOPPED
