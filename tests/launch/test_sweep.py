"""launch/sweep.py: a run and an evaluation for each value, and a stopped sweep continues."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from memsearcher_jax.agent import prompts as templates
from memsearcher_jax.launch import cli, evaluate, sweep, tpu_train
from memsearcher_jax.runs.inputs import keep_inputs
from memsearcher_jax.runs.run_dir import read_run_config, write_run_config
from tests.support import with_flags

TEMPLATES = Path(templates.__file__).parent / "templates" / "default" / "memsearcher"


@pytest.mark.slow
def test_every_value_is_trained_and_evaluated_and_a_stopped_sweep_continues(small, tmp_path, fast_compile):
    out = tmp_path / "sweep"
    words = with_flags(small, "--rl.steps", "1")
    command = [sys.executable, sweep.__file__, "--setting", "reward.wrong_answer=0,0.3", "--out", out, "--", *words]
    subprocess.run(command, check=True)
    first, second = (out / f"reward.wrong_answer={value}" for value in ("0", "0.3"))
    table = json.loads((out / "sweep.json").read_text())["table"]
    assert [row["value"] for row in table] == ["0", "0.3"]
    for folder, row in zip((first, second), table, strict=True):
        assert read_run_config(folder).reward.wrong_answer == float(row["value"])
        results = json.loads((folder / "test" / "results.json").read_text())
        assert (row["questions"], results["checkpoint"], results["step"]) == (4, str(folder), 1)
        assert row["scores"] == results["evaluation"]["averages"]["macro"]
    assert (out / "sweep.png").is_file()

    (second / "test" / "results.json").unlink()  # as if it had been stopped
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.jsonl")} | {
        path: path.stat().st_mtime_ns for path in (first / "test").rglob("*")
    }
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert json.loads((out / "sweep.json").read_text())["table"] == table
    assert f"{out}: 2 evaluations; plotted in {out / 'sweep.png'}" in done.stdout


@pytest.mark.slow
def test_flags_and_streams_are_swept_in_evaluations(tmp_path, fast_compile):
    for values, flags in (
        ("workflow=react,direct", "--config tiny_warmstart --retrieval.index_type exact --model.path package:tiny"),
        ("memalpha.retrieved_items=1,2", "--config tiny_memalpha --model.path package:tiny_memalpha"),
    ):
        out = tmp_path / values
        words = [*flags.split(), "--evaluation.max_questions", "2"]
        subprocess.run([sys.executable, sweep.__file__, "--evaluate", "--setting", values, "--out", out, "--", *words])
        table = json.loads((out / "sweep.json").read_text())["table"]
        assert [row["value"] for row in table] == values.partition("=")[2].split(",")
        assert all({"mean", "low", "high"} <= set(score) for row in table for score in row["scores"].values())


def test_flags_that_tyro_refuses_are_named_before_the_first_run(misused, tmp_path):
    for setting, name in (("rl.credit=none", "--rl.credit"), ("rl.stepz=3", "--rl.steps")):
        argv = ["--setting", setting, "--out", tmp_path / "out", "--", "--data.test", "q.jsonl"]
        assert name in misused(sweep.main, [*argv, "--retrieval.corpus", "c.jsonl"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_at_the_end_of_a_program_starts_no_other(number, tmp_path):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background of a shell ignore it
    source = f"import os, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nos.kill(os.getppid(), {number})\n"
    (program := tmp_path / "program.py").write_text(source)
    with pytest.raises(KeyboardInterrupt):
        sweep.start(program, tmp_path, [], os.environ)


def test_a_run_of_other_settings_is_not_reported_as_one_of_these(small, tmp_path, refused):
    folder = tmp_path / "out" / "seed=0"
    folder.mkdir(parents=True)
    write_run_config(folder, cli.parse(tpu_train.Train, small).run)
    words = ["--setting", "seed=0,1", "--out", tmp_path / "out", "--", *with_flags(small, "--rl.steps", "3")]
    assert "--out cannot follow --" in refused(sweep.main, [*words, "--out=x"])
    error = refused(sweep.main, [*words, "--training.learning_rate", "1e-4"])
    assert f"training.learning_rate is 0.001 in {folder} and 0.0001 here: choose another --out" in error


def test_a_run_of_an_agent_that_was_edited_is_not_reported(small, tmp_path, refused):
    agent = tmp_path / "my_agent.py"
    agent.write_text((Path(__file__).parents[2] / "examples" / "my_agent.py").read_text())
    folder = tmp_path / "out" / "seed=0"
    folder.mkdir(parents=True)
    flags = [*small, "--agent.workflow", str(agent), "--agent.tools", str(agent)]
    config = cli.parse(tpu_train.Train, flags).run
    write_run_config(folder, config)
    keep_inputs(folder, config, None, weights=False)
    point = sweep.Point("0", flags, folder, config)
    assert not sweep.is_done(point)
    (folder / "results.json").write_text('{"questions": 1}')
    assert sweep.is_done(point)
    agent.write_text(agent.read_text() + "\nCHANGED = True\n")
    line = refused(sweep.main, ["--setting", "seed=0,1", "--out", tmp_path / "out", "--", *flags])
    assert f"my_agent.py differs from the file that {folder} was made with" in line


@pytest.mark.parametrize(
    ("changed", "evaluates"),
    [
        ("train.jsonl", False),
        ("test.jsonl", False),
        ("test.jsonl", True),
        ("corpus.jsonl", True),
        ("prompts/system.txt", True),
    ],
)
def test_a_run_of_files_that_have_changed_is_not_reported(changed, evaluates, questions, corpus, tmp_path, refused):
    questions("train.jsonl", "Who wrote it?")
    questions("test.jsonl", "Who read it?")
    prompts = shutil.copytree(TEMPLATES, tmp_path / "prompts")
    flags = ["--config", "nano", "--data.test", f"{tmp_path}/test.jsonl", "--retrieval.corpus", str(corpus)]
    flags += ["--agent.prompts", str(prompts)]
    command: type = evaluate.Evaluate
    if not evaluates:
        flags += ["--data.train", f"{tmp_path}/train.jsonl"]
        command = tpu_train.Train
    config = cli.parse(command, [*flags, "--seed", "0"]).run
    folder = tmp_path / "out" / "seed=0"
    folder.mkdir(parents=True)
    write_run_config(folder, config)
    keep_inputs(folder, config, None)
    point = sweep.Point("0", flags, folder, config)
    sweep.require_same_inputs(point, weights=not evaluates)
    file = tmp_path / changed
    file.write_text(file.read_text() + "\n" + file.read_text())
    words = ["--setting", "seed=0,1", "--out", tmp_path / "out", *["--evaluate"] * evaluates, "--", *flags]
    line = refused(sweep.main, words)
    assert f"has changed since {folder} was made: restore it, or choose another --out" in line
    file.unlink()
    assert f"has changed since {folder} was made" in refused(sweep.main, words)
