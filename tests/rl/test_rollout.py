"""The rollout driver: more workflows than slots, with the ids of a real sampling engine."""

import gc
import itertools
import threading
import time
from collections import deque
from dataclasses import replace

import jax
import numpy as np
import pytest

from memsearcher_jax.model import sharding
from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.rl.rollout import Job, RolloutDriver, make_jobs
from memsearcher_jax.rl.tool_executor import ToolExecutor, search_backend
from memsearcher_jax.sampling.config import SamplingParams
from memsearcher_jax.sampling.engine import Engine
from memsearcher_jax.types import (
    FinishReason,
    Generate,
    Outcome,
    Overrides,
    Passage,
    Problem,
    Query,
    Search,
    StopReason,
    TextSpan,
)
from tests.support import NANO, NANO_SAMPLING, TinyIndex, byte_tokenizer, make_prompt

TOKENIZER = byte_tokenizer()
KEY = jax.random.key(5)
SETTINGS = replace(NANO_SAMPLING, context_tokens=160)
PASSAGES = tuple(Passage(str(n), f'"Title {n}"\nText of number {n}.') for n in range(4))
PROBLEMS = [Problem(f"q{n}", f"Who is {n}?", (f"a{n}",)) for n in range(4)]
BACKENDS = {"": search_backend(TinyIndex(PASSAGES))}


def two_turns(problem):
    """Two contexts of two generations each with a search between them, as in MemSearcher but without parsing."""
    completions = []
    for turn in range(2):
        prompt = make_prompt("<|im_start|>user\n", problem.question, " ", f"memory {turn}", "<|im_end|>\n")
        completions.append((yield Generate(prompt, 6)))
        results = yield Search((Query(f"number {turn}", 2), Query("title", 1)))
        shown = "".join(passage.contents for result in results for passage in result.passages)[:40] or results[0].error
        completions.append((yield Generate((TextSpan("\n<|im_start|>", True), TextSpan(shown, False)), 5)))
    return Outcome(StopReason.ANSWERED, answer="".join(reply.text for reply in completions))


def ids_of(trajectory):
    """The ids of each context."""
    return [context.ids.tolist() for context in trajectory.contexts]


def assert_same_contexts(ours, theirs):
    assert ids_of(ours) == ids_of(theirs)
    for mine, other in zip(ours.contexts, theirs.contexts, strict=True):
        np.testing.assert_array_equal(mine.sampled, other.sampled)
        np.testing.assert_allclose(mine.logprobs, other.logprobs, atol=1e-5)


def run_rollouts(engine, params, workflow, problems=PROBLEMS, rollouts=2, searcher=None):
    driver = RolloutDriver(engine, TOKENIZER, workflow, {"": search_backend(searcher)} if searcher else BACKENDS)
    done, _ = driver.trajectories(make_jobs(problems, rollouts), params, KEY, lambda line: None)
    assert len(engine.scheduler.free_slots) == engine.scheduler.settings.slots
    return done


@pytest.fixture(scope="module")
def trajectories(engine, params):
    """Two rollouts of `two_turns` for each of the problems."""
    return tuple(run_rollouts(engine, params, two_turns))


def generations(context):
    """The consecutive runs of sampled tokens, in order."""
    marked = zip(context.sampled, context.ids, strict=True)
    return [
        [id for _, id in run] for is_sampled, run in itertools.groupby(marked, key=lambda pair: pair[0]) if is_sampled
    ]


def test_every_problem_has_its_rollouts_and_every_context_its_ids(trajectories):
    assert [trajectory.problem.id for trajectory in trajectories] == [f"q{n}" for n in range(4) for _ in range(2)]
    assert [trajectory.rollout for trajectory in trajectories] == [0, 1] * 4
    for trajectory in trajectories:
        assert len(trajectory.contexts) == 2
        for turn, context in enumerate(trajectory.contexts):
            opening = f"<|im_start|>user\n{trajectory.problem.question} memory {turn}<|im_end|>\n"
            ids = TOKENIZER.encode_trusted(opening)
            assert tuple(context.ids[: len(ids)]) == ids
            assert not any(context.sampled[: len(ids)])
            assert sum(context.sampled) <= 11
        assert trajectory.transcript == TOKENIZER.transcript(trajectory.contexts[-1].ids)


def test_workflows_receive_the_sampled_text(trajectories):
    for trajectory in trajectories:
        texts = [TOKENIZER.completion(ids).text for context in trajectory.contexts for ids in generations(context)]
        assert len(texts) == 4
        assert trajectory.outcome.answer == "".join(texts)


def test_rollouts_of_a_problem_differ_and_are_reproducible(engine, params, trajectories):
    """Up to rounding: how soon a search answers decides which contexts are decoded together."""
    again = run_rollouts(engine, params, two_turns)
    for ours, theirs in zip(again, trajectories, strict=True):
        assert ours.outcome == theirs.outcome
        assert_same_contexts(ours, theirs)
    assert ids_of(trajectories[0]) != ids_of(trajectories[1])


def test_a_trajectory_does_not_depend_on_the_other_problems(engine, params, trajectories):
    alone = run_rollouts(engine, params, two_turns, PROBLEMS[:1], rollouts=2)
    for ours, theirs in zip(alone, trajectories[:2], strict=True):
        assert_same_contexts(ours, theirs)


def test_a_stop_expression_ends_a_generation_and_the_turn_goes_on(engine, params):
    """One context without control tokens between the replies, each of which ends with the first vowel."""

    def workflow(problem):
        prompt, texts = make_prompt("<|im_start|>user\n", problem.question, " ", "", "\n"), []
        texts.append((yield Generate(prompt, 20, stop="[aeiou]")))
        for _ in range(2):
            texts.append((yield Generate((TextSpan("~", True),), 20, stop="[aeiou]", same_turn=True)))
        return Outcome(StopReason.ANSWERED, "|".join(f"{reply.finish.value}:{reply.text}" for reply in texts))

    endings = set()
    for trajectory in run_rollouts(engine, params, workflow):
        (context,) = trajectory.contexts
        replies = [reply.partition(":")[::2] for reply in trajectory.outcome.answer.split("|")]
        for finish, text in replies:
            endings.add((finish, text[-1:] in "aeiou" and text != ""))
            assert not any(vowel in text[:-1] for vowel in "aeiou")
        sampled = [id for id, is_sampled in zip(context.ids, context.sampled, strict=True) if is_sampled]
        assert not set(sampled[:-1]) & set(TOKENIZER.stop_ids)
        assert TOKENIZER.encode_trusted("~")[0] in context.ids
    assert ("stop", True) in endings


def test_overrides_of_a_request(engine, params, trajectories):
    """A workflow with another workflow's seed draws what that one draws, and `progress` may end a generation."""
    seen = []

    def overridden(problem, seed, temperature, keep):
        def progress(ids):
            seen.append(len(ids))
            return len(ids) > keep

        workflow, reply = two_turns(problem), None
        while True:
            try:
                request = workflow.send(reply)
            except StopIteration as end:
                return end.value
            if isinstance(request, Generate):
                request = replace(request, overrides=Overrides(seed, temperature, 1.0, progress))
            reply = yield request

    def run(*arguments):
        (trajectory,) = run_rollouts(engine, params, lambda problem: overridden(problem, *arguments), PROBLEMS[:1], 1)
        return ids_of(trajectory)

    expected = ids_of(trajectories[1])
    assert run(1, 1.0, 9) == expected
    assert max(seen) == 6
    assert run(1, 0.0, 9) == run(2, 0.0, 9) != expected
    seen.clear()
    run(1, 1.0, 0)
    assert seen == [SETTINGS.decode_steps_per_call] * 4, "every generation ended after its first step"


def test_workflows_may_be_added_while_others_run(engine, params):
    queue, numbers = deque([Job(0, PROBLEMS[0])]), []

    def on_end(job, ended):
        numbers.append(job.number)
        if job.number < 3:
            queue.append(Job(job.number + 1, PROBLEMS[0]))

    RolloutDriver(engine, TOKENIZER, two_turns, BACKENDS).run(queue, params, KEY, on_end)
    assert numbers == [0, 1, 2, 3]


@pytest.mark.variant
def test_an_engine_per_replica_gives_the_same_trajectories(params, trajectories):
    mesh = sharding.make_mesh(MeshConfig(2, 1, 1), jax.devices()[:2])
    settings = replace(SETTINGS, slots=4, engine_per_replica=True)
    replicas = Engine(NANO, settings, TOKENIZER.stop_ids, mesh)
    placed = jax.device_put(params, sharding.param_shardings(NANO, mesh))
    for single, replicated in zip(trajectories, run_rollouts(replicas, placed, two_turns), strict=True):
        assert ids_of(single) == ids_of(replicated)
        assert single.outcome == replicated.outcome


@pytest.mark.parametrize("concurrency", [1, 2])
def test_a_slow_search_blocks_the_next_only_without_concurrency(concurrency):
    slow = threading.Event()

    class Source(TinyIndex):
        def search(self, queries, top_n):
            if "slow" in queries:
                slow.wait()
            return super().search(queries, top_n)

    searches, order = ToolExecutor({"": search_backend(Source(PASSAGES), max_concurrency=concurrency)}), []
    for name in ("slow", "fast", "third"):
        searches.submit(name, Search((Query(name, 1),)))
        searches.start()
    assert searches.running == concurrency
    while len(order) < 3:
        searches.wait(0.05)
        order += [caller for caller, _ in searches.completed()]
        searches.start()
        if concurrency == 1 or len(order) == 2:
            slow.set()
    assert order[-1] == ("third" if concurrency == 1 else "slow")


@pytest.fixture(scope="module")
def engine_ahead(one_device):
    return Engine(NANO, replace(SETTINGS, async_scheduling="on"), TOKENIZER.stop_ids, one_device)


def test_with_two_calls_in_flight_trajectories_are_the_same(engine_ahead, params, trajectories):
    """Contexts, ids and outcomes; log-probabilities up to rounding."""
    ahead = run_rollouts(engine_ahead, params, two_turns)
    for ours, theirs in zip(ahead, trajectories, strict=True):
        assert ids_of(ours) == ids_of(theirs)
        assert (ours.outcome, ours.transcript) == (theirs.outcome, theirs.transcript)
        for mine, other in zip(ours.contexts, theirs.contexts, strict=True):
            assert np.array_equal(mine.sampled, other.sampled)
            np.testing.assert_allclose(mine.logprobs, other.logprobs, atol=1e-5)


def test_with_two_calls_in_flight_the_devices_decode_during_slow_searches(engine_ahead, params, trajectories):
    """A host that waits for searches waits no longer than the calls in flight take."""

    class Slow(TinyIndex):
        def search(self, queries, top_n):
            time.sleep(0.05)
            return super().search(queries, top_n)

    ahead = run_rollouts(engine_ahead, params, two_turns, searcher=Slow(PASSAGES))
    assert list(map(ids_of, ahead)) == list(map(ids_of, trajectories))


def test_with_two_calls_in_flight_a_paused_rollout_goes_on(engine_ahead, params, trajectories):
    """What was paused in the middle of a context samples it again, with the same draws."""
    driver = RolloutDriver(engine_ahead, TOKENIZER, two_turns, BACKENDS)
    jobs = make_jobs(PROBLEMS, 2)
    ended: dict[int, object] = {}
    steps = iter(range(10_000))
    driver.run(
        jobs, params, KEY, lambda job, one: ended.update({job.number: one}), should_continue=lambda: next(steps) < 5
    )
    assert any(one.outcome is None for one in ended.values())
    rest = [replace(job, begun=ended.get(job.number, job.begun)) for job in jobs]
    unfinished = [job for job in rest if job.begun.outcome is None]
    driver.run(unfinished, params, KEY, lambda job, one: ended.update({job.number: one}))
    for job, expected in zip(jobs, trajectories, strict=True):
        assert ids_of(ended[job.number]) == ids_of(expected)
        assert ended[job.number].outcome == expected.outcome


@pytest.mark.usefixtures("trajectories")  # which compiles
def test_decoding_does_not_wait_for_searches_that_take_longer_than_a_step(engine, params, monkeypatch):
    class Slow(TinyIndex):
        def search(self, queries, top_n):
            time.sleep(0.3)
            return super().search(queries, top_n)

    wait, waits = ToolExecutor.wait, []

    def recorded(searches, timeout):
        waits.append((engine.scheduler.active, bool(searches.latencies), timeout))
        wait(searches, timeout)

    monkeypatch.setattr(ToolExecutor, "wait", recorded)
    run_rollouts(engine, params, two_turns, searcher=Slow(PASSAGES))
    timeouts = [timeout for is_decoding, is_known, timeout in waits if is_decoding and is_known]
    assert timeouts.count(0.0) > len(timeouts) / 2  # a busy machine may delay a step


def test_text_that_exceeds_the_context_is_not_appended(engine, params):
    def grows(problem):
        yield Generate(make_prompt("", problem.question, "", "", ""), 4)
        reply = yield Generate((TextSpan("x" * 150, True),), 4)
        return Outcome(StopReason.CONTEXT_FULL if reply.finish is FinishReason.CONTEXT_FULL else StopReason.ANSWERED)

    for trajectory in run_rollouts(engine, params, grows):
        assert trajectory.outcome.stop is StopReason.CONTEXT_FULL
        assert len(trajectory.contexts[0].ids) <= len(TOKENIZER.encode_untrusted(trajectory.problem.question)) + 4


def live_bytes():
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays())


def test_evaluation_on_the_engine_of_training_leaves_nothing_in_memory(
    one_device, params, compilations, fresh_programs, quick_collections
):
    """Greedy and sampled contexts share one engine; its cache can be given up and taken again without compiling."""
    engine = Engine(NANO, SETTINGS, TOKENIZER.stop_ids, one_device)
    training = RolloutDriver(engine, TOKENIZER, two_turns, BACKENDS)
    evaluation, jobs = replace(training, sampling=SamplingParams(temperature=0.0)), make_jobs(PROBLEMS, 2)

    def texts(driver, key):
        return [one.transcript for one in driver.trajectories(jobs, params, key, lambda line: None)[0]]

    other = jax.random.key(9)
    engine.warm_up(params)
    engine.release()
    without = live_bytes()
    sampled = texts(training, KEY)
    trained = live_bytes()
    with compilations() as count:
        first, second = texts(evaluation, KEY), texts(evaluation, other)
        assert first == second != sampled
        assert live_bytes() == trained
        engine.release()
        assert live_bytes() <= without < trained  # the key of the engine was replaced
        assert texts(training, KEY) == sampled
    assert count == []
