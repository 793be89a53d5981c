"""Demonstrations are in the form of rollouts: the ids that a sampler would hold, and which of them were said."""

import numpy as np
import pytest
from cli import load_preset

from memsearcher_jax.agent import prompts
from memsearcher_jax.data.demonstrator import Errors
from memsearcher_jax.data.world import WorldConfig
from memsearcher_jax.rl import build
from memsearcher_jax.rl.demonstrate import demonstrate, open_stage, samples_of, slot_samples
from memsearcher_jax.rl.tokens import ChatTokenizer

CONFIG = load_preset("tiny_warmstart")
TOKENIZER = ChatTokenizer.load(build.PACKAGED_TOKENIZER)
WORKFLOW = build.workflow_maker(CONFIG.agent, prompts.load(CONFIG.agent), TOKENIZER)


@pytest.fixture(scope="module")
def stage():
    return open_stage(WorldConfig(seed=3, train_people=32, test_people=16, train_questions=30), CONFIG.retrieval)


@pytest.fixture(scope="module")
def faultless(stage):
    return demonstrate(stage, stage.world.train, Errors(0, 0, 0), WORKFLOW, TOKENIZER, np.random.default_rng(0))


def test_the_real_search_engine_is_good_enough_to_answer_everything(faultless):
    for trajectory in faultless:
        assert trajectory.outcome.answer == trajectory.problem.golden_answers[0]
        over = {name: count for name, count in trajectory.outcome.counts.items() if name != "memory_tokens"}
        assert not any(over.values()), "nothing may be clipped by the preset's budgets"


def test_what_was_said_is_what_is_marked(faultless):
    for trajectory in faultless:
        for turn, context in zip(trajectory.outcome.turns, trajectory.contexts, strict=True):
            said = [id for id, own in zip(context.ids, context.sampled, strict=True) if own]
            replies = [text for text in (turn.reply, turn.rewrite) if text]
            assert TOKENIZER.transcript(said) == "".join(f"{reply}<|im_end|>" for reply in replies)


def test_a_context_begins_as_the_samplers_would(faultless):
    for trajectory in faultless:
        first = trajectory.contexts[0]
        opening = TOKENIZER.prompt(prompts.load(CONFIG.agent).opening(trajectory.problem.question))
        assert first.ids[: len(opening)] == sum(opening.parts, ())
        assert not any(first.sampled[: len(opening)])
        assert first.sampled[len(opening)]


def test_the_same_numbers_give_the_same_demonstrations(stage):
    problems = stage.world.train[:8]
    once, again, other = (
        demonstrate(stage, problems, Errors(), WORKFLOW, TOKENIZER, np.random.default_rng(seed)) for seed in (1, 1, 2)
    )
    assert once == again != other


def test_every_context_is_a_sample_of_its_replies(faultless):
    contexts = [context for trajectory in faultless for context in trajectory.contexts]
    for sample, context in zip(samples_of(faultless), contexts, strict=True):
        assert sample.ids.tolist() == list(context.ids)
        assert sample.sampled.tolist() == list(context.sampled)


@pytest.mark.parametrize("slot", ["query", "fact", "answer"])
def test_a_slot_is_exactly_the_name_that_was_copied(slot, faultless):
    samples = slot_samples(faultless, slot, TOKENIZER)
    names = [TOKENIZER.transcript(sample.ids[sample.sampled].tolist()) for sample in samples]
    expected = []
    for trajectory in faultless:
        path = [*trajectory.problem.metadata["supporting_titles"], trajectory.outcome.answer]
        expected += {"query": path[:-1], "fact": path[1:], "answer": path[-1:]}[slot]
    assert names == expected
