"""The terminal view: all of a trajectory is printed, and untrusted text has no effect on the terminal."""

import io
import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from memsearcher_jax.report.console import safe_text, shorten, show_rewrite, show_sources, show_summary, show_trajectory
from memsearcher_jax.report.labels import STOP_DESCRIPTIONS
from memsearcher_jax.report.word_diff import word_diff
from memsearcher_jax.types import Outcome, Passage, Problem, Query, SearchResult, StopReason, Trajectory, Turn

EVIL = "[bold red]markup[/] [/nothing] \x1b[31mred\x1b[0m \x1b]0;title\x07 \x9b2J back\x08 \u202eright-to-left \ud800"


def trajectory(*turns, stop=StopReason.ANSWERED, answer="Steven Spielberg", question="Who directed Jaws?", **outcome):
    return Trajectory(Problem("q1", question, ("Spielberg",)), 0, Outcome(stop, answer, turns, **outcome), (), "")


def shown(one, **options):
    stream = io.StringIO()
    console = Console(file=stream, width=200, **options.pop("console", {}))
    show_trajectory(one, console, **options)
    return stream.getvalue()


SEARCHED = Turn(
    memory="Jaws is a film of 1975",
    reply='I should look.</think>\n<tool_call>{"name": "wikipedia_search"}</tool_call>',
    queries=(Query("director of Jaws", 5),),
    results=(SearchResult((Passage("7", '"Jaws (film)"\n' + "A shark. " * 100),)),),
    rewrite="<memory>...</memory>",
    new_memory="Jaws is a thriller film of 1975",
)
ANSWERED = Turn(memory="Jaws is a thriller film of 1975", reply="Now I know.</think> \\boxed{Steven Spielberg}")


def test_every_field_of_a_trajectory_is_printed():
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
        "answered: the last reply contains an answer",
    ):
        assert part in output
    assert output.index("turn 1") < output.index("director of Jaws") < output.index("{+thriller+}")
    assert "</think>" not in output
    assert all(len(line) < 300 for line in output.splitlines()), "a long passage is shortened"


def test_the_sources_contain_the_answer_as_whole_words():
    passages = (
        Passage("guide.md:0", '"Guide"\nThe Aare, a river.'),
        Passage("guide.md:90", '"Guide > Aarebridge"\nAarebridge has a bridge.'),
    )
    turn = Turn("", "", results=(SearchResult(passages), SearchResult(passages[:1])))
    stream = io.StringIO()
    show_sources(Outcome(StopReason.ANSWERED, "the AARE", (turn,)), Console(file=stream, width=200))
    expected = "sources: 1 of the 2 passages found contain the answer guide.md:0 Guide"
    assert " ".join(stream.getvalue().split()) == expected


@pytest.mark.parametrize("terminal", [False, True])
def test_untrusted_text_has_no_effect_on_the_terminal(terminal):
    passage = Passage("1", f'"{EVIL}"\n{EVIL}')
    turn = Turn(
        memory=EVIL,
        reply=f"{EVIL}</think>{EVIL}",
        queries=(Query(EVIL, 5),),
        results=(SearchResult((passage,), error=EVIL),),
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
def test_safe_text_has_no_control_characters(text):
    shown_text = safe_text(text).plain
    assert all(char in "\n\t" or unicodedata.category(char) != "Cc" for char in shown_text)
    shown_text.encode()  # raises on a lone surrogate
    if all(
        char in "\n\t" or (unicodedata.category(char)[0] in "LNPSZ" and char not in "\u2028\u2029") for char in text
    ):
        assert shown_text == text, "harmless text is unchanged"


@given(st.text("a \n\x0b\x1c\x85\u2028"), st.text("ab \x0c\x1f\x85"))
def test_a_rewrite_has_no_control_characters(old, new):
    """Some of them are white space, which the marks of a change leave out."""
    stream = io.StringIO()
    show_rewrite(old, new, "the reply", Console(file=stream, width=200))
    assert not set(stream.getvalue()) & set("\x0b\x0c\x1c\x1f\x85")


@pytest.mark.parametrize("stop", StopReason)
def test_every_stop_reason_has_a_description(stop):
    output = shown(trajectory(stop=stop, answer="", error="the reason"))
    assert f"{stop.value}: {STOP_DESCRIPTIONS[stop]}" in output and "the reason" in output


def test_an_unclosed_thought_a_rewrite_without_memory_and_a_failed_search():
    turns = (Turn("", "on and on", rewrite="no tags"), Turn("", "", queries=(Query("lost", 3),)))
    output = shown(trajectory(*turns, stop=StopReason.SEARCH_FAILED, answer=""))
    for part in ("on and on", "no tags", "rewrite without a memory", "answer   none", "lost  (top 3)", "no result"):
        assert part in output


def test_shorten_gives_one_line_within_the_limit():
    assert shorten("a\n b\t c", 10) == "a b c"
    assert shorten("word " * 50, 12) == "word word wo …"
    assert shorten("漢" * 50, 5) == "漢漢漢漢漢 …"


def test_word_diff_of_a_known_change():
    assert word_diff("the cat sat", "the dog sat down") == [
        ("same", "the"), ("removed", " cat"), ("added", " dog"), ("same", " sat"), ("added", " down"),
    ]  # fmt: skip
    assert word_diff("a  b\nc", "a b c") == [("same", "a b c")], "white space alone is no change"
    assert word_diff("", "") == []


@given(st.text("ab \n"), st.text("ab \n"))
def test_word_diff_preserves_both_texts(old, new):
    runs = word_diff(old, new)
    assert "".join(run for change, run in runs if change != "removed") == new
    assert " ".join(run for change, run in runs if change != "added").split() == old.split()


def test_a_summary_has_a_line_per_metric_except_stop_reasons_that_never_occurred():
    stream = io.StringIO()
    metrics = {"exact_match": 0.12345, "wrong/misread": 0.1, "golden/any_held": 0.5}
    metrics |= {"generated_tokens": 123456.0, "stop/answered": 1.0, "stop/fault": 0.0}
    show_summary(metrics, Console(file=stream, width=100))
    assert [re.split("  +", line.strip()) for line in stream.getvalue().splitlines()] == [
        ["metric", "value"],
        ["EM", "12.3 %"],
        ["wrong: all supporting pages were shown, or the data does not name them", "10.0 %"],
        ["golden answers: any in the new memory", "50.0 %"],
        ["generated tokens", "123,456"],
        ["stop/answered", "100.0 %"],
    ]
