"""The scripted search agent of the invented encyclopedia, its errors, and tasks that their context determines."""

import random
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from examples.warmstart.record import decisions, open_run
from examples.warmstart.record import demonstrate as play
from examples.warmstart.search import (
    COPIED_SPANS,
    EMPTY_MEMORY,
    GUESS,
    KNOWN,
    NO_ERRORS,
    Errors,
    SearchDemonstrator,
    Tasks,
    format_answer,
    format_search,
)
from memsearcher_jax.agent import protocol, reward
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
SMALL = open_tasks(EncyclopediaConfig(train_people=16, test_people=16, other_people=0, train_questions=6), 5)


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


def test_rag_reads_the_facts_that_its_passages_show():
    for problem, outcome in run_demonstrator(NO_ERRORS, RAG):
        assert outcome.stop is StopReason.ANSWERED
        assert (KNOWN in outcome.turns[0].reply) == (problem.metadata["hops"] == 1) == exact_match(problem, outcome)


def test_direct_guesses():
    for problem, outcome in run_demonstrator(NO_ERRORS, DIRECT):
        assert outcome.turns[0].reply.startswith(GUESS)
        assert outcome.answer == problem.metadata["supporting_titles"][0]


def test_answering_early_stops_at_the_first_fact():
    for problem, outcome in run_demonstrator(Errors(1, 0, 0)):
        assert len(outcome.turns) == 2
        assert exact_match(problem, outcome) == (problem.metadata["hops"] == 1)


def test_wrong_query_costs_turns_and_sometimes_the_answer():
    outcomes = list(run_demonstrator(Errors(0, 0.5, 0)))
    failed = [(problem, outcome) for problem, outcome in outcomes if not exact_match(problem, outcome)]
    assert all(outcome.stop is StopReason.MAX_TURNS for _, outcome in failed)
    assert 0 < len(failed) < len(outcomes) / 3
    assert any(len(outcome.turns) > problem.metadata["hops"] + 1 for problem, outcome in outcomes)


def test_bad_memory_holds_another_name_or_nothing():
    memories = Counter()
    for problem, outcome in run_demonstrator(Errors(0, 0, 1)):
        assert outcome.stop in (StopReason.ANSWERED, StopReason.MAX_TURNS)
        for turn in outcome.turns:
            memories["empty" if turn.new_memory == EMPTY_MEMORY else "name"] += bool(turn.new_memory)
        assert not exact_match(problem, outcome) or problem.metadata["hops"] > 1
    assert min(memories.values()) > sum(memories.values()) / 4


@pytest.mark.parametrize("errors", [NO_ERRORS, Errors(), Errors(0.3, 0.9, 0.9)])
def test_replies_always_follow_the_protocol(errors):
    for _, outcome in run_demonstrator(errors):
        assert outcome.stop in (StopReason.ANSWERED, StopReason.MAX_TURNS)
        for turn in outcome.turns:
            assert turn.reply.count("</think>") == 1
            assert bool(protocol.tool_calls(turn.reply)) == bool(turn.rewrite)
            assert not turn.rewrite or protocol.memory(turn.rewrite)


@pytest.fixture(scope="module")
def demonstrations():
    return play(TASKS.run, TASKS.encyclopedia.train, partial(TASKS.policy, NO_ERRORS, np.random.default_rng(0)))


def text_of(task, sampled):
    """The given or the trained text of a task."""
    (context,) = task.trajectory.contexts
    return TOKENIZER.transcript([id for id, flag in zip(context.ids, context.sampled, strict=True) if flag == sampled])


def test_demonstrator_answers_everything_with_real_search_results(demonstrations):
    for trajectory in (one.trajectory for one in demonstrations):
        assert trajectory.outcome.answer == trajectory.problem.golden_answers[0]
        clipped = {name: count for name, count in trajectory.outcome.counts.items() if name != "memory_tokens"}
        assert not any(clipped.values()), "nothing may be clipped by the preset's budgets"


def test_sampled_mask_marks_exactly_the_replies(demonstrations):
    for trajectory in (one.trajectory for one in demonstrations):
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


def actions(rng, count, answer_early=0.0):
    return SMALL.actions(rng, Errors(answer_early, wrong_query=0, bad_memory=0), count)


def test_action_follows_from_the_question_and_the_memory():
    """Without errors, the agent answers if the memory holds the last fact, and otherwise searches for its object."""
    problems = {problem.question: problem for problem in (*SMALL.encyclopedia.train, *SMALL.encyclopedia.test)}
    fact_counts = {hops: set() for hops in (1, 2, 3)}
    tasks = actions(np.random.default_rng(0), len(problems))
    for task in tasks:
        context, target = text_of(task, False), text_of(task, True)
        problem = next(problem for question, problem in problems.items() if question in context)
        chain = [*problem.metadata["supporting_titles"], *problem.golden_answers]
        facts = next(count for count in range(1, len(chain)) if f" is {chain[count]}." in context)
        assert (KNOWN in target) == (facts == len(chain) - 1)
        assert (format_answer(chain[-1]) if facts == len(chain) - 1 else format_search(chain[facts])) in target
        fact_counts[len(chain) - 1].add(facts)
    assert len(tasks) == len(problems), "questions must not repeat"
    assert fact_counts == {1: {1}, 2: {1, 2}, 3: {1, 2, 3}}


def test_the_search_has_the_encoder_of_the_run(tmp_path):
    """Its folder is read; this one is empty."""
    retrieval = replace(CONFIG.retrieval, method="dense", encoder=str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"config.json"):
        Tasks.open(replace(RUN, config=replace(CONFIG, retrieval=retrieval)), 3)
