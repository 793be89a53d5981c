"""Memory metrics against hand-computed values and against their definitions, and means over trajectories."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsearcher_jax.agent import reward
from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.agent.registry import make_agent
from memsearcher_jax.agent.run import run_workflow
from memsearcher_jax.report.memory_quality import (
    copied_fraction,
    golden_names,
    last_memory,
    memory_quality,
    metric_columns,
    shown_text,
    supporting_names,
    tokenize,
)
from memsearcher_jax.types import (
    Completion,
    Outcome,
    Passage,
    Problem,
    Query,
    SearchResult,
    StopReason,
    Trajectory,
    Turn,
)
from tests.support import byte_tokenizer

words = st.lists(st.sampled_from("abcd"), max_size=12)


def searched(memory, observation, new_memory, calls=()):
    """A turn that searched and rewrote the memory."""
    rewrite = f"I keep this.\n<memory> {new_memory} </memory>"
    return Turn(memory, "...", calls, observation=observation, rewrite=rewrite, new_memory=new_memory)


def trajectory(*turns, golden=("Ada",), titles=("Mill", "Lake (town)"), stop=StopReason.MAX_TURNS, id="q", **metadata):
    metadata = metadata | ({"supporting_titles": list(titles)} if titles else {})
    return Trajectory(Problem(id, "Who?", golden, metadata), 0, Outcome(stop, turns=turns), (), "")


def rollout(config, replies, found):
    """The outcome of an agent with these replies, whose searches find these passages, then one about nothing."""
    replies_left = iter(replies)
    passages_left = itertools.chain(found, itertools.repeat('"Hill"\nLake is far.'))

    def search(request):
        return tuple(SearchResult((Passage("p", next(passages_left)),)) for _ in request.queries)

    workflow = make_agent(config).start(Problem("q", "Who?", ("Ada",)), byte_tokenizer())
    return run_workflow(workflow, lambda request: Completion(next(replies_left)), search)


def quality(*turns, **changes):
    """The turns of a trajectory."""
    return memory_quality(trajectory(*turns, **changes))


def means(turns):
    return {name: np.mean(values) for name, values in metric_columns(turn.metrics for turn in turns).items()}


# --- names ---


def test_metrics_of_one_turn_equal_hand_computed_values():
    turn = searched("", "The Mill stands at Lake; Ada built it.", "Ada built the mill.")
    (one,) = quality(turn)
    assert one.names["golden"].shown == one.names["golden"].held == ("Ada",)
    assert one.names["supporting"].shown == ("Mill", "Lake (town)")  # the sentence has no qualifier
    assert one.names["supporting"].held == ("Mill",)
    assert one.metrics == pytest.approx(
        {
            "golden/shown": 1.0,
            "golden/any_shown": 1.0,
            "golden/held": 1.0,
            "golden/any_held": 1.0,
            "golden/kept": 1.0,
            "supporting/shown": 1.0,
            "supporting/any_shown": 1.0,
            "supporting/held": 0.5,
            "supporting/any_held": 1.0,
            "supporting/kept": 0.5,
            "memory/words": 4.0,
            "memory/cut": 0.0,
            "memory/copied": 0.0,  # the longest run, "Ada built", has two tokens
        }
    )


def test_titles_count_without_their_qualifier_and_uninformative_names_are_not_tracked():
    titles = {"supporting_titles": ["Fame (2009 Film)", "(I)", "AC/DC"]}
    names = supporting_names(Problem("q", "?", (), titles))
    assert names == {"Fame (2009 Film)": ("fame 2009 film", "fame"), "(I)": ("i",), "AC/DC": ("acdc",)}

    def names(*golden):
        return golden_names(Problem("q", "?", golden))

    assert names("Yes", "no.", "The", "...") == {}  # almost every text contains them
    assert list(names("The Beatles", "Beatles", "beatles!")) == ["The Beatles"]  # one name per normalised form
    turn = searched("", "No, yes.", "yes")
    assert "golden" not in quality(turn, golden=("yes",))[0].names
    assert "supporting" not in quality(turn, titles=())[0].names


@pytest.mark.parametrize("titles", ["Mill", ["Mill", 3], {"title": "Mill"}])
def test_invalid_titles_raise(titles):
    with pytest.raises(ValueError, match=r"problem 'q': metadata\.supporting_titles must be a list of strings, not"):
        quality(titles=(), supporting_titles=titles)


@given(st.text(), st.text(min_size=1))
def test_holding_an_answer_agrees_with_cover_exact_match(text, golden):
    one = quality(searched("", text or " ", "x"), golden=(golden,))[0].names.get("golden")
    if one is None:
        assert reward.normalize(golden) in ("", "yes", "no", "noanswer")
    else:
        assert bool(one.shown) == bool(reward.cover_exact_match(text, (golden,)))


def test_repeated_tool_calls_do_not_count_as_shown():
    """The observation repeats each call, and a call may guess the answer."""
    call = '{"name": "wikipedia_search", "arguments": {"query": "Ada of the Mill"}}'
    observation = f"<tool_response>{call}\nNothing about it.\n</tool_response>"
    assert quality(searched("", observation, "?", (call,)))[0].names["golden"].shown == ()
    assert quality(searched("", observation, "?", ()))[0].names["golden"].shown == ("Ada",)
    twice = Turn("", "", (call, call), observation=f"{call} Ada {call} Lake")
    assert shown_text(twice).split() == ["Ada", "Lake"]
    assert shown_text(Turn("", "", ("", "gone"), observation="as it was")) == "as it was"


def test_a_page_with_the_words_of_the_query_counts_as_shown_where_the_observation_has_no_calls():
    """Search-R1 and MEM1 show passages alone: their calls are the queries themselves."""
    queries = (Query("Mill", 5),)
    turn = Turn("", "<search> Mill </search>", ("Mill",), queries, observation="Mill\nAda built it by Lake.")
    assert shown_text(turn) == turn.observation
    (one,) = quality(turn)
    assert one.names["supporting"].shown == ("Mill", "Lake (town)") and one.names["golden"].shown == ("Ada",)


def test_mem1_keeps_what_its_next_state_holds():
    """A state is written before the search of its turn; what the search found is kept by the state that follows."""
    config = replace(AgentConfig(workflow="mem1", max_turns=4), completion_tokens=200)
    found = ['"Mill"\nAda built it by Lake.', '"Lake"\nIt is deep.']
    replies = [
        "<think>I know nothing.</think><search>Mill</search>",
        "<think>Ada built the Mill; Lake.</think><search>Lake</search>",
        "<think>Mill only.</think><search>more</search>",
        "<think>Mill.</think><answer>Ada</answer>",
    ]
    outcome = rollout(config, replies, found)
    assert outcome.stop is StopReason.ANSWERED and len(outcome.turns) == 4
    turns = memory_quality(replace(trajectory(), outcome=outcome))
    first, second, third, last = (turn.metrics for turn in turns)
    assert "golden/shown" not in first and first["golden/held"] == 0.0
    assert second["supporting/shown"] == second["supporting/kept"] == second["golden/kept"] == 1.0
    assert "golden/lost" not in second, "what was found is not what the memory before held"
    assert third["supporting/shown"] == 0.5 and third["supporting/kept"] == 0.0  # Lake
    assert third["golden/lost"] == 1.0 and third["supporting/lost"] == 0.5
    assert not turns[3].wrote_memory and last["supporting/shown"] == 0.5


def test_a_summary_keeps_what_was_shown_since_the_last_one():
    turns = (
        Turn("", "...", observation="Ada"),
        searched("", "the Mill", "Ada of the Mill."),
        Turn("Ada of the Mill.", "...", observation="Lake"),
        searched("Ada of the Mill.", "nothing", "Mill, Lake"),
    )
    first, second, third, fourth = (turn.metrics for turn in quality(*turns))
    assert first["golden/shown"] == 1.0 and "golden/kept" not in first
    assert second["golden/shown"] == second["golden/kept"] == second["supporting/kept"] == 1.0
    assert third["supporting/shown"] == 0.5 and third["golden/shown"] == 0.0
    assert fourth["golden/lost"] == 1.0 and fourth["supporting/kept"] == 1.0 and fourth["golden/shown"] == 0.0


def test_turns_without_an_observation_or_a_memory():
    """An answering turn has neither; a failed rewrite has no memory and loses no names."""
    first = searched("", "Ada of the Mill.", "Ada of the Mill.")
    failed = Turn(first.new_memory, "...", observation="Lake", rewrite="no tags")
    bad = quality(first, failed, stop=StopReason.BAD_MEMORY)
    assert bad[1].metrics == {
        "golden/shown": 0.0,
        "golden/any_shown": 0.0,
        "supporting/shown": 0.5,
        "supporting/any_shown": 1.0,
    }
    answered = quality(first, Turn(first.new_memory, "\\boxed{Ada}"), stop=StopReason.ANSWERED)
    assert answered[1].metrics == {}
    assert last_memory(answered) == last_memory(bad) == answered[0].metrics
    assert quality(stop=StopReason.CONTEXT_FULL) == () and last_memory(()) == {}


def test_an_agent_that_carries_no_memory_holds_nothing_and_one_without_a_memory_has_only_shown_metrics():
    """The ablation `agent.carry_memory false` writes memories that the next turn does not get."""
    written = Turn("", "...", observation="Ada of the Mill", rewrite="<memory> Ada </memory>")
    done = quality(written, written)
    assert [turn.wrote_memory for turn in done] == [True, True]
    cut = Turn("", "<memory>Ada, Mill, Lake</memory>", new_memory="Ada, Mill")  # memagent's reply is its rewrite
    assert [turn.metrics["memory/cut"] for turn in quality(cut, replace(cut, reply="Ada, Mill"))] == [1.0, 0.0]
    zero = ("golden/held", "supporting/held", "memory/words", "memory/cut")
    assert all(means(done)[name] == 0.0 for name in zero) and "memory/copied" not in means(done)
    read = quality(replace(written, rewrite=""), stop=StopReason.ANSWERED)
    assert {name.split("/")[1] for name in means(read)} == {"shown", "any_shown"} and last_memory(read) == {}


def test_lost_refers_to_the_previous_memory():
    """Held, lost, still missing, held again."""
    memories = ("", "Ada, Mill", "Mill", "Mill, Lake", "Ada, Mill, Lake")
    turns = quality(*(searched(old, "-", new) for old, new in itertools.pairwise(memories)))
    assert [turn.names["golden"].lost for turn in turns] == [(), ("Ada",), (), ()]
    assert [turn.metrics.get("golden/lost") for turn in turns] == [None, 1.0, None, None]
    assert [turn.metrics.get("supporting/lost") for turn in turns] == [None, 0.0, 0.0, 0.0]


# --- copying ---


@given(words.filter(len), words, st.integers(1, 6))
def test_copied_tokens_by_definition(memory, source, minimum):
    """A token is copied if a window of the minimum length around it occurs in the source."""
    min_copied_run, joined = min(minimum, len(memory)), f" {' '.join(source)} "
    copied = set()
    for start in range(len(memory) - min_copied_run + 1):
        if f" {' '.join(memory[start : start + min_copied_run])} " in joined:
            copied |= set(range(start, start + min_copied_run))
    assert copied_fraction(memory, source, minimum) == pytest.approx(len(copied) / len(memory))


def test_copying_is_case_sensitive_and_ignores_white_space():
    assert tokenize("Ada's  mill,\n1850.") == ["Ada", "'", "s", "mill", ",", "1850", "."]
    numbers = quality(searched("", "She built the old mill.", "she\nbuilt  the old mill ."))[0].metrics
    assert numbers["memory/copied"] == pytest.approx(5 / 6)


# --- length and change ---


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [("a b c d", "a b c d", 0), ("a b c d", "x y", 1), ("a b c d", "a b x", 3 / 7), ("a b", "a b c d", 2 / 6)],
)
def test_change_between_memories(old, new, changed):
    assert quality(searched(old, "-", new))[0].metrics["memory/changed"] == pytest.approx(changed)


# --- means ---


def test_means_are_over_the_turns_that_have_a_metric():
    keeps = quality(searched("", "Ada", "Ada"), searched("Ada", "Ada", "Ada"), searched("Ada", "Ada", "fog"))
    assert means(keeps)["golden/held"] == pytest.approx(2 / 3) and means(keeps)["golden/lost"] == 0.5
    assert last_memory(keeps)["golden/held"] == 0.0
    assert metric_columns([{"a": 1.0}, {"b": 2.0}, {"a": 3.0}]) == {"a": [1.0, 3.0], "b": [2.0]}
