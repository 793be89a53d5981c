"""The scripted agent: faultless it answers everything; each kind of error does what its name says, and nothing else."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from memsearcher_jax.agent import prompts, protocol, reward
from memsearcher_jax.agent.memsearcher import memsearcher
from memsearcher_jax.agent.play import play
from memsearcher_jax.agent.react import react
from memsearcher_jax.agent.types import AgentConfig, Find, Found, Stop
from memsearcher_jax.data.demonstrator import NOTHING, Demonstrator, Errors
from memsearcher_jax.data.world import WorldConfig, make_world

WORLD = make_world(WorldConfig(seed=4, train_people=32, test_people=16, other_people=0, train_questions=60))
TITLES = {passage.title: passage for passage in WORLD.passages}
AGENT = AgentConfig(prompts="terse", max_turns=8, default_top_n=1)


class Words:
    """A ruler that counts words."""

    def count(self, text):
        return len(text.split())

    def clip(self, text, limit):
        return " ".join(text.split()[:limit])


def by_title(find: Find) -> tuple[Found, ...]:
    """Search as it is at best: the passage of that title, else the first whose title has the word."""
    (query,) = find.queries
    near = [passage for title, passage in TITLES.items() if query.text == title]
    near += [passage for title, passage in TITLES.items() if query.text in title.split()]
    return (Found(tuple(near[:1])),)


def played(errors: Errors, problems=WORLD.train, seed: int = 0):
    """(problem, outcome) of each, by one stream of random numbers."""
    rng = random.Random(seed)
    for problem in problems:
        script = Demonstrator(problem, WORLD, errors, rng)
        workflow = memsearcher(problem.question, config=AGENT, prompts=prompts.load(AGENT), ruler=Words())
        yield problem, play(workflow, script, lambda find, script=script: script.read(find, by_title(find)))


def played_react(errors: Errors, problems=WORLD.train, seed: int = 0):
    """As `played`, by the agent that keeps its history."""
    rng, config = random.Random(seed), replace(AGENT, workflow="react", prompts="terse_react")
    for problem in problems:
        script = Demonstrator(problem, WORLD, errors, rng)
        workflow = react(problem.question, config=config, prompts=prompts.load(config), ruler=Words())
        yield problem, play(workflow, script, lambda find, script=script: script.read(find, by_title(find)))


def right(problem, outcome) -> float:
    return reward.exact_match(outcome.answer, problem.golden_answers) if outcome.stop is Stop.ANSWERED else 0.0


def test_without_errors_every_question_is_answered_with_one_search_per_hop():
    for problem, outcome in played(Errors(0, 0, 0)):
        assert right(problem, outcome) == 1, problem
        assert len(outcome.turns) == problem.metadata["hops"] + 1
        assert [turn.queries[0].text for turn in outcome.turns[:-1]] == problem.metadata["supporting_titles"]


def test_the_memory_is_the_newest_fact():
    for problem, outcome in played(Errors(0, 0, 0)):
        for turn, known in zip(outcome.turns[1:], problem.metadata["supporting_titles"][1:], strict=False):
            assert turn.memory.endswith(f" is {known}.")


def test_with_a_history_it_follows_the_same_path_and_writes_nothing_down():
    for problem, outcome in played_react(Errors(0, 0, 0)):
        assert right(problem, outcome) == 1, problem
        assert [turn.queries[0].text for turn in outcome.turns[:-1]] == problem.metadata["supporting_titles"]
        assert not any("<memory>" in turn.reply for turn in outcome.turns)
    lost = [right(problem, outcome) for problem, outcome in played_react(Errors(0, 0, 0.4))]
    assert 0.3 < sum(lost) / len(lost) < 0.9


def test_answering_early_stops_at_the_first_fact():
    for problem, outcome in played(Errors(1, 0, 0)):
        assert len(outcome.turns) == 2
        assert right(problem, outcome) == (problem.metadata["hops"] == 1)


def test_a_wrong_query_finds_less_and_is_made_up_for_in_a_later_turn():
    finished = list(played(Errors(0, 0.5, 0)))
    lost = [(problem, outcome) for problem, outcome in finished if not right(problem, outcome)]
    assert all(outcome.stop is Stop.MAX_TURNS for _, outcome in lost)
    assert 0 < len(lost) < len(finished) / 3
    assert any(len(outcome.turns) > problem.metadata["hops"] + 1 for problem, outcome in finished)


def test_a_bad_memory_holds_another_name_or_nothing():
    written = Counter()
    for problem, outcome in played(Errors(0, 0, 1)):
        assert outcome.stop in (Stop.ANSWERED, Stop.MAX_TURNS)
        for turn in outcome.turns:
            written["nothing" if turn.new_memory == NOTHING else "name"] += bool(turn.new_memory)
        assert not right(problem, outcome) or problem.metadata["hops"] > 1
    assert min(written.values()) > sum(written.values()) / 4


def test_it_does_the_job_badly_by_default():
    scores = [right(*one) for seed in range(5) for one in played(Errors(), seed=seed)]
    assert 0.3 < sum(scores) / len(scores) < 0.5


@pytest.mark.parametrize("errors", [Errors(0, 0, 0), Errors(), Errors(0.3, 0.9, 0.9)])
def test_whatever_it_says_keeps_to_the_protocol(errors):
    for _, outcome in played(errors):
        assert outcome.stop in (Stop.ANSWERED, Stop.MAX_TURNS)
        for turn in outcome.turns:
            assert turn.reply.count("</think>") == 1
            assert bool(protocol.tool_calls(turn.reply)) == bool(turn.rewrite)
            assert not turn.rewrite or protocol.memory(turn.rewrite)
