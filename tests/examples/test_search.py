"""The scripted search agent of the invented encyclopedia, its errors, and tasks that their context determines."""

import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from examples.warmstart.record import decisions, open_run
from examples.warmstart.record import demonstrate as play
from examples.warmstart.search import (
    COPIED_SPANS,
    NO_ERRORS,
    Errors,
    SearchDemonstrator,
    Tasks,
)
from memsearcher_jax.agent import reward
from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.agent.prompts import ASSISTANT, with_workflow
from memsearcher_jax.agent.registry import make_agent
from memsearcher_jax.agent.run import run_workflow
from memsearcher_jax.agent.search_r1 import parse_answer
from memsearcher_jax.data.synthetic.encyclopedia import EncyclopediaConfig, make_encyclopedia
from memsearcher_jax.launch.cli import load_preset
from memsearcher_jax.types import SearchResult, StopReason

CONFIG = load_preset("tiny_warmstart")
RUN = open_run(CONFIG)
TOKENIZER, PROMPTS = RUN.tokenizer, RUN.agent.prompts
ENCYCLOPEDIA = make_encyclopedia(
    EncyclopediaConfig(seed=4, train_people=32, test_people=16, other_people=0, train_questions=60)
)
PASSAGES = {passage.title: passage for passage in ENCYCLOPEDIA.passages}
AGENT = AgentConfig(prompts="terse", max_turns=8, default_top_n=1)
WITH_HISTORY = [with_workflow(AGENT, "react"), with_workflow(AGENT, "search_r1")]
RAG, DIRECT = with_workflow(AGENT, "rag"), with_workflow(AGENT, "direct")


def open_tasks(encyclopedia, seed):
    return Tasks.open(replace(RUN, config=replace(CONFIG, data=replace(CONFIG.data, encyclopedia=encyclopedia))), seed)


TASKS = open_tasks(EncyclopediaConfig(train_people=32, test_people=16, train_questions=30), 3)


def search_titles(request):
    """An ideal search: the passage with that title, else the first whose title contains the word, or is asked about."""
    (query,) = request.queries
    matches = [passage for title, passage in PASSAGES.items() if query.text == title]
    matches += [passage for title, passage in PASSAGES.items() if query.text in title.split() or title in query.text]
    return (SearchResult(tuple(matches[:1])),)


def run_demonstrator(errors: Errors, agent=AGENT, seed: int = 0):
    """(problem, outcome) of every training problem, with one random generator for all."""
    rng, made = random.Random(seed), make_agent(agent)
    for problem in ENCYCLOPEDIA.train:
        policy = SearchDemonstrator(problem, ENCYCLOPEDIA, errors, rng, workflow=agent.workflow)

        def search(request, policy=policy):
            policy.results = search_titles(request)
            return policy.results

        yield problem, run_workflow(made.start(problem, TOKENIZER), policy, search)


def exact_match(problem, outcome) -> float:
    return reward.exact_match(outcome.answer, problem.golden_answers) if outcome.stop is StopReason.ANSWERED else 0.0


def test_without_errors_every_question_is_answered_with_one_search_per_hop():
    for problem, outcome in run_demonstrator(NO_ERRORS):
        assert exact_match(problem, outcome) == 1, problem
        assert len(outcome.turns) == problem.metadata["hops"] + 1
        assert [turn.queries[0].text for turn in outcome.turns[:-1]] == problem.metadata["supporting_titles"]


@pytest.mark.parametrize("agent", WITH_HISTORY, ids=lambda agent: agent.workflow)
def test_workflows_with_a_history_follow_the_same_chain_without_writing_memories(agent):
    for problem, outcome in run_demonstrator(NO_ERRORS, agent):
        assert exact_match(problem, outcome) == 1, problem
        assert [turn.queries[0].text for turn in outcome.turns[:-1]] == problem.metadata["supporting_titles"]
        assert not any("<memory>" in turn.reply for turn in outcome.turns)
    matches = [exact_match(problem, outcome) for problem, outcome in run_demonstrator(Errors(0, 0, 0.4), agent)]
    assert 0.3 < sum(matches) / len(matches) < 0.9


def test_search_r1_is_demonstrated_in_its_format():
    for _, outcome in run_demonstrator(Errors(), WITH_HISTORY[1]):
        transcript = "".join(turn.reply + turn.observation for turn in outcome.turns)
        answer, error = parse_answer(ASSISTANT + transcript)
        assert outcome.stop is StopReason.MAX_TURNS or (answer, error) == (outcome.answer, "")
        assert not outcome.counts["invalid_actions"]


@pytest.fixture(scope="module")
def demonstrations():
    return play(TASKS.run, TASKS.encyclopedia.train, partial(TASKS.policy, NO_ERRORS, np.random.default_rng(0)))


def text_of(task, sampled):
    """The given or the trained text of a task."""
    (context,) = task.trajectory.contexts
    return TOKENIZER.transcript([id for id, flag in zip(context.ids, context.sampled, strict=True) if flag == sampled])


def test_sampled_mask_marks_exactly_the_replies(demonstrations):
    for trajectory in (one.trajectory for one in demonstrations):
        assert trajectory.outcome.answer == trajectory.problem.golden_answers[0], "the search is that of the preset"
        for turn, context in zip(trajectory.outcome.turns, trajectory.contexts, strict=True):
            ids = [id for id, sampled in zip(context.ids, context.sampled, strict=True) if sampled]
            replies = [text for text in (turn.reply, turn.rewrite) if text]
            assert TOKENIZER.transcript(ids) == "".join(f"{reply}<|im_end|>" for reply in replies)


@pytest.mark.parametrize("span", ["query", "fact", "answer"])
def test_decisions_train_exactly_the_copied_names(span, demonstrations):
    names = [text_of(task, True) for task in decisions(span, demonstrations, COPIED_SPANS[span], TOKENIZER)]
    expected = []
    for trajectory in (one.trajectory for one in demonstrations):
        chain = [*trajectory.problem.metadata["supporting_titles"], trajectory.outcome.answer]
        expected += {"query": chain[:-1], "fact": chain[1:], "answer": chain[-1:]}[span]
    assert names == expected
