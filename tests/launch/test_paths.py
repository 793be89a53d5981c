"""A home directory is written as ~ in every path of every command and setting."""

import typing
from dataclasses import is_dataclass
from pathlib import Path
from typing import NamedTuple

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsearcher_jax.config import RunConfig, settings, with_settings
from memsearcher_jax.launch import cli, tpu_train
from memsearcher_jax.runs.path_settings import CODE, PATHS, expanded, with_expanded_paths
from tests.launch.command_flags import COMMANDS, flags_of, parsed, takes_settings

SERVICE_TEXTS = ("url", "model", "api_key_env", "extra_body")
TEXT_SETTINGS = {
    "retrieval.url",
    "training.warmup_steps",
    "training.decay_steps",
    "evaluation.in_distribution",
    "agent.tools_api_key_env",
    "memalpha.answer_rules",
    *(
        f"{section}.{name}"
        for section in ("judge", "answerer")
        for name in ("url", "model", "api_key_env", "extra_body")
    ),
}
"""Settings whose text is not the path of a file."""

TEXT_FLAGS = {
    "api_key_env",
    "cors_origins",
    "data_claim",
    "data_disk",
    "host",
    "image",
    "license",
    "max_run",
    "name",
    "question",
    "repository",
    "runtime_version",
    "secret",
    "setting",
    "shard",
    "topology",
    "valid_until",
    "workflow",
    "zone",
}
"""Flags whose text is not the path of a file."""


class PathFlag(NamedTuple):
    command: str
    name: str


def path_flags() -> list[PathFlag]:
    """Every flag and every setting that takes a path, of every command."""
    found = []
    for command in COMMANDS:
        found += [PathFlag(command, flag.name) for flag in flags_of(command) if flag.is_path]
        if takes_settings(command):
            found += [PathFlag(command, setting) for setting in (*CODE, *PATHS)]
    return found


def value_of(flags, name):
    """The value of a flag or of a setting as a list of texts."""
    value = settings(flags.run)[name] if "." in name else getattr(flags, name)
    values = value if isinstance(value, tuple) else (value,)
    return [str(path) for path in values]


@hypothesis.settings(max_examples=30)
@given(st.sampled_from(path_flags()), st.sampled_from(("a.py", "a b/c.py", "~/x.py", ".x.py")), st.booleans())
def test_a_home_directory_is_expanded_in_any_path(flag, rest, joined):
    if flag.name in CODE:  # a text with a space may be the command of a harness
        rest = rest.replace(" ", "_")
    value = value_of(parsed(flag.command, flag.name, f"~/{rest}", joined=joined), flag.name)
    assert value == [f"{Path.home()}/{rest}"]


@pytest.mark.parametrize("name", [*CODE, *PATHS])
def test_each_setting_that_is_a_path_is_expanded(name):
    is_list = isinstance(settings(RunConfig())[name], tuple)
    given_value = ("~/a.py", "b.py") if is_list else "~/a.py"
    config = with_expanded_paths(with_settings(RunConfig(), {name: given_value}))
    full = f"{Path.home()}/a.py"
    assert settings(config)[name] == ((full, "b.py") if is_list else full)


@pytest.mark.parametrize("name", ["audit", "data.train", "agent.tools", "sft.trajectories"])
def test_each_path_of_a_list_is_expanded(name):
    flags = parsed("build_index", name, "~/a.py", "b.py", "~/c.py")
    assert value_of(flags, name) == [f"{Path.home()}/a.py", "b.py", f"{Path.home()}/c.py"]


def test_paths_that_commas_separate_are_expanded():
    (benchmarks,) = value_of(parsed("evaluate", "benchmarks", "nq,~/a.json,~/b.json"), "benchmarks")
    assert benchmarks == f"nq,{Path.home()}/a.json,{Path.home()}/b.json"


@pytest.mark.parametrize(
    ("setting", "value", "expected"),
    [
        ("agent.harness", "python ~/my_agent.py --log ~/log", "python {home}/my_agent.py --log {home}/log"),
        ("agent.harness", "~/bin/agent a~b '~/quoted'", "{home}/bin/agent a~b '~/quoted'"),
        ("agent.tools", "mcp:~/bin/server --root ~/pages", "mcp:{home}/bin/server --root {home}/pages"),
        ("agent.tools", "mcp:http://host/~user/mcp", "mcp:http://host/~user/mcp"),
        ("agent.harness", "run ~nobody_here/x", "run ~nobody_here/x"),
    ],
)
def test_the_words_of_a_command_are_expanded_as_a_shell_does(setting, value, expected):
    assert value_of(parsed("train", setting, value), setting) == [expected.format(home=Path.home())]


def test_a_home_with_a_space_stays_one_word_of_a_command(monkeypatch):
    monkeypatch.setenv("HOME", "/home/a b")
    assert value_of(parsed("train", "agent.harness", "python ~/x.py"), "agent.harness") == ["python '/home/a b/x.py'"]


def test_a_home_of_nobody_is_refused(refused):
    line = refused(tpu_train.main, ["--config", "nano", "--out=~nobody_here/x"])
    assert line == (
        "error: ~nobody_here/x: there is no user nobody_here; if a folder is named ~nobody_here, give its absolute path"
    )


def test_a_preset_of_the_home_directory_names_files_there(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.py").write_text(
        "from dataclasses import replace\n"
        "from memsearcher_jax.configs.nano import nano\n"
        "def mine():\n"
        "    return replace(nano(), data=replace(nano().data, exclude='~/hopeless.jsonl'))\n"
    )
    flags = cli.parse(tpu_train.Train, ["--config=~/mine.py"])
    assert flags.run.data.exclude == f"{tmp_path}/hopeless.jsonl"


def test_a_tilde_within_a_path_is_a_name():
    assert expanded("a/~/b") == "a/~/b"


def test_every_text_is_declared_a_path_or_none():
    """A new flag or setting of text is added to one of the two."""
    assert text_settings(RunConfig) == {*CODE, *PATHS, *TEXT_SETTINGS}
    for command in COMMANDS:
        text_flags = {flag.name for flag in flags_of(command) if flag.is_text and not flag.is_path}
        of_command = {"jobset": {"config", "out"}, "check_device": {"config"}}
        assert text_flags - TEXT_FLAGS == of_command.get(command, set())


def text_settings(kind: type, prefix: str = "") -> set[str]:
    """The settings that take any text."""
    found = set()
    for name, hint in typing.get_type_hints(kind).items():
        if is_dataclass(hint):
            found |= text_settings(hint, f"{prefix}{name}.")
        elif hint in (str, tuple[str, ...]):
            found.add(prefix + name)
    return found
