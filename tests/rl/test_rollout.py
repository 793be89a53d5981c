"""The driver: many workflows, few slots, real ids."""

import itertools
import threading
from dataclasses import replace

import jax
import numpy as np
import pytest

from memsearcher_jax.agent.types import (
    Find,
    Finish,
    Outcome,
    Passage,
    Piece,
    Problem,
    Prompt,
    Query,
    Say,
    Stop,
)
from memsearcher_jax.model import qwen, sharding
from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.rl.rollout import RolloutDriver, jobs_for
from memsearcher_jax.rl.searches import SearchDesk, search_all
from memsearcher_jax.sampling.buffer import PromptWidths
from memsearcher_jax.sampling.engine import Engine
from memsearcher_jax.sampling.pool import make_sampler
from memsearcher_jax.testing import NANO, NANO_SAMPLING, TinyIndex, byte_tokenizer

TOKENIZER = byte_tokenizer()
KEY = jax.random.key(5)
SETTINGS = replace(NANO_SAMPLING, context_tokens=160)
PASSAGES = tuple(Passage(str(n), f'"Title {n}"\nText of number {n}.') for n in range(4))
PROBLEMS = [Problem(f"q{n}", f"Who is {n}?", (f"a{n}",)) for n in range(4)]


class BrokenIndex:
    def search(self, queries, top_n):
        raise TimeoutError("no answer in 10 s")


def two_turns(problem):
    """Two contexts of two generations each, with a search between; as long as MemSearcher's, without its parsing."""
    heard = []
    for turn in range(2):
        prompt = Prompt("<|im_start|>user\n", problem.question, " ", f"memory {turn}", "<|im_end|>\n")
        heard.append((yield Say(prompt, 6)))
        found = yield Find((Query(f"number {turn}", 2), Query("title", 1)))
        shown = "".join(passage.contents for one in found for passage in one.passages)[:40] or found[0].error
        heard.append((yield Say((Piece("\n<|im_start|>", True), Piece(shown, False)), 5)))
    return Outcome(Stop.ANSWERED, answer="".join(reply.text for reply in heard))


@pytest.fixture(scope="module")
def params():
    return jax.jit(lambda key: qwen.init(key, NANO))(jax.random.key(0))


@pytest.fixture(scope="module")
def engine():
    mesh = sharding.make_mesh(MeshConfig(1, 1, 1), jax.devices()[:1])
    widths = PromptWidths(prefix=20, question=20, bridge=2, memory=20, suffix=4)
    return Engine(NANO, SETTINGS, widths, TOKENIZER.stop_ids, mesh)


def roll(engine, params, workflow, problems=PROBLEMS, rollouts=2, searcher=None):
    driver = RolloutDriver(engine, TOKENIZER, searcher or TinyIndex(PASSAGES), workflow)
    done = {job.number: trajectory for job, trajectory in driver.run(jobs_for(problems, rollouts), params, KEY)}
    assert sorted(done) == list(range(len(problems) * rollouts))
    assert len(engine.free) == engine.settings.slots
    return [done[number] for number in sorted(done)]


def generations(context):
    """The runs of sampled tokens, in order."""
    marked = zip(context.sampled, context.ids, strict=True)
    return [[id for _, id in run] for own, run in itertools.groupby(marked, key=lambda pair: pair[0]) if own]


def test_every_problem_gets_its_rollouts_and_every_context_its_ids(engine, params):
    trajectories = roll(engine, params, two_turns)
    assert [trajectory.problem.id for trajectory in trajectories] == [f"q{n}" for n in range(4) for _ in range(2)]
    assert [trajectory.rollout for trajectory in trajectories] == [0, 1] * 4
    for trajectory in trajectories:
        assert len(trajectory.contexts) == 2
        for turn, context in enumerate(trajectory.contexts):
            opening = f"<|im_start|>user\n{trajectory.problem.question} memory {turn}<|im_end|>\n"
            ids = TOKENIZER.encode_template(opening)
            assert context.ids[: len(ids)] == ids
            assert not any(context.sampled[: len(ids)])
            assert sum(context.sampled) <= 11
        assert trajectory.transcript == TOKENIZER.transcript(trajectory.contexts[-1].ids)


def test_what_was_heard_is_what_was_sampled(engine, params):
    for trajectory in roll(engine, params, two_turns):
        heard = [TOKENIZER.reply(ids).text for context in trajectory.contexts for ids in generations(context)]
        assert len(heard) == 4
        assert trajectory.outcome.answer == "".join(heard)


def test_rollouts_of_a_problem_differ_and_a_replay_does_not(engine, params):
    first, again = roll(engine, params, two_turns), roll(engine, params, two_turns)
    assert first == again
    assert first[0].contexts != first[1].contexts


def test_a_trajectory_does_not_depend_on_its_company(engine, params):
    together = roll(engine, params, two_turns)
    alone = roll(engine, params, two_turns, PROBLEMS[:1], rollouts=2)
    for ours, theirs in zip(alone, together, strict=False):
        assert [context.ids for context in ours.contexts] == [context.ids for context in theirs.contexts]
        for mine, other in zip(ours.contexts, theirs.contexts, strict=True):
            np.testing.assert_allclose(mine.logprobs, other.logprobs, atol=1e-5)


def test_engines_apart_roll_out_what_one_does(engine, params):
    mesh = sharding.make_mesh(MeshConfig(2, 1, 1), jax.devices()[:2])
    settings = replace(SETTINGS, slots=4, apart=True)
    widths = PromptWidths(prefix=20, question=20, bridge=2, memory=20, suffix=4)
    pool = make_sampler(NANO, settings, widths, TOKENIZER.stop_ids, mesh)
    placed = jax.device_put(params, sharding.param_shardings(NANO, mesh))
    for one, other in zip(roll(engine, params, two_turns), roll(pool, placed, two_turns), strict=True):
        assert [context.ids for context in one.contexts] == [context.ids for context in other.contexts]
        assert one.outcome == other.outcome


def test_a_search_is_waited_for_only_so_long():
    let_go = threading.Event()

    class Slow:
        def search(self, queries, top_n):
            let_go.wait(60)
            return [[] for _ in queries]

    desk = SearchDesk(Slow(), 60.0)
    assert desk.asking == 0
    desk.ask("somebody", Find((Query("who?", 1),)))
    desk.start()
    assert desk.asking == 1
    desk.wait(0.01)
    assert list(desk.answers()) == []
    let_go.set()
    desk.wait(60)
    assert [asker for asker, _ in desk.answers()] == ["somebody"]
    assert desk.asking == 0


def test_a_workflow_that_raises_ends_alone(engine, params):
    def sometimes(problem):
        if problem.id == "q2":
            yield Say(Prompt("", problem.question, "", "", ""), 4)
            raise KeyError("lost")
        return (yield from two_turns(problem))

    trajectories = roll(engine, params, sometimes)
    stops = [trajectory.outcome.stop for trajectory in trajectories]
    assert stops == [Stop.ANSWERED] * 4 + [Stop.FAULT] * 2 + [Stop.ANSWERED] * 2
    assert trajectories[4].outcome.error == "KeyError: 'lost'"
    assert [one.contexts for one in trajectories[:4]] == [one.contexts for one in roll(engine, params, two_turns)[:4]]


def test_a_failed_search_is_an_answer(engine, params):
    def asks(problem):
        found = yield Find((Query("number", 1), Query("title", 1)))
        return Outcome(Stop.SEARCH_FAILED, error=found[1].error)

    for trajectory in roll(engine, params, asks, searcher=BrokenIndex()):
        assert trajectory.outcome.error == "TimeoutError: no answer in 10 s"
        assert (trajectory.contexts, trajectory.transcript) == ((), "")


def test_text_that_does_not_fit_is_refused_and_the_context_stays(engine, params):
    def grows(problem):
        yield Say(Prompt("", problem.question, "", "", ""), 4)
        reply = yield Say((Piece("x" * 150, True),), 4)
        return Outcome(Stop.CONTEXT_FULL if reply.finish is Finish.NO_ROOM else Stop.ANSWERED)

    for trajectory in roll(engine, params, grows):
        assert trajectory.outcome.stop is Stop.CONTEXT_FULL
        assert len(trajectory.contexts[0].ids) <= len(TOKENIZER.encode_outside(trajectory.problem.question)) + 4


def test_a_workflow_may_end_without_a_word(engine, params):
    def silent(problem):
        return Outcome(Stop.NO_ANSWER)
        yield

    assert all(one.outcome.stop is Stop.NO_ANSWER for one in roll(engine, params, silent))


def test_one_batched_search_gives_each_query_its_own_share():
    finds = [Find((Query("number 1", 2), Query("number 2", 1))), Find((Query("number 3", 3),))]
    answers = search_all(TinyIndex(PASSAGES), finds)
    assert [[len(found.passages) for found in answer] for answer in answers] == [[2, 1], [3]]
    assert [answer[0].passages[0].id for answer in answers] == ["1", "3"]
