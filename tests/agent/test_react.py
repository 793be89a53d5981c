"""The ReAct workflow: one growing context, and each way to end."""

import pytest

from memsearcher_jax.agent import prompts
from memsearcher_jax.agent.react import react
from memsearcher_jax.agent.reward import score
from memsearcher_jax.agent.types import AgentConfig, Found, Passage, Query, Stop

CALL = '<tool_call>{"name": "wikipedia_search", "arguments": {"query": "q"}}</tool_call>'
SEARCH = f" look </think>{CALL}"
ANSWER = " known </think> \\boxed{x}"


def passages(query: Query) -> Found:
    return Found((Passage("1", f"about {query.text}"),))


def failing(query: Query) -> Found:
    return Found(error="refused")


@pytest.fixture
def run(play, ruler):
    def run(script, search=passages, **settings):
        config = AgentConfig(workflow="react", prompts="react", **settings)
        return play(react("who?", config=config, prompts=prompts.load(config), ruler=ruler), script, search)

    return run


@pytest.mark.parametrize(
    ("script", "stop", "turns"),
    [
        ([ANSWER], Stop.ANSWERED, 1),
        ([SEARCH, ANSWER], Stop.ANSWERED, 2),
        ([SEARCH, " \\boxed{x} </think>"], Stop.NO_ANSWER, 2),
        ([" t </think>"], Stop.NO_ANSWER, 1),
        ([SEARCH, SEARCH, SEARCH], Stop.MAX_TURNS, 3),
        ([SEARCH, (SEARCH, "length")], Stop.CUT_OFF, 2),
        ([(ANSWER, "im_start")], Stop.FORGED_TURN, 1),
        ([None], Stop.CONTEXT_FULL, 0),
        ([SEARCH, None], Stop.CONTEXT_FULL, 1),
    ],
)
def test_how_it_stops(run, script, stop, turns):
    outcome = run(script, max_turns=3).outcome
    assert outcome.stop is stop
    assert outcome.answer == ("x" if stop is Stop.ANSWERED else "")
    assert len(outcome.turns) == turns
    assert outcome.counts == {"calls_ignored": 0, "calls_clipped": 0, "passages_clipped": 0}


def test_a_failed_search_stops_or_is_told(run):
    assert run([SEARCH], failing).outcome.stop is Stop.SEARCH_FAILED
    played = run([SEARCH, ANSWER], failing, on_search_error="tell")
    assert played.outcome.stop is Stop.ANSWERED
    assert "refused" in played.transcript


def test_one_context_keeps_everything(run):
    played = run([SEARCH, SEARCH, ANSWER])
    (context,) = played.contexts
    assert [sampled for sampled, _ in context.segments] == [1, 0, 1, 0, 1]
    assert all(later.startswith(earlier) for earlier, later in zip(played.prompts, played.prompts[1:], strict=False))
    assert all(prompt.endswith("<|im_start|>assistant\n<think>") for prompt in played.prompts)
    assert context.text.count("about q") == 2


def test_a_call_in_the_last_turn_is_not_run(run):
    assert len(run([SEARCH, SEARCH], max_turns=2).finds) == 1


def test_each_observation_has_its_own_budget(run):
    def long(query):
        return Found((Passage("1", "page " * 1_000),))

    played = run([SEARCH, SEARCH, ANSWER], long, observation_tokens=50)
    assert played.outcome.counts["passages_clipped"] == 2
    assert played.transcript.count("page") < 100


def test_whole_histories_are_scored_by_the_same_rule(run):
    for answer, value in [(ANSWER, 1.0), (" known </think> \\boxed{y}", 0.1), (" \\boxed{x} </think> hm", 0.0)]:
        played = run([SEARCH, answer])
        assert score(played.outcome, played.transcript, ["x"]).value == value
