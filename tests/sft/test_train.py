"""Supervised training with the command, folder and checkpoints of reinforcement learning."""

import os
import signal

import numpy as np
import pytest

from memsearcher_jax.launch import export_hf, tpu_train
from memsearcher_jax.logs.metrics import read_metrics
from memsearcher_jax.logs.progress import Progress
from memsearcher_jax.runtime import preemption

SMALL = """
    --config tiny_warmstart --model.layers 1 --model.embed_size 32 --model.ffn_size 64 --model.head_size 8
    --rl.prompts_per_step 12 --rl.checkpoint_every 1 --sft.measure_every 2 --sft.other_workflows react
    --sft.other_problems 4 --sft.wrong_query 0.5 --training.warmup_steps 0 --training.minibatch_rows 8
    --training.grad_accum_steps 1
"""


STREAMS = """
    --config tiny_memalpha_warmstart --model.layers 1 --model.embed_size 32 --model.ffn_size 64 --model.head_size 8
    --data.streams.train_streams 2 --data.streams.test_streams 1 --rl.prompts_per_step 30 --sft.measure_every 3
    --training.warmup_steps 0 --training.minibatch_rows 8 --training.grad_accum_steps 1
"""


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("warmstart") / "run"
    tpu_train.main([*SMALL.split(), "--rl.steps", "4", "--out", str(out)])
    return out


def test_loss_falls_and_held_out_probabilities_are_measured(run_folder):
    steps = read_metrics(run_folder / "metrics.jsonl")
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.3
    assert ["probability/query" in step for step in steps] == [False, True, False, True]
    spans = ("query", "fact", "answer", "react/query", "react/answer")
    assert all(0 <= steps[-1][f"probability/{span}"] <= 1 for span in spans)
    assert "probability/react/fact" not in steps[-1], "ReAct writes no facts to a memory"
    assert 0.1 < np.mean([step["exact_match"] for step in steps]) < 0.6, "demonstrations contain errors"


@pytest.mark.slow
def test_a_run_that_is_asked_to_stop_saves_a_checkpoint_and_can_be_resumed(run_folder, tmp_path, capsys):
    class StopAfterTheFirstStep(Progress):
        def advance(self, metrics):
            super().advance(metrics)
            os.kill(os.getpid(), signal.SIGTERM)

    out, flags = tmp_path / "run", [*SMALL.split(), "--rl.checkpoint_every", "9", "--rl.steps", "4"]
    with pytest.raises(SystemExit) as stop:
        tpu_train.main([*flags, "--out", str(out)], StopAfterTheFirstStep)
    assert stop.value.code == preemption.STOPPED
    assert "stopped after step 2 (SIGTERM" in capsys.readouterr().err
    tpu_train.main(["--resume", "--out", str(out)])
    assert_same_metrics(run_folder, out)


@pytest.mark.slow
def test_resumed_run_reproduces_the_metrics(run_folder, tmp_path):
    out = tmp_path / "run"
    tpu_train.main([*SMALL.split(), "--rl.steps", "2", "--out", str(out)])
    tpu_train.main(["--resume", "--out", str(out), "--rl.steps", "4"])
    assert_same_metrics(run_folder, out)


def assert_same_metrics(run_folder, out):
    expected, resumed = (read_metrics(folder / "metrics.jsonl") for folder in (run_folder, out))
    for one, other in zip(expected, resumed, strict=True):
        assert {name: value for name, value in one.items() if not name.startswith("time/")} == {
            name: value for name, value in other.items() if not name.startswith("time/")
        }


@pytest.mark.slow
def test_adapters_learn_from_demonstrations_and_are_exported(run_folder, tmp_path):
    out, adapter, merged = tmp_path / "run", tmp_path / "adapter", tmp_path / "merged"
    words = [*SMALL.split(), "--model.path", str(run_folder), "--model.lora_rank", "4", "--out", str(out)]
    tpu_train.main([*words, "--training.learning_rate", "1e-2", "--rl.steps", "4"])
    steps = read_metrics(out / "metrics.jsonl")
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.1
    export_hf.main(["--checkpoint", str(out), "--out", str(adapter), "--adapter"])
    export_hf.main(["--checkpoint", str(out), "--out", str(merged)])
    adapter_files = {"README.md", "curves.png", "adapter_config.json", "adapter_model.safetensors"}
    assert {file.name for file in adapter.iterdir()} == adapter_files
    assert (adapter / "adapter_model.safetensors").stat().st_size < (merged / "model.safetensors").stat().st_size / 3


def test_examples_longer_than_a_row_are_dropped_and_counted(run_folder):
    """Repeated failed searches make a ReAct history long."""
    steps = read_metrics(run_folder / "metrics.jsonl")
    assert sum(step["dropped_examples"] for step in steps) > 0
    assert all(step["updates"] > 0 for step in steps)


@pytest.mark.slow
def test_stream_policies_train_with_the_same_command(tmp_path):
    out = tmp_path / "run"
    tpu_train.main([*STREAMS.split(), "--rl.steps", "3", "--out", str(out)])
    steps = read_metrics(out / "metrics.jsonl")
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.3
    spans = ("calls", "store_all", "answer/person", "answer/event", "answer/fact", "answer/rule")
    assert all(0 <= steps[-1][f"probability/{span}"] <= 1 for span in spans)
    assert steps[-1]["dropped_examples"] == 0
