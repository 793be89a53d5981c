"""Trajectories that are carried over: each is trained once, and each context is of one policy, at most K steps old."""

import functools
from collections import Counter
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsearcher_jax.config import RunConfig
from memsearcher_jax.hosts.distributed import Hosts
from memsearcher_jax.model import qwen
from memsearcher_jax.rl import carry_over, training_run
from memsearcher_jax.rl.carry_over import Carried
from memsearcher_jax.rl.config import RLConfig
from memsearcher_jax.rl.metrics import RolloutStats
from memsearcher_jax.rl.rng import named_key
from memsearcher_jax.rl.rollout import Rollout, RolloutDriver, make_jobs
from memsearcher_jax.rl.state import SavedProgress
from memsearcher_jax.rl.tool_executor import search_backend
from memsearcher_jax.rl.training_run import open_collector
from memsearcher_jax.types import (
    Context,
    Generate,
    Outcome,
    Passage,
    Problem,
    Query,
    Search,
    StopReason,
    TextSpan,
    Trajectory,
    Turn,
)
from tests.support import NANO, TinyIndex, byte_tokenizer, make_prompt

TOKENIZER, KEY = byte_tokenizer(), named_key(7, "rollout", 0)
STEPS, PROMPTS, GROUP = 6, 3, 2
TURNS = (1, 7, 2, 1, 4, 1, 2, 1, 9)  # of consecutive problems


def problems(step):
    numbers = range(step * PROMPTS, (step + 1) * PROMPTS)
    return [Problem(f"q{n}", f"Who is {n}?", (), {"turns": TURNS[n % len(TURNS)]}) for n in numbers]


ALL = [problem for step in range(STEPS) for problem in problems(step)]


def to_text(carried):
    return carry_over.to_text(carried, Hosts().exchange)


def workflow(problem):
    """As many contexts as the problem says, each of two generations."""
    turns = []
    for turn in range(problem.metadata["turns"]):
        first = yield Generate(make_prompt("<|im_start|>user\n", problem.question, " ", f"memory {turn}", "\n"), 6)
        second = yield Generate((TextSpan("and", True),), 4)
        turns.append(Turn(first.text, second.text))
    return Outcome(StopReason.ANSWERED, turns[-1].reply, tuple(turns))


def searching(problem):
    """Searches in every context; one problem is faulty."""
    for turn in range(problem.metadata["turns"]):
        yield Generate(make_prompt("<|im_start|>user\n", problem.question, " ", f"memory {turn}", "\n"), 6)
        (result,) = yield Search((Query("title", 1),))
        if problem.id == "q3":
            raise KeyError("lost")
        yield Generate((TextSpan(result.passages[0].contents, False),), 4)
    return Outcome(StopReason.ANSWERED, turns=(Turn("", "", results=(result,)),))


@pytest.fixture(scope="module")
def params():
    """Those of each step."""
    init = jax.jit(lambda key: qwen.init(key, NANO))
    return [init(jax.random.key(step)) for step in range(STEPS)]


@dataclass
class Steps:
    driver: RolloutDriver
    params: list
    settings: RLConfig
    interrupted_tokens: int = 0

    def rollout(self, step, carried):
        args = (problems, range(PROMPTS), self.params[step], KEY, step, self.settings, lambda line: None)
        return carry_over.rollout(self.driver, carried, *args)

    def run(self, carried=None, start=0, stop=STEPS):
        """[(trajectories, what is carried on)] of each step."""
        carried, done = carried or Carried(start), []
        for step in range(start, stop):
            trajectories, carried, stats = self.rollout(step, carried)
            done.append((trajectories, carried))
            self.interrupted_tokens += stats.interrupted_tokens
        return done


@pytest.fixture(scope="module")
def steps(engine, params):
    def make(carry_over, workflow=workflow):
        settings = RLConfig(steps=STEPS, prompts_per_step=PROMPTS, group_size=GROUP, carry_over=carry_over)
        backends = {"": search_backend(TinyIndex((Passage("0", '"Title"\nText.'),)))}
        return Steps(RolloutDriver(engine, TOKENIZER, workflow, backends), params, settings)

    return make


@pytest.fixture(scope="module")
def sampled(steps):
    """[(trajectories, what is carried on)] of each step of a whole run, for a bound.

    Every test gets the same values, which are immutable.
    """
    return functools.cache(lambda bound: steps(bound).run())


def test_with_equal_weights_interruptions_change_no_trajectory(steps):
    """A context that was interrupted is sampled again with the same draws, so its length is not selected for."""
    run = steps(2)
    run.params = run.params[:1] * STEPS
    trained = [one for trajectories, _ in run.run() for one in trajectories]
    assert run.interrupted_tokens > 0
    jobs = make_jobs(ALL, GROUP)
    expected, _ = run.driver.trajectories(jobs, run.params[0], KEY, lambda line: None)

    def sampled(trajectories):
        return {
            (one.problem.id, one.rollout): [context.ids.tolist() for context in one.contexts] for one in trajectories
        }

    assert sampled(trained) == sampled(expected)


@dataclass
class Simulation:
    """Steps whose rollouts take time alone: of a problem, `plans` has the number of contexts and the ticks of each."""

    plans: list
    slots: int
    settings: RLConfig
    ticks: list = field(default_factory=list)  # of each rollout

    def run(self, jobs, params, key, on_end, *, should_continue, version):
        queue, active = list(jobs), []
        self.ticks.append(0)
        while (active or queue) and should_continue():
            for job in queue[: self.slots - len(active)]:
                active.append([job, job.begun.contexts, self.plan(job)[1]])
                queue.remove(job)
            self.ticks[-1] += 1
            for one in list(active):
                job, contexts, ticks = one
                one[2] = ticks - 1
                if not one[2]:
                    one[1], one[2] = (*contexts, Context((1,), (0.0,), (True,), version)), self.plan(job)[1]
                    if len(one[1]) == self.plan(job)[0]:
                        active.remove(one)
                        on_end(job, Rollout(one[1], outcome=Outcome(StopReason.ANSWERED)))
        for job, contexts, _ in active:
            on_end(job, Rollout(contexts))
        return RolloutStats()

    def plan(self, job):
        return self.plans[(int(job.problem.id) + job.rollout) % len(self.plans)]

    def trajectory(self, job, finished):
        return Trajectory(job.problem, job.rollout, finished.outcome, finished.contexts, "")

    def steps(self, hosts=()):
        """[(trajectories, what is carried on)] of each step, on that many hosts, by default one."""
        count, done = self.settings.prompts_per_step, []

        def problems(step):
            return [Problem(str(number), "", ()) for number in range(step * count, (step + 1) * count)]

        carried = Carried(0)
        for step in range(self.settings.steps):
            shares, trained = [], []
            for host in range(number := hosts[step] if hosts else 1):
                indices = Hosts(host, number).share(count)
                args = (problems, indices, {}, None, step, self.settings, lambda line: None)
                trajectories, share, _ = carry_over.rollout(self, carried.share(indices), *args)
                trained += trajectories
                shares.append(share)
            groups = sorted(
                (group for share in shares for group in share.groups), key=lambda group: (group.step, group.index)
            )
            carried = Carried(share.next_step, tuple(groups))
            done.append((trained, carried))
        return done


PLANS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=7)


@given(
    PLANS, st.integers(1, 4), st.integers(0, 4), st.just([1] * 7) | st.lists(st.integers(1, 4), min_size=7, max_size=7)
)
def test_every_problem_is_trained_once_on_any_number_of_hosts(plans, slots, bound, hosts):
    """And a step trains as many groups as it has problems, where it has one host."""
    settings = RLConfig(steps=7, prompts_per_step=4, group_size=2, carry_over=bound)
    done = Simulation(plans, slots, settings).steps(hosts)
    trained = Counter((int(one.problem.id), one.rollout) for trajectories, _ in done for one in trajectories)
    assert trained == {(problem, rollout): 1 for problem in range(4 * 7) for rollout in range(2)}
    for step, (trajectories, _) in enumerate(done):
        assert all(step - bound <= context.version <= step for one in trajectories for context in one.contexts)
    assert max(hosts) > 1 or [len(trajectories) for trajectories, _ in done] == [4 * 2] * 7


def test_a_group_ages_from_its_oldest_complete_context():
    """Not from when it was opened: a context that was interrupted is not trained."""
    settings = RLConfig(steps=6, prompts_per_step=1, group_size=1, carry_over=2)
    run = Simulation([(1, 1), (3, 2), (1, 2), (1, 1)], 2, settings)
    done = run.steps()
    versions = [group.oldest_version for _, carried in done[:4] for group in carried.groups if group.problem.id == "1"]
    assert versions == [0, 1, 1]
    assert run.ticks[:4] == [1, 2, 1, 4]  # step 3 waits for it, step 2 does not


def test_each_context_is_sampled_by_the_policy_of_its_version(sampled, params):
    forward = jax.jit(lambda params, *row: jax.nn.log_softmax(qwen.forward(params, NANO, *row)[0][0]))
    checked = Counter()
    for step, (trajectories, _) in enumerate(sampled(1)[:4]):
        for context in (context for one in trajectories for context in one.contexts):
            length, position_1T = len(context.ids), np.arange(96)[None]
            ids_1T = np.pad(context.ids, (0, 96 - length))[None]
            logprob_TV = np.asarray(forward(params[context.version], ids_1T, position_1T, (position_1T < length) + 0))
            expected_T = np.take_along_axis(logprob_TV[: length - 1], ids_1T[0, 1:length, None], 1)[:, 0]
            sampled_T = np.array(context.sampled[1:])
            np.testing.assert_allclose(np.array(context.logprobs[1:])[sampled_T], expected_T[sampled_T], atol=1e-4)
            checked[step - context.version] += 1
    assert checked[0] and checked[1]


@pytest.mark.parametrize("stop", [1, 3])
def test_a_resumed_run_equals_an_undisturbed_one(steps, sampled, stop):
    run, done = steps(2), sampled(2)
    carried = done[stop - 1][1]
    restored = carry_over.from_text(to_text(carried), ALL, run.driver)
    assert restored == carried
    assert run.run(restored, start=stop) == done[stop:]


def test_searches_and_faults_survive_a_restart(steps):
    run, kept = steps(2, searching), Counter()
    for _, carried in run.run(stop=3):
        assert carry_over.from_text(to_text(carried), ALL, run.driver) == carried
        kept.update(one.outcome is None for group in carried.groups for one in group.rollouts if one.responses)
    assert kept[True] and kept[False]


def test_any_number_of_hosts_takes_up_what_is_carried(steps, sampled):
    whole, run, contents = sampled(1)[1][1], steps(1), []
    assert whole.groups
    first, second = (whole.share(Hosts(index, 2).share(PROMPTS)) for index in range(2))
    assert {group.index for group in first.groups} <= {0} and {group.index for group in second.groups} <= {1, 2}
    for share in (first, second):
        text = carry_over.to_text(share, lambda content: contents.append(content) or contents)
    assert carry_over.from_text(text, ALL, run.driver) == whole


def test_carried_trajectories_name_their_problem_by_id_and_content(steps, sampled):
    """At any position of the data; one that was changed is refused instead of scored by another's answers."""
    run, carried = steps(2), sampled(2)[2][1]
    text = to_text(carried)
    moved = [Problem("new", "Who?", ("x",)), *reversed(ALL)]
    assert carry_over.from_text(text, moved, run.driver) == carried
    id = carried.groups[0].problem.id
    changed = [replace(one, golden_answers=("x",)) if one.id == id else one for one in ALL]
    for others in (changed, [one for one in ALL if one.id != id]):
        with pytest.raises(ValueError, match=f"carries trajectories of problem '{id}', which the training data no"):
            carry_over.from_text(text, others, run.driver)


def test_settings_that_the_carried_trajectories_need_must_stay(steps, sampled, monkeypatch):
    run, text = steps(2), to_text(sampled(2)[2][1])

    def resume(changed):
        carry_over.from_text(text, ALL, run.driver, changed)

    resume([("training.learning_rate", 1e-3, 1e-4), ("rl.carry_over", 2, 3)])
    for name, old, new in (
        ("agent.max_turns", 4, 5),
        ("data.train", (), ("a",)),
        ("seed", 0, 1),
        ("rl.carry_over", 2, 1),
        ("rl.group_size", 2, 3),
        ("rl.prompts_per_step", 3, 4),
    ):
        with pytest.raises(ValueError, match=f"{name} cannot change to .* leave it at"):
            resume([(name, old, new)])
    monkeypatch.setattr(training_run, "make_driver", lambda one, check: run.driver)
    run_now = SimpleNamespace(config=RunConfig(), problems=SimpleNamespace(train=ALL))  # rl.carry_over 0
    start = SavedProgress(RunConfig(), position=9, carried=text, changed=(("rl.carry_over", 2, 0),))
    with pytest.raises(ValueError, match=r"rl\.carry_over cannot change to 0 while the checkpoint carries"):
        open_collector(SimpleNamespace(run=run_now, step=3), start)


def test_a_rollback_samples_carried_problems_again(steps, sampled):
    """A policy that is gone has sampled what they have, but no later step would draw them."""
    run, (_, carried) = steps(2), sampled(2)[2]
    restarted = replace(carried, groups=tuple(group.restarted() for group in carried.groups))
    done = run.run(restarted, start=3)
    trained = [one.problem.id for trajectories, _ in done for one in trajectories]
    assert {one.problem.id for one in carried.groups} <= set(trained)
    versions = {context.version for trajectories, _ in done for one in trajectories for context in one.contexts}
    assert min(versions) >= 3


def test_an_interrupted_step_changes_nothing(steps, sampled):
    """What it began with is what a checkpoint saves."""
    run, (_, carried) = steps(1), sampled(1)[0]
    before, calls = to_text(carried), Counter()

    def stop():
        calls["n"] += 1
        if calls["n"] > 3:
            raise KeyboardInterrupt

    interrupted = replace(run, driver=replace(run.driver, check=stop))
    with pytest.raises(KeyboardInterrupt):
        interrupted.rollout(1, carried)
    assert to_text(carried) == before
    assert run.run(carried, start=1) == sampled(1)[1:]
