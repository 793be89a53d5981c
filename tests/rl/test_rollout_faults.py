"""A fault in a trajectory ends only this trajectory, is counted, and leaks no slot."""

import threading
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.agent.memsearcher import MemSearcher
from memsearcher_jax.hosts.distributed import Interrupted
from memsearcher_jax.http.client import ServiceUnavailable
from memsearcher_jax.logs.trajectories import summarize_trajectory
from memsearcher_jax.model import qwen
from memsearcher_jax.rl import tool_executor
from memsearcher_jax.rl.metrics import trajectory_metrics
from memsearcher_jax.rl.rollout import RolloutDriver, make_jobs
from memsearcher_jax.sampling.engine import Engine
from memsearcher_jax.types import (
    FinishReason,
    Generate,
    Outcome,
    Passage,
    Problem,
    Query,
    ScoredTrajectory,
    Search,
    StopReason,
    TextSpan,
)
from tests.support import NANO, NANO_SAMPLING, TinyIndex, byte_tokenizer, make_prompt

TOKENIZER = byte_tokenizer()
KEY = jax.random.key(9)
MODEL = replace(NANO, tie_embeddings=False)
SETTINGS = NANO_SAMPLING
PASSAGES = (Passage("0", '"Title"\nText.'),)
PROBLEMS = [Problem(f"q{n}", f"Who is {n}?", (f"a{n}",)) for n in range(5)]
BAD = "q2"
POISON = TOKENIZER.encode_untrusted("~")[0]


@pytest.fixture(scope="module")
def finite_params():
    return jax.jit(lambda key: qwen.init(key, MODEL))(jax.random.key(0))


@pytest.fixture(scope="module")
def params(finite_params):
    """Weights that give nonfinite logits in every context with a `~`."""
    return finite_params | {"embed": finite_params["embed"].at[POISON].set(jnp.nan)}


@pytest.fixture(scope="module")
def engine(one_device):
    return Engine(MODEL, SETTINGS, TOKENIZER.stop_ids, one_device)


def good(problem):
    """Two contexts with a search between their generations."""
    for turn in range(2):
        yield Generate(make_prompt("<|im_start|>user\n", problem.question, " ", f"memory {turn}", "\n"), 6)
        (result,) = yield Search((Query(problem.question, 1),))
        if result.error:
            return Outcome(StopReason.SEARCH_FAILED, error=result.error)
        yield Generate((TextSpan(result.passages[0].contents, False),), 5)
    return Outcome(StopReason.ANSWERED)


def run_rollouts(engine, params, workflow, searcher=None, **limits):
    backends = {"": tool_executor.search_backend(searcher or TinyIndex(PASSAGES), **limits)}
    driver = RolloutDriver(engine, TOKENIZER, workflow, backends)
    done, _ = driver.trajectories(make_jobs(PROBLEMS, 2), params, KEY, lambda line: None)
    assert len(engine.scheduler.free_slots) == SETTINGS.slots
    return done


@pytest.fixture(scope="module")
def fault_free(engine, params):
    trajectories = run_rollouts(engine, params, good)
    # With this key no completion contains the poison token by chance.
    assert all(trajectory.outcome.stop is StopReason.ANSWERED for trajectory in trajectories)
    return trajectories


def faulty_for_bad_problem(faulty):
    """The `faulty` workflow for the problem BAD, and `good` for all others."""

    def workflow(problem):
        return (faulty if problem.id == BAD else good)(problem)

    return workflow


def assert_same(trajectory, expected):
    """Equal up to rounding of log-probabilities, since other trajectories share the prefix cache."""
    for context, other in zip(trajectory.contexts, expected.contexts, strict=True):
        np.testing.assert_allclose(context.logprobs, other.logprobs, atol=1e-5)
        assert replace(context, logprobs=other.logprobs) == other
    assert replace(trajectory, contexts=expected.contexts) == expected


def assert_only_bad_problem_stopped(trajectories, fault_free, stop):
    """Both rollouts of the problem BAD stopped for this reason; all others equal those of a run without faults."""
    for trajectory, expected in zip(trajectories, fault_free, strict=True):
        if trajectory.problem.id == BAD:
            assert trajectory.outcome.stop is stop
        else:
            assert_same(trajectory, expected)
    scored = (ScoredTrajectory(trajectory, 0.0, "", {"exact_match": 0.0}) for trajectory in trajectories)
    metrics = trajectory_metrics(list(map(summarize_trajectory, scored)), MemSearcher(AgentConfig()))
    assert metrics[f"stop/{stop.value}"] == pytest.approx(0.2)
    assert metrics["stop/answered"] == pytest.approx(0.8)


def raises(problem):
    yield Generate(make_prompt("", problem.question, "", "", ""), 4)
    raise KeyError("lost")


def cannot_be_made(problem):
    raise RuntimeError("no such agent")


def forgets(problem):
    yield Generate(make_prompt("", "x", "", "", ""), 4)


def asks_for_nothing(problem):
    yield Generate(make_prompt("", "", "", "", ""), 4)


def adds_before_it_opens(problem):
    yield Generate((TextSpan("text", True),), 4)


@pytest.mark.parametrize(
    ("workflow", "error"),
    [
        (raises, "KeyError: 'lost'"),
        (cannot_be_made, "RuntimeError: no such agent"),
        (forgets, "TypeError: the workflow returns None, which is no Outcome"),
        (asks_for_nothing, "at least one token"),
        (adds_before_it_opens, "must open a context"),
    ],
)
def test_a_faulty_workflow(workflow, error, engine, params, fault_free):
    trajectories = run_rollouts(engine, params, faulty_for_bad_problem(workflow))
    assert_only_bad_problem_stopped(trajectories, fault_free, StopReason.FAULT)
    assert error in trajectories[4].outcome.error


class SometimesBroken(TinyIndex):
    """Raises when the bad problem's query is in the batch."""

    def search(self, queries, top_n):
        if any("2" in query for query in queries):
            raise ConnectionError("refused")
        return super().search(queries, top_n)


def test_a_failed_search_affects_only_its_trajectory(engine, params, fault_free):
    trajectories = run_rollouts(engine, params, good, SometimesBroken(PASSAGES))
    assert_only_bad_problem_stopped(trajectories, fault_free, StopReason.SEARCH_FAILED)
    assert trajectories[4].outcome.error == "ConnectionError: refused"


class Outage:
    """Answers the first calls, and none of the next forty."""

    def __init__(self):
        self.calls = 0

    def search(self, queries, top_n):
        self.calls += 1
        if 2 < self.calls <= 40:
            raise ServiceUnavailable("down")
        return TinyIndex(PASSAGES).search(queries, top_n)


def test_searches_wait_for_the_end_of_an_outage(engine, params, fault_free, monkeypatch):
    """No trajectory is lost, and no slot is refilled with one that would be lost too."""
    monkeypatch.setattr(tool_executor, "OUTAGE_PAUSE", 0.01)
    searcher = Outage()
    trajectories = run_rollouts(engine, params, good, searcher, max_outage=60.0, max_concurrency=4)
    assert searcher.calls > 40
    for trajectory, expected in zip(trajectories, fault_free, strict=True):
        assert_same(trajectory, expected)


def test_an_answer_from_before_an_outage_blames_no_request(monkeypatch):
    """The first batch is answered late, after the second one has failed, which began later."""
    monkeypatch.setattr(tool_executor, "OUTAGE_PAUSE", 0.0)
    failures, late = iter([True] * 3), threading.Event()

    class Source(TinyIndex):
        def search(self, queries, top_n):
            if queries == ["early"]:
                late.wait()
            elif next(failures, False):
                raise ServiceUnavailable("down")
            return super().search(queries, top_n)

    searches = tool_executor.ToolExecutor({"": tool_executor.search_backend(Source(PASSAGES), 60.0, 60.0, 2)})
    results = {}
    for name in ("early", "later"):
        searches.submit(name, Search((Query(name, 1),)))
        searches.start()
    while searches.pending:
        searches.wait(1.0)
        results |= dict(searches.completed())
        late.set()
        searches.start()
    assert [result.error for (result,) in results.values()] == ["", ""]


def test_an_outage_that_lasts_loses_trajectories(engine, params, monkeypatch):
    monkeypatch.setattr(tool_executor, "OUTAGE_PAUSE", 0.01)
    trajectories = run_rollouts(engine, params, good, DownIndex(PASSAGES), max_outage=0.05)
    assert {trajectory.outcome.stop for trajectory in trajectories} == {StopReason.SEARCH_FAILED}


class DownIndex(TinyIndex):
    def search(self, queries, top_n):
        raise ServiceUnavailable("down")


def test_a_request_that_alone_fails_does_not_wait_for_the_end_of_an_outage(engine, params, fault_free, monkeypatch):
    monkeypatch.setattr(tool_executor, "OUTAGE_PAUSE", 0.01)
    trajectories = run_rollouts(engine, params, good, SometimesBroken(PASSAGES), max_outage=1e9)
    assert_only_bad_problem_stopped(trajectories, fault_free, StopReason.SEARCH_FAILED)


class SometimesHanging(TinyIndex):
    """Never returns when the bad problem's query is in the batch."""

    def search(self, queries, top_n):
        if any("2" in query for query in queries):
            threading.Event().wait()
        return super().search(queries, top_n)


def test_a_hanging_search_times_out_for_its_trajectory_only(engine, params, fault_free):
    trajectories = run_rollouts(engine, params, good, SometimesHanging(PASSAGES), timeout=0.2)
    assert_only_bad_problem_stopped(trajectories, fault_free, StopReason.SEARCH_FAILED)
    assert trajectories[4].outcome.error == "TimeoutError: no answer in 0.2 s"


def test_a_generation_ends_at_the_slot_length(engine, finite_params, fault_free):
    """Even if the workflow requests more tokens."""

    def rambles(problem):
        while True:
            reply = yield Generate(make_prompt("", problem.question, "", "", ""), 10**9)
            if reply.finish is FinishReason.LENGTH:
                return Outcome(StopReason.CUT_OFF)

    trajectories = run_rollouts(engine, finite_params, faulty_for_bad_problem(rambles))
    assert_only_bad_problem_stopped(trajectories, fault_free, StopReason.CUT_OFF)
    assert len(trajectories[4].contexts[-1].ids) == SETTINGS.context_tokens


def test_nonfinite_logits_end_a_trajectory_and_leave_its_slot_clean(engine, params, fault_free):
    def poisons(problem):
        yield Generate(make_prompt("<|im_start|>user\n", problem.question, " ", "", "\n"), 6)
        yield Generate((TextSpan("a ~ b", False),), 5)
        raise AssertionError("the workflow continued")

    trajectories = run_rollouts(engine, params, faulty_for_bad_problem(poisons))
    assert_only_bad_problem_stopped(trajectories, fault_free, StopReason.NOT_FINITE)
    assert trajectories[4].contexts == ()
    for trajectory, expected in zip(run_rollouts(engine, params, good), fault_free, strict=True):
        assert_same(trajectory, expected)


def test_slots_are_freed_when_the_caller_stops_early(engine, params, fault_free):
    def on_end(job, ended):
        raise Interrupted

    driver = RolloutDriver(engine, TOKENIZER, good)
    with pytest.raises(Interrupted):
        driver.run(make_jobs(PROBLEMS, 2), params, KEY, on_end)
    assert len(engine.scheduler.free_slots) == SETTINGS.slots
    for trajectory, expected in zip(run_rollouts(engine, params, good), fault_free, strict=True):
        assert_same(trajectory, expected)
