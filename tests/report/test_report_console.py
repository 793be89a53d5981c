"""The terminal view: everything of a trajectory is there, and outside text can do nothing but be read."""

import io
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from memsearcher_jax.agent.types import (
    Context,
    Found,
    Outcome,
    Passage,
    Problem,
    Query,
    Stop,
    Trajectory,
    Turn,
)
from memsearcher_jax.report.console import WHY, plain, shorten, show_summary, show_trajectory
from memsearcher_jax.report.diff import word_diff

EVIL = "[bold red]markup[/] [/nothing] \x1b[31mred\x1b[0m \x1b]0;title\x07 \x9b2J back\x08 \u202eright-to-left \ud800"


def trajectory(*turns, stop=Stop.ANSWERED, answer="Steven Spielberg", question="Who directed Jaws?", **outcome):
    context = Context((1, 2, 3), (0.0, -0.5, -0.25), (False, True, True))
    problem = Problem("q1", question, ("Spielberg",))
    return Trajectory(problem, 0, Outcome(stop, answer, turns, **outcome), (context,) * len(turns), "")


def shown(one, **options):
    stream = io.StringIO()
    console = Console(file=stream, width=200, **options.pop("console", {}))
    show_trajectory(one, console, **options)
    return stream.getvalue()


SEARCHED = Turn(
    memory="Jaws is a film of 1975",
    reply='I should look.</think>\n<tool_call>{"name": "wikipedia_search"}</tool_call>',
    queries=(Query("director of Jaws", 5),),
    found=(Found((Passage("7", '"Jaws (film)"\n' + "A shark. " * 100),)),),
    rewrite="<memory>...</memory>",
    new_memory="Jaws is a thriller film of 1975",
)
ANSWERED = Turn(memory="Jaws is a thriller film of 1975", reply="Now I know.</think> \\boxed{Steven Spielberg}")


def test_a_trajectory_is_shown_whole():
    output = shown(trajectory(SEARCHED, ANSWERED, counts={"memory_cuts": 2}), reward=0.8, reason="f1")
    for part in (
        "Who directed Jaws?",
        "turn 1",
        "I should look.",
        '<tool_call>{"name": "wikipedia_search"}</tool_call>',
        "director of Jaws  (top 5)",
        "1. Jaws (film)  A shark.",
        "Jaws is a {+thriller+} film of 1975",
        "turn 2",
        "\\boxed{Steven Spielberg}",
        "0.800  f1",
        "memory cuts",
        "answered: its last reply gave an answer",
    ):
        assert part in output
    assert output.index("turn 1") < output.index("director of Jaws") < output.index("{+thriller+}")
    assert "</think>" not in output
    assert all(len(line) < 300 for line in output.splitlines()), "a long passage is shortened"
    assert output.splitlines()[-2:] == ["1             3              2", "2             3              2"]


@pytest.mark.parametrize("terminal", [False, True])
def test_text_from_outside_is_only_text(terminal):
    passage = Passage("1", f'"{EVIL}"\n{EVIL}')
    turn = Turn(
        memory=EVIL,
        reply=f"{EVIL}</think>{EVIL}",
        queries=(Query(EVIL, 5),),
        found=(Found((passage,), error=EVIL),),
        rewrite=EVIL,
        new_memory="new " + EVIL,
    )
    evil = trajectory(turn, question=EVIL, answer=EVIL, error=EVIL, counts={EVIL: 1})
    output = shown(evil, reason=EVIL, reward=0.0, console={"force_terminal": terminal, "color_system": None})
    output.encode()
    assert "[bold red]markup[/] [/nothing]" in output
    assert r"\x1b[31mred\x1b[0m \x1b]0;title\x07 \x9b2J back\x08 \u202eright-to-left \ud800" in output
    assert not set(output) & set("\x07\x08\x9b\u202e\ud800")
    assert "\x1b[31m" not in output and "\x1b]" not in output


@given(st.text(st.characters()))
def test_plain_text_holds_no_control_character(text):
    shown_text = plain(text).plain
    assert all(char in "\n\t" or unicodedata.category(char) != "Cc" for char in shown_text)
    shown_text.encode()  # raises on half a surrogate pair


@given(st.text("abcäß漢 .,[]{}\n\t"))
def test_harmless_text_is_unchanged(text):
    assert plain(text).plain == text


@pytest.mark.parametrize("stop", Stop)
def test_every_stop_is_explained(stop):
    output = shown(trajectory(stop=stop, answer="", error="the reason"))
    assert f"{stop.value}: {WHY[stop]}" in output and "the reason" in output


def test_a_reply_that_never_stops_thinking_and_a_rewrite_without_memory():
    output = shown(trajectory(Turn(memory="", reply="on and on", rewrite="no tags"), stop=Stop.BAD_MEMORY, answer=""))
    assert "on and on" in output and "no tags" in output and "memory reply without a memory" in output
    assert "answer   none" in output


def test_a_search_that_failed_whole_shows_its_queries():
    output = shown(trajectory(Turn(memory="", reply="", queries=(Query("lost", 3),)), stop=Stop.SEARCH_FAILED))
    assert "lost  (top 3)" in output and "no result" in output


def test_shorten_gives_one_line_within_the_limit():
    assert shorten("a\n b\t c", 10) == "a b c"
    assert shorten("word " * 50, 12) == "word word wo …"
    assert shorten("漢" * 50, 5) == "漢漢漢漢漢 …"


def test_word_diff_marks_what_changed():
    assert word_diff("the cat sat", "the dog sat down") == [
        ("same", "the"), ("removed", " cat"), ("added", " dog"), ("same", " sat"), ("added", " down"),
    ]  # fmt: skip
    assert word_diff("a  b\nc", "a b c") == [("same", "a b c")], "white space alone is no change"
    assert word_diff("", "") == []


@given(st.text("ab \n"), st.text("ab \n"))
def test_word_diff_loses_nothing(old, new):
    runs = word_diff(old, new)
    assert "".join(run for change, run in runs if change != "removed") == new
    assert " ".join(run for change, run in runs if change != "added").split() == old.split()


def test_a_summary_has_a_line_for_each_number_but_stops_that_never_happened():
    stream = io.StringIO()
    metrics = {"exact_match": 0.12345, "f1": 0.0, "generated_tokens": 123456.0, "stop/answered": 1.0, "stop/fault": 0.0}
    show_summary(metrics, Console(file=stream, width=80))
    assert [line.split() for line in stream.getvalue().splitlines()] == [
        ["metric", "value"],
        ["exact", "match", "0.1235"],
        ["f1", "0"],
        ["generated", "tokens", "123,456"],
        ["stop/answered", "1"],
    ]
