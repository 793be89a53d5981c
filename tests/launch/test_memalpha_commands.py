"""Mem-alpha by its commands: a short training run, evaluations with each reader, and what is refused early."""

import json
import shutil

import ask
import evaluate
import pytest
import tpu_train

from memsearcher_jax.report.metrics import read_metrics
from memsearcher_jax.report.trajectories import read_trajectories

SETTINGS = {
    "agent.reply_tokens": 16,
    "memalpha.answer_tokens": 6,
    "data.streams.train_streams": 4,
    "data.streams.train_chunks": 2,
    "data.streams.test_streams": 4,
    "data.streams.test_chunks": "2 5",
    "data.streams.questions": 3,
    "sampling.slots": 8,
    "training.rows_per_update": 8,
    "rl.steps": 2,
    "rl.problems": 2,
    "rl.rollouts": 2,
    "rl.checkpoint_every": 1,
    "rl.evaluate_every": 2,
    "evaluation.questions": 2,
}
SMALL = ["--config", "tiny_memalpha"]
SMALL += [word for name, value in SETTINGS.items() for word in (f"--{name}", *str(value).split())]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memalpha") / "run"
    tpu_train.main([*SMALL, "--out", str(folder)])
    return folder


@pytest.mark.slow
def test_a_run_reads_asks_and_learns(trained):
    first, last = read_metrics(trained / "metrics.jsonl")
    for name in ("reward", "accuracy", "accuracy/generated", "compression", "memory_tokens", "calls_failed"):
        assert name in first and name in last
    assert {"test/accuracy", "test/reward"} <= last.keys() - first.keys()
    assert first["stop/remembered"] == 1.0 and first["updates"] >= 1
    batch = list(read_trajectories(trained / "trajectories" / "step_000001.jsonl.gz"))
    assert [len(one.context_rewards) for one in batch] == [len(one.trajectory.contexts) for one in batch] == [2] * 4


@pytest.mark.slow
def test_a_run_goes_on(trained, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(trained, copy)
    tpu_train.main(["--resume", "--out", str(copy), "--rl.steps", "3"])
    assert [step["step"] for step in read_metrics(copy / "metrics.jsonl")] == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("reader", ["memory", "long_context", "rag"])
def test_an_evaluation_by_source_with_each_reader(trained, tmp_path, capsys, reader):
    folder = tmp_path / "evaluation"
    evaluate.main(["--checkpoint", str(trained), "--out", str(folder), "--memalpha.reader", reader])
    result = json.loads((folder / "results.json").read_text())
    assert list(result["streams"]) == ["generated", "generated, 2 chunks", "generated, 5 chunks"]
    told = result["streams"]["generated"]
    assert (told["streams"], told["questions"]) == (2, 6)
    assert set(told["kinds"]) <= {"person", "event", "fact", "rule"} and 0 <= told["accuracy"] <= 1
    kept = {"memory": None, "long_context": min(told["stream_tokens"], 128), "rag": told["stream_tokens"]}[reader]
    if kept is not None:
        assert told["memory_tokens"] <= kept and told["memory_tokens"] > 0
    assert "generated, 5 chunks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--workflow", "memalpha", "--checkpoint", "x"], "no such folder"),
        (
            ["--config", "tiny_memalpha", "--sweep", "agent.memory_tokens=1,2", "--model.path", "package:tiny"],
            "--sweep",
        ),
    ],
)
def test_what_cannot_be_evaluated(flags, message, capsys, tmp_path):
    with pytest.raises(SystemExit):
        evaluate.main([*flags, "--out", str(tmp_path / "evaluation")])
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "evaluation").exists()


def test_a_reader_of_streams_takes_no_single_question(capsys):
    with pytest.raises(SystemExit):
        ask.main(["--config", "tiny_memalpha", "--human", "Who?"])
    assert "takes no single question" in capsys.readouterr().err
