"""A setting that a command does not read is refused with the name of the one that it reads, or printed as left out."""

import dataclasses
import sys
import typing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from memsearcher_jax.config import RunConfig, settings
from memsearcher_jax.launch import ask, cli, evaluate, serve_agent, sweep, tpu_train
from memsearcher_jax.launch.unused_settings import UNUSED, given_settings, refuse_unused
from memsearcher_jax.runs.run_dir import located
from tests.launch.command_flags import COMMANDS

TINY = str(located("package:tiny"))
ROOT = Path(__file__).resolve().parents[2]
NOT_OF_A_READER = ("cli.py", "config.py", "checks.py", "jsonl.py", "path_settings.py", "inputs.py", "hub.py")
"""Files whose functions pass over all settings."""


@pytest.mark.parametrize("main", [evaluate.main, ask.main, serve_agent.main])
@pytest.mark.parametrize(
    ("setting", "used"),
    [("agent.max_turns", "evaluation.max_turns"), ("sampling.temperature", "evaluation.temperature")],
)
def test_a_setting_of_training_is_refused_where_evaluation_has_its_own(main, setting, used, refused):
    line = refused(main, ["--config", "tiny", "--checkpoint", TINY, f"--{setting}", "2"])
    assert line == f"error: --{setting} has no effect on this command: set --{used}"


def test_a_sweep_of_evaluations_does_not_compare_equal_rows(refused, tmp_path):
    words = [
        "--setting",
        "agent.max_turns=2,4",
        "--out",
        tmp_path / "out",
        "--",
        "--config",
        "tiny",
        "--checkpoint",
        TINY,
    ]
    assert "set --evaluation.max_turns" in refused(sweep.main, ["--evaluate", *words])


@pytest.mark.parametrize("section", ["judge", "answerer"])
def test_an_address_without_its_backend_is_refused(section, refused):
    words = ["--config", "tiny_memalpha", f"--{section}.url", "http://127.0.0.1:9/v1"]
    backend = cli.load_preset("tiny_memalpha").judge.backend if section == "judge" else "initial_policy"
    assert refused(tpu_train.main, words) == (
        f"error: --{section}.url is of a service, and {section}.backend is {backend}: set --{section}.backend openai"
    )


def test_what_is_left_out_is_printed(capsys):
    words = ["--config", "tiny", "--checkpoint", TINY, "--rl.steps", "3", "--training.seq_len=384", "--sft.epochs=2"]
    cli.parse(evaluate.Evaluate, words)
    assert capsys.readouterr().err == "left out, because this command does not use it: --rl.steps, --sft.epochs\n"
    cli.parse(
        tpu_train.Train, ["--config", "tiny", "--rl.steps", "3", "--answerer.timeout", "9", "--memalpha.core_tokens=9"]
    )
    line = "left out, because this command does not use it: --answerer.timeout, --memalpha.core_tokens\n"
    assert capsys.readouterr().err == line


@hypothesis_settings(max_examples=300)
@given(st.sampled_from(sorted(UNUSED)), st.sampled_from(sorted(settings(RunConfig()))))
def test_a_setting_that_is_not_read_is_never_accepted_in_silence(command, setting):
    unused = UNUSED[command]
    try:
        left_out = refuse_unused(command, given_settings([f"--{setting}=1"]), RunConfig())
    except ValueError as error:
        assert setting in unused.instead or "is of a service" in str(error)
        return
    assert setting not in unused.instead
    assert not unused.has(setting) or left_out == [setting]


def test_the_table_names_commands_settings_and_what_is_used_instead():
    known = set(settings(RunConfig()))
    commands = {kind.__name__ for kind in COMMANDS.values()}
    assert set(UNUSED) <= commands
    for unused in UNUSED.values():
        for name in (*unused.names, *unused.but):
            assert name in known or any(setting.startswith(name) for setting in known if name.endswith("."))
        for name, used in unused.instead.items():
            assert {name, used} <= known and not unused.has(used)


def test_a_word_of_a_setting_is_found_in_any_form():
    words = ["--config", "a", "--rl.steps=3", "--agent.max-turns", "4", "question", "--out", "x"]
    assert given_settings(words) == ["rl.steps", "agent.max_turns"]


@pytest.fixture
def settings_read(monkeypatch):
    """The settings that the code reads, apart from functions that pass over all of them."""
    found: set[str] = set()

    def record(kind, prefixes):
        names = {field.name for field in dataclasses.fields(kind)}

        def read(config, name):
            reader = sys._getframe(1).f_code.co_filename
            if name in names and str(ROOT) in reader and not reader.endswith(NOT_OF_A_READER):
                found.update(f"{prefix}.{name}" for prefix in prefixes)
            return object.__getattribute__(config, name)

        monkeypatch.setattr(kind, "__getattribute__", read, raising=False)

    sections: dict[type, list[str]] = {}
    for section, kind in typing.get_type_hints(RunConfig).items():
        if dataclasses.is_dataclass(kind):
            sections.setdefault(kind, []).append(section)
    for kind, prefixes in sections.items():
        record(kind, prefixes)
    return found


def test_an_evaluation_reads_nothing_that_it_leaves_out(finished, tmp_path, settings_read):
    evaluate.main(["--checkpoint", str(finished), "--out", str(tmp_path / "out")])
    assert {"evaluation.max_turns", "model.layers"} <= settings_read
    assert {name for name in settings_read if UNUSED["Evaluate"].has(name)} <= {"teacher.path"}  # which is empty


def test_asking_reads_nothing_that_it_leaves_out(finished, settings_read):
    ask.main(["--checkpoint", str(finished), "Who?"])
    assert {"evaluation.max_turns", "model.layers"} <= settings_read
    assert {name for name in settings_read if UNUSED["Ask"].has(name)} <= {"teacher.path"}  # which is empty
