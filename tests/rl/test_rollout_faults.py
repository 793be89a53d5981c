"""What goes wrong with one trajectory ends that one, is counted, leaves the others alone and leaks no slot."""

import threading
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memsearcher_jax.agent.types import Find, Finish, Outcome, Passage, Piece, Problem, Prompt, Query, Say, Stop
from memsearcher_jax.model import qwen, sharding
from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.report.trajectories import Scored
from memsearcher_jax.rl.rollout import RolloutDriver, jobs_for
from memsearcher_jax.rl.score import summarise
from memsearcher_jax.sampling.buffer import PromptWidths
from memsearcher_jax.sampling.engine import Engine
from memsearcher_jax.testing import NANO, NANO_SAMPLING, TinyIndex, byte_tokenizer

TOKENIZER = byte_tokenizer()
KEY = jax.random.key(9)
MODEL = replace(NANO, tied=False)
SETTINGS = NANO_SAMPLING
PASSAGES = (Passage("0", '"Title"\nText.'),)
PROBLEMS = [Problem(f"q{n}", f"Who is {n}?", (f"a{n}",)) for n in range(5)]
BAD = "q2"
POISON = TOKENIZER.encode_outside("~")[0]


@pytest.fixture(scope="module")
def healthy():
    return jax.jit(lambda key: qwen.init(key, MODEL))(jax.random.key(0))


@pytest.fixture(scope="module")
def params(healthy):
    """Weights under which every context that holds a `~` has logits that are not numbers."""
    return healthy | {"embed": healthy["embed"].at[POISON].set(jnp.nan)}


@pytest.fixture(scope="module")
def engine():
    mesh = sharding.make_mesh(MeshConfig(1, 1, 1), jax.devices()[:1])
    widths = PromptWidths(prefix=20, question=20, bridge=2, memory=20, suffix=4)
    return Engine(MODEL, SETTINGS, widths, TOKENIZER.stop_ids, mesh)


def good(problem):
    """Two contexts with a search between their generations."""
    for turn in range(2):
        yield Say(Prompt("<|im_start|>user\n", problem.question, " ", f"memory {turn}", "\n"), 6)
        (found,) = yield Find((Query(problem.question, 1),))
        if found.error:
            return Outcome(Stop.SEARCH_FAILED, error=found.error)
        yield Say((Piece(found.passages[0].contents, False),), 5)
    return Outcome(Stop.ANSWERED)


def roll(engine, params, workflow, searcher=None, **settings):
    driver = RolloutDriver(engine, TOKENIZER, searcher or TinyIndex(PASSAGES), workflow, **settings)
    done = {job.number: trajectory for job, trajectory in driver.run(jobs_for(PROBLEMS, 2), params, KEY)}
    assert len(engine.free) == SETTINGS.slots
    return [done[number] for number in range(2 * len(PROBLEMS))]


@pytest.fixture(scope="module")
def untroubled(engine, params):
    trajectories = roll(engine, params, good)
    # With this key nobody says the poison by chance.
    assert all(trajectory.outcome.stop is Stop.ANSWERED for trajectory in trajectories)
    return trajectories


def only_when_bad(bad):
    """`good`, but for the problem that is to go wrong."""

    def workflow(problem):
        return (yield from (bad if problem.id == BAD else good)(problem))

    return workflow


def assert_same(trajectory, expected):
    """Equal but for the rounding of log-probabilities: who shares a beginning with whom has changed."""
    for context, other in zip(trajectory.contexts, expected.contexts, strict=True):
        np.testing.assert_allclose(context.logprobs, other.logprobs, atol=1e-5)
        assert replace(context, logprobs=other.logprobs) == other
    assert replace(trajectory, contexts=expected.contexts) == expected


def assert_alone(trajectories, untroubled, stop):
    """The two rollouts of one problem ended for that reason; all others are what they are without them."""
    for trajectory, expected in zip(trajectories, untroubled, strict=True):
        if trajectory.problem.id == BAD:
            assert trajectory.outcome.stop is stop
        else:
            assert_same(trajectory, expected)
    counted = summarise([Scored(trajectory, 0.0, "", {"exact_match": 0.0}) for trajectory in trajectories])
    assert counted[f"stop/{stop.value}"] == pytest.approx(0.2)
    assert counted["stop/answered"] == pytest.approx(0.8)


def test_a_workflow_that_raises(engine, params, untroubled):
    def raises(problem):
        yield Say(Prompt("", problem.question, "", "", ""), 4)
        raise KeyError("lost")

    trajectories = roll(engine, params, only_when_bad(raises))
    assert_alone(trajectories, untroubled, Stop.FAULT)
    assert trajectories[4].outcome.error == "KeyError: 'lost'"
    assert len(trajectories[4].contexts) == 1


def test_a_workflow_that_can_not_be_made(engine, params, untroubled):
    def makes(problem):
        if problem.id == BAD:
            raise RuntimeError("no such agent")
        return good(problem)

    assert_alone(roll(engine, params, makes), untroubled, Stop.FAULT)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (Prompt("", "x" * 21, "", "", ""), "the question of a prompt has 21 tokens and its buffer holds 20"),
        (Prompt("", "", "", "", ""), "at least one token"),
        ((Piece("text", True),), "must open a context"),
    ],
)
def test_a_workflow_that_asks_for_what_can_not_be(text, error, engine, params, untroubled):
    def asks(problem):
        yield Say(text, 4)

    trajectories = roll(engine, params, only_when_bad(asks))
    assert_alone(trajectories, untroubled, Stop.FAULT)
    assert error in trajectories[4].outcome.error


class SometimesBroken(TinyIndex):
    """Raises when the bad problem's query is in the batch."""

    def search(self, queries, top_n):
        if any("2" in query for query in queries):
            raise ConnectionError("refused")
        return super().search(queries, top_n)


def test_a_search_that_fails_fails_alone(engine, params, untroubled):
    trajectories = roll(engine, params, good, SometimesBroken(PASSAGES))
    assert_alone(trajectories, untroubled, Stop.SEARCH_FAILED)
    assert trajectories[4].outcome.error == "ConnectionError: refused"


class SometimesHanging(TinyIndex):
    """Never returns when the bad problem's query is in the batch."""

    def search(self, queries, top_n):
        if any("2" in query for query in queries):
            threading.Event().wait()
        return super().search(queries, top_n)


def test_a_search_that_hangs_is_given_up_alone(engine, params, untroubled):
    trajectories = roll(engine, params, good, SometimesHanging(PASSAGES), search_seconds=0.2)
    assert_alone(trajectories, untroubled, Stop.SEARCH_FAILED)
    assert trajectories[4].outcome.error == "TimeoutError: no answer in 0.2 s"


def test_a_generation_that_never_stops_is_cut(engine, healthy, untroubled):
    """Whatever is asked for, a generation ends where its slot does."""

    def rambles(problem):
        while True:
            reply = yield Say(Prompt("", problem.question, "", "", ""), 10**9)
            if reply.finish is Finish.LENGTH:
                return Outcome(Stop.CUT_OFF)

    trajectories = roll(engine, healthy, only_when_bad(rambles))
    assert_alone(trajectories, untroubled, Stop.CUT_OFF)
    assert len(trajectories[4].contexts[-1].ids) == SETTINGS.context_tokens


def test_logits_that_are_not_numbers_end_a_trajectory_and_do_not_stay_in_its_slot(engine, params, untroubled):
    def poisons(problem):
        yield Say(Prompt("<|im_start|>user\n", problem.question, " ", "", "\n"), 6)
        yield Say((Piece("a ~ b", False),), 5)
        raise AssertionError("it went on")

    trajectories = roll(engine, params, only_when_bad(poisons))
    assert_alone(trajectories, untroubled, Stop.NOT_FINITE)
    assert trajectories[4].contexts == ()
    for trajectory, expected in zip(roll(engine, params, good), untroubled, strict=True):
        assert_same(trajectory, expected)


def test_slots_are_free_after_a_caller_who_stops_early(engine, params, untroubled):
    driver = RolloutDriver(engine, TOKENIZER, TinyIndex(PASSAGES), good)
    trajectories = driver.run(jobs_for(PROBLEMS, 2), params, KEY)
    next(trajectories)
    trajectories.close()
    assert len(engine.free) == SETTINGS.slots
    for trajectory, expected in zip(roll(engine, params, good), untroubled, strict=True):
        assert_same(trajectory, expected)
