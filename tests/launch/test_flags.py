"""Mistakes on the command line that are seen before anything is opened: each is one line with a way out."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import ask
import cli
import evaluate
import export_hf
import pytest
import tpu_train

from memsearcher_jax.config import settings
from memsearcher_jax.data.problems import Problems

LAUNCH = Path(cli.__file__).parent


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--config nope", "no preset 'nope': choose one of memalpha_4b, nano, qwen05b, qwen3_4b, qwen3b, qwen7b, "),
        ("--rl.stepz 3", "no setting '--rl.stepz': did you mean --rl.steps?"),
        ("--rl.checkpoint-evry 3", "did you mean --rl.checkpoint_every?"),
        ("--chekpoint x", "did you mean --checkpoint?"),
        ("--xyzzy=3", "no setting '--xyzzy': --help lists all settings"),
        ("rl.steps 3", "'rl.steps' belongs to no setting: settings are written --section.field value"),
        ("--rl.steps many", "--rl.steps: 'many' is no whole number"),
        ("--rl.steps 1.5", "--rl.steps: '1.5' is no whole number"),
        ("--rl.steps", "Missing value for argument '--rl.steps'"),
        ("--training.learning_rate fast", "--training.learning_rate: 'fast' is no number"),
        (
            "--agent.workflow chat",
            "invalid choice 'chat' for argument '--agent.workflow'. Expected one of ('memsearcher'",
        ),
        ("--model.tied perhaps", "'perhaps'"),
        ("--out", "--out: expected one argument"),
    ],
)
def test_a_flag_that_cannot_be_read(flags, line, refused, tmp_path):
    assert line in refused(tpu_train.main, ["--out", tmp_path / "run", *flags.split()])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("setting", "value", "line"),
    [
        ("seed", "-1", "seed is -1: it must be at least 0"),
        ("rl.steps", "0", "rl.steps is 0: it must be at least 1 and at most 10,000,000"),
        ("rl.problems", "-4", "rl.problems is -4"),
        ("rl.rollouts", str(10**12), "rl.rollouts is 1000000000000: it must be at least 1 and at most 10,000,000"),
        ("rl.evaluate_every", "-1", "rl.evaluate_every is -1: it must be at least 0"),
        ("training.learning_rate", "nan", "training.learning_rate is nan: it must be above 0 and finite"),
        ("training.learning_rate", "inf", "training.learning_rate is inf"),
        ("training.learning_rate", "0", "training.learning_rate is 0.0"),
        ("training.kl_coefficient", "-0.1", "training.kl_coefficient is -0.1: it must be at least 0 and finite"),
        ("training.adam_b2", "1", "training.adam_b2 is 1.0: it must be at least 0 and below 1"),
        ("training.clip_c", "1", "training.clip_c is 1.0: it must be above 1"),
        ("sampling.temperature", "0", "sampling.temperature is 0.0: it must be above 0"),
        ("sampling.top_p", "0", "sampling.top_p is 0.0: it must be above 0 and at most 1"),
        ("sampling.top_p", "1.01", "sampling.top_p is 1.01"),
        ("sampling.top_k", "-1", "sampling.top_k is -1"),
        ("sampling.prefill_buckets", "0 64", "sampling.prefill_buckets is 0: it must be at least 1"),
        (
            "sampling.prefill_buckets",
            "256 64",
            "sampling.prefill_buckets is 256 64: give at least one width, ascending",
        ),
        ("sampling.prefill_buckets", "", "sampling.prefill_buckets is empty: give at least one width, ascending"),
        ("sampling.prefill_buckets", "64 100", "is 64 100: give multiples of sampling.prefill_piece 32"),
        ("sampling.context_tokens", "900", "900 is more than training.row_tokens 768"),
        ("agent.reply_tokens", "200", "a turn may need 816 tokens and its templates"),
        ("agent.default_top_n", "21", "agent.default_top_n 21 is more than agent.max_top_n 20"),
        ("model.max_positions", "512", "sampling.context_tokens 768 is more than model.max_positions 512"),
        ("model.heads", "3", "model.heads 3 is no multiple of model.kv_heads 2"),
        ("model.head_size", "15", "model.head_size 15 is odd"),
        ("training.accumulate", "3", "training.rows_per_update 8 is no multiple of training.accumulate 3"),
        ("training.logit_chunk", "100", "training.row_tokens 768 is no multiple of training.logit_chunk 100"),
        ("retrieval.encoder_size", "0", "retrieval.encoder_size is 0"),
        ("retrieval.recall", "1.5", "retrieval.recall is 1.5"),
        ("retrieval.timeout", "0", "retrieval.timeout is 0.0: it must be above 0 and finite"),
        ("retrieval.attempts", "0", "retrieval.attempts is 0"),
        ("retrieval.method", "words", "invalid choice 'words' for argument '--retrieval.method'"),
        ("data.world.hops", "1 99", "data.world.hops is 99: it must be at least 1 and at most 8"),
        ("evaluation.temperature", "-1", "evaluation.temperature is -1.0"),
    ],
)
def test_a_value_out_of_its_range(setting, value, line, refused, tmp_path):
    run = ["--config", "nano", "--out", tmp_path / "run"]
    assert line in refused(tpu_train.main, [*run, f"--{setting}", *value.split()])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("def broken():\n    return 1 / 0\n", "broken() fails with ZeroDivisionError: division by zero"),
        ("x = (\n", "broken() fails with SyntaxError"),
        ("x = 1\n", "has no attribute 'broken'"),
        ("def broken():\n    return 3\n", "broken() must return a RunConfig, it returned int"),
        (
            "from memsearcher_jax.config import RunConfig\ndef broken():\n    return RunConfig(seed='0')\n",
            "seed is '0': it must be of type int",
        ),
    ],
)
def test_a_preset_file_that_cannot_be_used(source, line, refused, tmp_path):
    file = tmp_path / "broken.py"
    file.write_text(source)
    said = refused(tpu_train.main, ["--config", file])
    assert line in said


def test_a_preset_file_of_ones_own(tmp_path):
    shutil.copyfile(LAUNCH.parent / "configs" / "tiny.py", tmp_path / "mine.py")
    (tmp_path / "mine.py").write_text((tmp_path / "mine.py").read_text().replace("def tiny(", "def mine("))
    assert cli.load_preset(str(tmp_path / "mine.py")) == cli.load_preset("tiny")


@pytest.mark.parametrize(
    ("program", "argv", "line"),
    [
        (evaluate, "--config nano", "--checkpoint is missing: name a run's folder or a Hugging Face folder"),
        (export_hf, "--config nano --out x", "--checkpoint is missing"),
        (
            ask,
            "--config nano Who?",
            "--checkpoint is missing: name a run's folder or a Hugging Face folder, or write the",
        ),
        (ask, "--human", "there is no question"),
        (ask, "--human --resume --out x Who?", "x holds no run"),
        (export_hf, "--checkpoint CHECKPOINT", "--out is missing"),
        (evaluate, "--checkpoint missing_folder", "--checkpoint missing_folder: no such folder"),
        (tpu_train, "--checkpoint missing_folder", "--checkpoint missing_folder: no such folder"),
        (tpu_train, "--resume", "--resume needs --out"),
        (tpu_train, "--resume --out missing_folder", "missing_folder holds no run: there is no run.json in it"),
        (evaluate, "--resume --out missing_folder", "missing_folder holds no run"),
    ],
)
def test_what_a_command_cannot_do_without(program, argv, line, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "CHECKPOINT").mkdir()
    assert line in refused(program.main, argv.split())
    assert [path.name for path in tmp_path.iterdir()] == ["CHECKPOINT"]


@pytest.mark.parametrize("program", ["tpu_train", "evaluate", "ask", "export_hf", "serve_search"])
def test_help_explains_every_setting_without_loading_jax(program):
    code = (
        f"import sys; sys.path[:0] = [{str(LAUNCH)!r}, {str(LAUNCH.parent)!r}]; import {program}\n"
        f"try:\n    {program}.main(['--help'])\nfinally:\n    assert 'jax' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"COLUMNS": "80"})
    assert result.returncode == 0, result.stderr
    lines = [line.strip("│ ") for line in result.stdout.splitlines()]
    for name in ("config", "out", "resume", "checkpoint", "json", *settings(cli.load_preset("tiny"))):
        (row,) = [row for row, line in enumerate(lines) if line.split(" ")[0] == f"--{name}"]
        explained = lines[row].split(maxsplit=2)[2:] or [lines[row + 1]]
        assert not explained[0].startswith("(default"), f"--{name} is not explained"


@pytest.mark.parametrize("written", ["--rl.checkpoint-every 3", "--rl.checkpoint_every=3", "--rl.checkpoint_every 3"])
def test_ways_to_write_a_setting(written):
    assert cli.parse(tpu_train.Train, written.split()).run.rl.checkpoint_every == 3


def test_truth_values_are_written_like_every_other_value():
    assert not cli.parse(tpu_train.Train, ["--rl.save_trajectories", "False"]).run.rl.save_trajectories


def test_rows_that_were_left_out_are_told(capsys):
    cli.tell_skipped(Problems((), (), ("q.jsonl:3: not JSON", "q.jsonl:9: not JSON"), 1_200))
    assert capsys.readouterr().err == "1200 malformed rows are left out; the first: q.jsonl:3: not JSON\n"
    cli.tell_skipped(Problems((), ()))
    assert capsys.readouterr().err == ""


CACHED = """
import sys; sys.path[:0] = ["launch"]
import cli, jax.monitoring
cli.parse(cli.Command, ["--compile_cache", sys.argv[1]])
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
jax.jit(lambda x: x * 2 + 1)(3.0)
print(sum(event.endswith("/cache_hits") for event in hits))
"""


def test_programs_compiled_once_are_loaded_by_the_next_process(tmp_path):
    cache = tmp_path / "new" / "cache"
    environment = {**os.environ, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [sys.executable, "-c", CACHED, str(cache)]
    told = [
        subprocess.run(command, cwd=LAUNCH.parent, env=environment, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert told[0] == "0\n" and int(told[1]) > 0
    assert any(cache.iterdir())
