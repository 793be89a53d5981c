"""Words of a command line before they are parsed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsearcher_jax.config import RunConfig, settings
from memsearcher_jax.launch import command_words, tpu_train
from tests.launch.command_flags import COMMANDS, REQUIRED, flags_of, parsed, takes_settings


def test_what_follows_two_dashes_is_for_another_program():
    assert command_words.split_passthrough(["a", "--", "b", "--", "c"]) == (["a"], ["b", "--", "c"])
    assert command_words.split_passthrough(["a"]) == (["a"], [])


@pytest.mark.parametrize("words", [["--x", "1", "--y", "2"], ["--x=1", "--y", "2"], ["q", "--y", "2", "--x", "1"]])
def test_the_value_of_a_flag_is_found(words):
    assert command_words.flag_value(words, "--x") == "1"
    assert command_words.flag_value(words, "--z") == ""


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["--out", ""], "--out"),
        (["--out="], "--out"),
        (["--a", "1", "--out", ""], "--out"),
        (["--out", "x"], ""),
        (["--model.adapter", ""], ""),  # a setting may be empty
        (["--model.adapter="], ""),
        (["--", ""], ""),
    ],
)
def test_an_empty_flag_of_the_command_is_found(words, flag):
    assert command_words.empty_flag(words) == flag


@given(st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.sampled_from("xyz"), max_size=2), st.booleans())))
def test_values_of_a_repeated_list_are_added_in_their_order(flags):
    words, values = ["question"], {}
    for name, texts, joined in flags:
        written = [f"--{name}={texts[0]}", *texts[1:]] if joined and texts else [f"--{name}", *texts]
        words += written
        values.setdefault(f"--{name}", []).extend(texts)
    joined_words = command_words.with_joined_repeats(words, {"--a", "--b", "--c"})
    assert joined_words[0] == "question"
    found: dict[str, list[str]] = {}
    for word in joined_words[1:]:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            assert name not in found
            current = found[name] = [value] if equals else []
        else:
            current.append(word)
    assert found == values


def test_repeated_tools_are_added():
    flags = parsed("ask", "agent.tools", "a.py", "--agent.tools", "b.py", "--agent.tools=c.py", "mcp:d e")
    assert flags.run.agent.tools == ("a.py", "b.py", "c.py", "mcp:d e")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_repeated_flag_is_refused_or_adds(command):
    for flag in flags_of(command):
        if flag.name in REQUIRED.get(command, {}) or (not flag.is_text and not flag.is_path) or flag.name == "question":
            continue
        if flag.is_list:
            assert getattr(parsed(command, flag.name, "a", f"--{flag.name}", "b"), flag.name) == ("a", "b")
        else:
            with pytest.raises(ValueError, match=f"^--{flag.name} is given twice: give it once$"):
                parsed(command, flag.name, "a", f"--{flag.name}", "b")


def test_a_repeated_setting_is_refused_or_adds():
    assert takes_settings("train")
    for name, value in settings(RunConfig()).items():
        if isinstance(value, tuple):
            continue
        with pytest.raises(ValueError, match=f"^--{name} is given twice: give it once$"):
            parsed("train", name, "1", f"--{name}=2")


def test_a_repeated_flag_is_one_line(refused):
    line = refused(tpu_train.main, ["--config", "nano", "--rl.steps", "3", "--rl.steps=4"])
    assert line == "error: --rl.steps is given twice: give it once"
    assert "--resume is given twice" in refused(tpu_train.main, ["--resume", "--out", "a", "--resume"])
