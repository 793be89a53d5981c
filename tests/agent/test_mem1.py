"""The MEM1 workflow: a context holds the question, the last state with its search and what that found, nothing else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsearcher_jax.agent.mem1 import Mem1
from memsearcher_jax.agent.search_r1 import parse_answer
from memsearcher_jax.types import Passage, Query, SearchResult, StopReason
from tests.agent.conftest import play

SECOND, THIRD = (
    "<think> Ann, born 1912 </think>\n<search> Ann </search>",
    "<think> 1912 </think>\n<answer> x; y </answer>",
)
FIRST = "<think> who? </think>\n<search> first page </search>"


def pages(query):
    return SearchResult((Passage("0", f'"{query.text}"\nabout {query.text} {"word " * 50}'),))


def run(script, **settings):
    return play("mem1", script, pages, default_top_n=1, **settings)


def test_a_context_holds_the_last_state_alone():
    played = run([FIRST, SECOND, THIRD], observation_tokens=10)
    contexts = [context.prompt.partition("<|im_start|>assistant\n") for context in played.contexts]
    assert len({opening for opening, *_ in contexts}) == 1 and "who?" in contexts[0][0]
    first, second, third = (state for *_, state in contexts)
    assert first == ""
    assert second.startswith(FIRST + '\n\n<information>Doc 1(Title: "first page") about') and "Ann" not in second
    assert third.startswith(SECOND + '\n\n<information>Doc 1(Title: "Ann") about') and "first page" not in third
    assert second.endswith("</information>\n\n") and second.count("word") < 10
    assert [context.segments for context in played.contexts] == [[(1, text)] for text in (FIRST, SECOND, THIRD)]
    outcome = played.outcome
    assert (outcome.stop, outcome.answer) == (StopReason.ANSWERED, "x; y")
    assert [turn.new_memory for turn in outcome.turns] == [FIRST, SECOND, ""]
    assert [turn.queries for turn in outcome.turns] == [(Query("first page", 1),), (Query("Ann", 1),), ()]
    assert outcome.counts["passages_clipped"] == 2
    assert parse_answer(played.transcript) == ("x; y", "")


@pytest.mark.parametrize(
    ("script", "stop", "turns"),
    [
        ([THIRD], StopReason.ANSWERED, 1),
        (["no action", THIRD], StopReason.ANSWERED, 2),
        ([("no action", "length"), THIRD], StopReason.ANSWERED, 2),
        ([FIRST, FIRST, FIRST], StopReason.MAX_TURNS, 3),
        ([(THIRD, "im_start")], StopReason.FORGED_TURN, 1),
        ([FIRST, None], StopReason.CONTEXT_FULL, 1),
    ],
)
def test_how_a_trajectory_ends(script, stop, turns):
    outcome = run(script, max_turns=3).outcome
    assert (outcome.stop, len(outcome.turns)) == (stop, turns)


def test_a_reply_without_an_action_is_shown_with_a_notice():
    played = run(["no action", THIRD])
    assert "assistant\nno action\nThat step had neither a search" in played.contexts[1].prompt
    assert played.outcome.counts["invalid_actions"] == 1 and Mem1.keeps_memory


@given(st.lists(st.text("<>/ searchanwxtik\n", max_size=30), max_size=5))
def test_no_text_of_the_policy_raises(replies):
    played = run(replies)
    assert played.outcome or len(played.prompts) > len(replies), "it ends, or asks for another reply"
