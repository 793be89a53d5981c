"""The ReAct workflow: one growing context, and each way to end."""

import pytest

from memsearcher_jax.agent import prompts
from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.agent.react import react
from memsearcher_jax.agent.reward import trajectory_reward
from memsearcher_jax.types import Passage, Query, SearchResult, StopReason

CALL = '<tool_call>{"name": "wikipedia_search", "arguments": {"query": "q"}}</tool_call>'
SEARCH = f" look </think>{CALL}"
ANSWER = " known </think> \\boxed{x}"


def passages(query: Query) -> SearchResult:
    return SearchResult((Passage("1", f"about {query.text}"),))


def failing(query: Query) -> SearchResult:
    return SearchResult(error="refused")


@pytest.fixture
def run(scripted, token_counter):
    def run(script, search=passages, **settings):
        config = AgentConfig(workflow="react", prompts="react", **settings)
        return scripted(
            react("who?", config=config, prompts=prompts.load(config), token_counter=token_counter), script, search
        )

    return run


@pytest.mark.parametrize(
    ("script", "stop", "turns"),
    [
        ([ANSWER], StopReason.ANSWERED, 1),
        ([SEARCH, ANSWER], StopReason.ANSWERED, 2),
        ([SEARCH, " \\boxed{x} </think>"], StopReason.NO_ANSWER, 2),
        ([" t </think>"], StopReason.NO_ANSWER, 1),
        ([SEARCH, SEARCH, SEARCH], StopReason.MAX_TURNS, 3),
        ([SEARCH, (SEARCH, "length")], StopReason.CUT_OFF, 2),
        ([(ANSWER, "im_start")], StopReason.FORGED_TURN, 1),
        ([None], StopReason.CONTEXT_FULL, 0),
        ([SEARCH, None], StopReason.CONTEXT_FULL, 1),
    ],
)
def test_stop_reason_and_turns(run, script, stop, turns):
    outcome = run(script, max_turns=3).outcome
    assert outcome.stop is stop
    assert outcome.answer == ("x" if stop is StopReason.ANSWERED else "")
    assert len(outcome.turns) == turns
    assert outcome.counts == {"calls_ignored": 0, "calls_clipped": 0, "passages_clipped": 0}


def test_a_failed_search_stops_or_is_shown(run):
    assert run([SEARCH], failing).outcome.stop is StopReason.SEARCH_FAILED
    played = run([SEARCH, ANSWER], failing, on_search_error="show")
    assert played.outcome.stop is StopReason.ANSWERED
    assert "refused" in played.transcript


def test_one_context_keeps_the_complete_history(run):
    played = run([SEARCH, SEARCH, ANSWER])
    (context,) = played.contexts
    assert [sampled for sampled, _ in context.segments] == [1, 0, 1, 0, 1]
    assert all(later.startswith(earlier) for earlier, later in zip(played.prompts, played.prompts[1:], strict=False))
    assert all(prompt.endswith("<|im_start|>assistant\n<think>") for prompt in played.prompts)
    assert context.text.count("about q") == 2


def test_a_call_in_the_last_turn_is_not_run(run):
    assert len(run([SEARCH, SEARCH], max_turns=2).searches) == 1


def test_each_observation_has_its_own_budget(run):
    def long(query):
        return SearchResult((Passage("1", "page " * 1_000),))

    played = run([SEARCH, SEARCH, ANSWER], long, observation_tokens=50)
    assert played.outcome.counts["passages_clipped"] == 2
    assert played.transcript.count("page") < 100


def test_complete_histories_are_scored_by_the_same_rule(run):
    for answer, value in [(ANSWER, 1.0), (" known </think> \\boxed{y}", 0.1), (" \\boxed{x} </think> hm", 0.0)]:
        played = run([SEARCH, answer])
        assert trajectory_reward(played.outcome, played.transcript, ["x"]).value == value
