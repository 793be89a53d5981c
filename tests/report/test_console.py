"""The terminal view: all of a trajectory is printed, and untrusted text has no effect on the terminal."""

import io
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from memsearcher_jax.report.console import safe_text, shorten, show_rewrite, show_sources, show_trajectory
from memsearcher_jax.report.word_diff import word_diff
from memsearcher_jax.types import Outcome, Passage, Query, SearchResult, StopReason, ToolResult, Turn
from tests.samples import scored

EVIL = "[bold red]markup[/] [/nothing] \x1b[31mred\x1b[0m \x1b]0;title\x07 \x9b2J back\x08 \u202eright-to-left \ud800"


def printed(show, *arguments, terminal=False, **options):
    """What a function prints on a console."""
    stream = io.StringIO()
    console = Console(file=stream, width=200, force_terminal=terminal, color_system=None)
    show(*arguments, console, **options)
    return stream.getvalue()


def shown(*turns, terminal=False, reward=None, reason="", **changes):
    trajectory = scored(turns=turns, **changes).trajectory
    return printed(show_trajectory, trajectory, terminal=terminal, reward=reward, reason=reason)


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
    known = {"question": "Who directed Jaws?", "counts": {"memory_cuts": 2}}
    output = shown(SEARCHED, ANSWERED, **known, reward=0.8, reason="f1")
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


def test_an_unclosed_thought_a_rewrite_without_memory_and_a_failed_search():
    turns = (Turn("", "on and on", rewrite="no tags"), Turn("", "", queries=(Query("lost", 3),)))
    output = shown(*turns, stop=StopReason.SEARCH_FAILED, answer="", error="the reason")
    for part in ("on and on", "no tags", "rewrite without a memory", "answer   none", "lost  (top 3)", "no result"):
        assert part in output
    assert "search_failed: a search failed" in output and "the reason" in output


def test_calls_of_tools_are_printed_with_their_results():
    results = (ToolResult("shop", {"item": "tea"}, text="three left"), ToolResult("shop", {}, error="no answer"))
    text = shown(ANSWERED, tool_results=results)
    assert "item='tea'" in text and "three left" in text and "no answer" in text


def test_the_sources_contain_the_answer_as_whole_words():
    passages = (
        Passage("guide.md:0", '"Guide"\nThe Aare, a river.'),
        Passage("guide.md:90", '"Guide > Aarebridge"\nAarebridge has a bridge.'),
    )
    turn = Turn("", "", results=(SearchResult(passages), SearchResult(passages[:1])))
    output = printed(show_sources, Outcome(StopReason.ANSWERED, "the AARE", (turn,)))
    expected = "sources: 1 of the 2 passages found contain the answer guide.md:0 Guide"
    assert " ".join(output.split()) == expected


@pytest.mark.parametrize("terminal", [False, True])
def test_untrusted_text_has_no_effect_on_the_terminal(terminal):
    found = SearchResult((Passage("1", f'"{EVIL}"\n{EVIL}'),), error=EVIL)
    turn = Turn(EVIL, f"{EVIL}</think>{EVIL}", (), (Query(EVIL, 5),), (found,), "", EVIL, f"new {EVIL}")
    texts = {"question": EVIL, "answer": EVIL, "error": EVIL, "counts": {EVIL: 1}, "reason": EVIL}
    output = shown(turn, **texts, reward=0.0, terminal=terminal)
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
    harmless = (unicodedata.category(char)[0] in "LNPSZ" and char not in "\u2028\u2029" for char in text)
    if all(char in "\n\t" or fine for char, fine in zip(text, harmless, strict=True)):
        assert shown_text == text, "harmless text is unchanged"


@given(st.text("a \n\x0b\x1c\x85\u2028"), st.text("ab \x0c\x1f\x85"))
def test_a_rewrite_has_no_control_characters(old, new):
    """Some of them are white space, which the marks of a change leave out."""
    assert not set(printed(show_rewrite, old, new, "the reply")) & set("\x0b\x0c\x1c\x1f\x85")


def test_shorten_gives_one_line_within_the_limit():
    assert shorten("a\n b\t c", 10) == "a b c"
    assert shorten("word " * 50, 12) == "word word wo …"
    assert shorten("漢" * 50, 5) == "漢漢漢漢漢 …"


def test_word_diff_of_a_known_change():
    assert word_diff("the cat sat", "the dog sat down") == [
        ("same", "the"), ("removed", " cat"), ("added", " dog"), ("same", " sat"), ("added", " down"),
    ]  # fmt: skip
    assert word_diff("a  b\nc", "a b c") == [("same", "a b c")], "white space alone is no change"


@given(st.text("ab \n"), st.text("ab \n"))
def test_word_diff_preserves_both_texts(old, new):
    runs = word_diff(old, new)
    assert "".join(run for change, run in runs if change != "removed") == new
    assert " ".join(run for change, run in runs if change != "added").split() == old.split()
