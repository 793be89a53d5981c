"""Exercises: what is trained can be known from what stands before it, and nothing else is trained."""

import numpy as np

from memsearcher_jax.agent import prompts
from memsearcher_jax.agent.types import AgentConfig
from memsearcher_jax.data.demonstrator import KNOWN, Errors, box, call
from memsearcher_jax.data.language import RELATION
from memsearcher_jax.data.world import WorldConfig, make_world
from memsearcher_jax.rl import build, exercises
from memsearcher_jax.rl.tokens import ChatTokenizer

TOKENIZER = ChatTokenizer.load(build.PACKAGED_TOKENIZER)
WORLD = make_world(WorldConfig(seed=5, train_people=16, test_people=16, other_people=0, train_questions=6))
PROMPTS = prompts.load(AgentConfig(prompts="terse"))


def decisions(rng, tokenizer, count, answer_early=0.0):
    return exercises.decisions(rng, tokenizer, PROMPTS, WORLD, Errors(answer_early, 0, 0), count)


def test_the_second_of_two_runs_is_trained_from_its_second_token_on():
    for sample in exercises.copies(np.random.default_rng(0), TOKENIZER, 50):
        first, second = np.split(sample.ids, 2)
        np.testing.assert_array_equal(first, second)
        assert sample.sampled.tolist() == [False] * (len(first) + 1) + [True] * (len(first) - 1)
        assert sample.sampled.any()
        assert not set(sample.ids.tolist()) & set(TOKENIZER.stop_ids)


def test_a_recitation_states_every_fact_of_the_passage_that_it_follows():
    passages = {passage.title: passage.contents for passage in WORLD.passages}
    told = set()
    for sample in exercises.recitations(np.random.default_rng(0), TOKENIZER, WORLD, 30):
        read, said = (TOKENIZER.transcript(sample.ids[mask].tolist()) for mask in (~sample.sampled, sample.sampled))
        title = next(title for title in passages if read.startswith(f'"{title}"'))
        assert read == passages[title] + "\n"
        facts = WORLD.entities[title].relations.items()
        stated = [f"{RELATION[name].phrase.format(x=title)} is {value}." for name, value in facts]
        assert sorted(said.replace(". ", ".|").split("|")) == sorted(stated)
        told.add(title)
    assert len(told) == 30, "no passage comes twice"


def test_a_decision_follows_from_the_question_and_the_memory():
    """Faultless: who remembers the last fact answers, and who remembers an earlier one searches for its end."""
    asked = {problem.question: problem for problem in (*WORLD.train, *WORLD.test)}
    remembered = {hops: set() for hops in (1, 2, 3)}
    samples = decisions(np.random.default_rng(0), TOKENIZER, len(asked))
    for sample in samples:
        read, said = (TOKENIZER.transcript(sample.ids[mask].tolist()) for mask in (~sample.sampled, sample.sampled))
        problem = next(problem for question, problem in asked.items() if question in read)
        chain = [*problem.metadata["supporting_titles"], *problem.golden_answers]
        facts = next(count for count in range(1, len(chain)) if f" is {chain[count]}." in read)
        assert (KNOWN in said) == (facts == len(chain) - 1)
        assert (box(chain[-1]) if facts == len(chain) - 1 else call(chain[facts])) in said
        remembered[len(chain) - 1].add(facts)
    assert len(samples) == len(asked), "no question comes twice"
    assert remembered == {1: {1}, 2: {1, 2}, 3: {1, 2, 3}}


def test_a_decision_can_be_wrong():
    samples = decisions(np.random.default_rng(0), TOKENIZER, 20, answer_early=1.0)
    said = [TOKENIZER.transcript(sample.ids[sample.sampled].tolist()) for sample in samples]
    assert all("boxed" in one for one in said) and not all(KNOWN in one for one in said)


def test_the_same_numbers_give_the_same_exercises():
    for make in (exercises.copies, lambda *given: exercises.recitations(*given[:2], WORLD, given[2]), decisions):
        once, again, other = (make(np.random.default_rng(seed), TOKENIZER, 5) for seed in (1, 1, 2))
        assert [one.ids.tolist() for one in once] == [one.ids.tolist() for one in again]
        assert [one.ids.tolist() for one in once] != [one.ids.tolist() for one in other]
