"""Supervised steps through the same command, folder and checkpoints as reinforcement learning."""

import numpy as np
import pytest
import tpu_train

from memsearcher_jax.report.metrics import read_metrics

SMALL = """
    --config tiny_warmstart --model.layers 1 --model.embed_size 32 --model.ffn_size 64 --model.head_size 8
    --rl.problems 12 --rl.checkpoint_every 1 --demonstrations.measure_every 2 --demonstrations.histories 4
    --training.warmup_steps 0 --training.rows_per_update 8 --training.accumulate 1
"""


STREAMS = """
    --config tiny_memalpha_warmstart --model.layers 1 --model.embed_size 32 --model.ffn_size 64 --model.head_size 8
    --data.streams.train_streams 2 --data.streams.test_streams 1 --rl.problems 30 --demonstrations.measure_every 3
    --training.warmup_steps 0 --training.rows_per_update 8 --training.accumulate 1
"""


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    out = tmp_path_factory.mktemp("warmstart") / "run"
    tpu_train.main([*SMALL.split(), "--rl.steps", "4", "--out", str(out)])
    return out


def test_the_loss_falls_and_copying_is_measured(straight):
    steps = read_metrics(straight / "metrics.jsonl")
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.3
    assert ["copied/query" in step for step in steps] == [False, True, False, True]
    slots = ("query", "fact", "answer", "react/query", "react/answer")
    assert all(0 <= steps[-1][f"copied/{slot}"] <= 1 for slot in slots)
    assert "copied/react/fact" not in steps[-1], "a history has no memory to write facts into"
    assert 0.1 < np.mean([step["exact_match"] for step in steps]) < 0.6, "the script does the job badly"


@pytest.mark.slow
def test_a_resumed_warm_start_sees_the_worlds_that_it_would_have_seen(straight, tmp_path):
    out = tmp_path / "run"
    tpu_train.main([*SMALL.split(), "--rl.steps", "2", "--out", str(out)])
    tpu_train.main(["--resume", "--out", str(out), "--rl.steps", "4"])
    ours, theirs = (read_metrics(folder / "metrics.jsonl") for folder in (straight, out))
    for one, other in zip(ours, theirs, strict=True):
        assert {name: value for name, value in one.items() if not name.startswith("seconds/")} == {
            name: value for name, value in other.items() if not name.startswith("seconds/")
        }


def test_histories_that_fit_no_row_are_left_out_and_counted(tmp_path):
    """Who searches in vain again and again has a long one."""
    out = tmp_path / "run"
    tpu_train.main([*SMALL.split(), "--demonstrations.wrong_query", "1", "--rl.steps", "1", "--out", str(out)])
    (step,) = read_metrics(out / "metrics.jsonl")
    assert step["too_long"] > 0 and step["updates"] > 0


def test_streams_are_taught_by_the_same_command(tmp_path):
    out = tmp_path / "run"
    tpu_train.main([*STREAMS.split(), "--rl.steps", "3", "--out", str(out)])
    steps = read_metrics(out / "metrics.jsonl")
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.3
    slots = ("calls", "whole", "answer/person", "answer/event", "answer/fact", "answer/rule")
    assert all(0 <= steps[-1][f"copied/{slot}"] <= 1 for slot in slots)
    assert steps[-1]["too_long"] == 0
