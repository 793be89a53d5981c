"""Memory metrics against numbers counted by hand and against their definitions."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memsearcher_jax.agent import protocol, reward
from memsearcher_jax.agent.types import Outcome, Problem, Stop, Trajectory, Turn
from memsearcher_jax.report.memory_quality import (
    Rules,
    common_runs,
    copied_share,
    golden_names,
    memory_quality,
    shown_text,
    supporting_names,
    tokens_of,
)

RULES = Rules(reward.normalize, protocol.memory)
words = st.lists(st.sampled_from("abcd"), max_size=12)


class WordRuler:
    """A token is a word."""

    def count(self, text):
        return len(text.split())

    def clip(self, text, limit):
        return " ".join(text.split()[:limit])


def searched(memory, observation, new_memory, calls=()):
    """A turn that searched and rewrote the memory."""
    rewrite = f"I keep this.\n<memory> {new_memory} </memory>"
    return Turn(memory, "...", calls, observation=observation, rewrite=rewrite, new_memory=new_memory)


def trajectory(*turns, golden=("Ada",), titles=("Mill", "Lake (town)"), stop=Stop.MAX_TURNS, id="q", **metadata):
    metadata = metadata | ({"supporting_titles": list(titles)} if titles else {})
    return Trajectory(Problem(id, "Who?", golden, metadata), 0, Outcome(stop, turns=turns), (), "")


def quality(*turns, rules=RULES, **changes):
    return memory_quality(trajectory(*turns, **changes), rules)


# --- what stood where ---


def test_one_turn_by_hand():
    turn = searched("", "The Mill stands at Lake; Ada built it.", "Ada built the mill.")
    (one,) = quality(turn).turns
    assert one.golden.wanted == one.golden.shown == one.golden.held == ("Ada",)
    assert one.supporting.shown == ("Mill", "Lake (town)")  # a sentence leaves the qualifier out
    assert one.supporting.held == ("Mill",)
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
            "memory/longest_run": 2.0,
        }
    )


def test_what_was_kept_is_a_share_of_what_was_shown():
    """Held is about all names, kept about those that this observation showed; the other came from the old memory."""
    turn = searched("Lake is known.", "The Mill is old.", "Lake is known.")
    numbers = quality(turn).turns[0].metrics
    assert (numbers["supporting/held"], numbers["supporting/kept"], numbers["supporting/lost"]) == (0.5, 0.0, 0.0)


def test_a_share_of_nothing_is_absent():
    numbers = quality(searched("", "Nothing of use.", "Nothing yet.")).turns[0].metrics
    assert numbers["golden/shown"] == numbers["golden/held"] == 0.0
    assert not {"golden/kept", "golden/lost", "golden/forgotten", "memory/changed"} & numbers.keys()


def test_names_that_a_text_cannot_hold_are_not_looked_for():
    def names(*golden):
        return golden_names(Problem("q", "?", golden), reward.normalize)

    assert names("Yes", "no.", "The", "...") == {}  # almost every text would hold them
    assert list(names("The Beatles", "Beatles", "beatles!")) == ["The Beatles"]  # one spelling of each
    turn = searched("", "No, yes.", "yes")
    assert quality(turn, golden=("yes",)).turns[0].golden is None
    assert quality(turn, titles=()).turns[0].supporting is None


def test_a_title_counts_with_and_without_its_qualifier():
    titles = {"supporting_titles": ["Fame (2009 Film)", "(I)", "AC/DC"]}
    names = supporting_names(Problem("q", "?", (), titles), reward.normalize)
    assert names == {"Fame (2009 Film)": ("fame 2009 film", "fame"), "(I)": ("i",), "AC/DC": ("acdc",)}


@pytest.mark.parametrize("titles", ["Mill", ["Mill", 3], {"title": "Mill"}])
def test_titles_that_are_no_titles_are_refused(titles):
    with pytest.raises(ValueError, match=r"problem 'q': metadata\.supporting_titles must be a list of titles"):
        quality(titles=(), supporting_titles=titles)


def test_hops_that_are_no_number_are_refused():
    with pytest.raises(ValueError, match=r"problem 'q': metadata\.hops must be a whole number, it is '2'"):
        quality(hops="2")


@given(st.text(), st.text(min_size=1))
def test_holding_an_answer_means_what_cover_exact_match_means(text, golden):
    one = quality(searched("", text or " ", "x"), golden=(golden,)).turns[0].golden
    if one is None:
        assert reward.normalize(golden) in ("", "yes", "no", "noanswer")
    else:
        assert bool(one.shown) == bool(reward.cover_exact_match(text, (golden,)))


def test_what_the_policy_asked_for_was_not_shown():
    """The observation repeats each call, and a call may guess the answer."""
    call = '{"name": "wikipedia_search", "arguments": {"query": "Ada of the Mill"}}'
    observation = f"<tool_response>{call}\nNothing about it.\n</tool_response>"
    assert quality(searched("", observation, "?", (call,))).turns[0].golden.shown == ()
    assert quality(searched("", observation, "?", ())).turns[0].golden.shown == ("Ada",)
    twice = Turn("", "", (call, call), observation=f"{call} Ada {call} Lake")
    assert shown_text(twice).split() == ["Ada", "Lake"]
    assert shown_text(Turn("", "", ("", "gone"), observation="as it was")) == "as it was"


def test_turns_without_an_observation_or_a_memory():
    """An answering turn has neither; a rewrite that failed has no memory; what came before it is not lost by it."""
    first = searched("", "Ada of the Mill.", "Ada of the Mill.")
    failed = Turn(first.new_memory, "...", observation="Lake", rewrite="no tags")
    bad = quality(first, failed, stop=Stop.BAD_MEMORY)
    assert bad.turns[1].metrics == {
        "golden/shown": 0.0,
        "golden/any_shown": 0.0,
        "supporting/shown": 0.5,
        "supporting/any_shown": 1.0,
    }
    answered = quality(first, Turn(first.new_memory, "\\boxed{Ada}"), stop=Stop.ANSWERED)
    assert answered.turns[1].metrics == {}
    assert answered.turns[1].golden.held_before == ("Ada",)
    assert answered.last == bad.last == answered.turns[0].metrics
    assert quality(stop=Stop.CONTEXT_FULL).turns == ()
    assert quality(stop=Stop.CONTEXT_FULL).last == quality().means == {}


def test_lost_is_since_the_turn_before_and_forgotten_since_ever():
    """Held, lost, still gone, found again."""
    memories = ("", "Ada, Mill", "Mill", "Mill, Lake", "Ada, Mill, Lake")
    turns = quality(*(searched(old, "-", new) for old, new in itertools.pairwise(memories))).turns
    assert [turn.golden.lost for turn in turns] == [(), ("Ada",), (), ()]
    assert [turn.golden.forgotten for turn in turns] == [(), ("Ada",), ("Ada",), ()]
    assert [turn.metrics.get("golden/lost") for turn in turns] == [None, 1.0, None, None]
    assert [turn.metrics.get("golden/forgotten") for turn in turns] == [None, 1.0, 1.0, 0.0]
    assert [turn.metrics.get("supporting/lost") for turn in turns] == [None, 0.0, 0.0, 0.0]


# --- copying ---


@pytest.mark.parametrize(
    ("memory", "source", "runs"),
    [
        ("a b c", "x a b c y", [1, 2, 3]),
        ("a b c", "a b x b c", [1, 2, 2]),
        ("a b a b", "a b", [1, 2, 1, 2]),  # the source may be used again
        ("a z b", "b a", [1, 0, 1]),
        ("a a a", "a a", [1, 2, 2]),
        ("a", "", [0]),
        ("", "a", []),
    ],
)
def test_runs_by_hand(memory, source, runs):
    assert common_runs(memory.split(), source.split()).tolist() == runs


@given(words, words)
def test_runs_by_definition(memory, source):
    joined = f" {' '.join(source)} "
    for end, length in enumerate(common_runs(memory, source).tolist(), start=1):
        holds = [f" {' '.join(memory[start:end])} " in joined for start in range(end)]
        assert length == next((end - start for start in range(end) if holds[start]), 0)


@given(words.filter(len), words, st.integers(1, 6))
def test_copied_tokens_by_definition(memory, source, least):
    """A token is copied if some window of the least length around it stands in the source."""
    least_run, joined = min(least, len(memory)), f" {' '.join(source)} "
    copied = set()
    for start in range(len(memory) - least_run + 1):
        if f" {' '.join(memory[start : start + least_run])} " in joined:
            copied |= set(range(start, start + least_run))
    assert copied_share(common_runs(memory, source), least) == pytest.approx(len(copied) / len(memory))


def test_short_runs_are_no_copying():
    source = "one two three four five six seven"
    turn = searched("", source, "one two three four X three four five six seven")
    numbers = quality(turn).turns[0].metrics
    assert numbers["memory/copied"] == 0.5  # "one two three four" is below the least run of five
    assert numbers["memory/longest_run"] == 5.0
    shorter = Rules(reward.normalize, protocol.memory, least_run=4)
    assert quality(turn, rules=shorter).turns[0].metrics["memory/copied"] == 0.9


def test_a_memory_shorter_than_the_least_run_is_copied_if_it_is_one_run():
    assert quality(searched("", "Ada Lovelace was here.", "Ada Lovelace")).turns[0].metrics["memory/copied"] == 1.0
    assert quality(searched("", "Ada Lovelace was here.", "Ada was")).turns[0].metrics["memory/copied"] == 0.0


def test_copying_is_to_the_letter_and_does_not_count_white_space():
    assert tokens_of("Ada's  mill,\n1850.") == ["Ada", "'", "s", "mill", ",", "1850", "."]
    numbers = quality(searched("", "She built the old mill.", "she\nbuilt  the old mill .")).turns[0].metrics
    assert numbers["memory/copied"] == pytest.approx(5 / 6)


# --- length and change ---


def test_length_against_the_budget_and_cuts():
    rules = Rules(reward.normalize, protocol.memory, ruler=WordRuler(), budget=4)
    whole, cut = searched("", "-", "one two three"), searched("one two three", "-", "one two three four five six")
    cut = Turn(cut.memory, cut.reply, observation="-", rewrite=cut.rewrite, new_memory="one two three four")
    first, second = (turn.metrics for turn in quality(whole, cut, rules=rules).turns)
    names = ("memory/words", "memory/tokens", "memory/fill", "memory/cut", "memory/tokens_cut")
    assert [first[name] for name in names] == [3, 3, 0.75, 0, 0]
    assert [second[name] for name in names] == [4, 4, 1.0, 1, 2]


@pytest.mark.parametrize(
    ("old", "new", "changed", "removed", "added"),
    [
        ("a b c d", "a b c d", 0.0, 0.0, 0.0),
        ("a b c d", "x y", 1.0, 1.0, 1.0),
        ("a b c d", "a b x", 3 / 7, 0.5, 1 / 3),
        ("a b", "a b c d", 2 / 6, 0.0, 0.5),
        ("a  b", "a\nb", 0.0, 0.0, 0.0),
    ],
)
def test_change_between_memories(old, new, changed, removed, added):
    numbers = quality(searched(old, "-", new)).turns[0].metrics
    measured = [numbers[f"memory/{name}"] for name in ("changed", "removed", "added")]
    assert measured == pytest.approx([changed, removed, added])


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"least_run": 0}, "least_run is 0"), ({"ruler": WordRuler()}, "budget is 0: with a ruler")],
)
def test_rules_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Rules(reward.normalize, protocol.memory, **changes)


names = st.sampled_from(["Ada", "Mill", "Lake", "fog", "rain", ""])
texts = st.lists(names, max_size=6).map(" ".join)


@given(st.lists(st.tuples(texts, texts), max_size=5), st.sampled_from(Stop))
@settings(max_examples=150)
def test_shares_are_shares(pairs, stop):
    memories = ["", *(new for _, new in pairs)]
    turns = [searched(memories[at], shown, new) for at, (shown, new) in enumerate(pairs)]
    for turn in quality(*turns, stop=stop).turns:
        for name, value in turn.metrics.items():
            assert value >= 0
            assert name in ("memory/words", "memory/longest_run") or value <= 1
        for part in (turn.golden, turn.supporting):
            assert part.held is None or set(part.lost) == set(part.held_before) - set(part.held)
            assert part.lost is None or set(part.lost) <= set(part.forgotten)
