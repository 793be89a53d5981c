"""Streams with the real rollout driver and engine: contexts, rewards from frozen weights, examples; early checks."""

from dataclasses import replace
from functools import partial

import jax
import pytest

from memsearcher_jax.agent.memalpha.memory import Store
from memsearcher_jax.agent.memalpha.workflow import StreamOutcome
from memsearcher_jax.checks import check
from memsearcher_jax.config import agent_of
from memsearcher_jax.data.synthetic.streams import make_streams
from memsearcher_jax.launch import cli
from memsearcher_jax.model import qwen
from memsearcher_jax.rl import setup
from memsearcher_jax.rl.advantages import multi_context_advantages
from memsearcher_jax.rl.completers import open_completers
from memsearcher_jax.rl.config import CompleterConfig
from memsearcher_jax.rl.rewards import RewardFn
from memsearcher_jax.rl.rollout import RolloutDriver, make_jobs
from memsearcher_jax.sampling.engine import Engine
from memsearcher_jax.types import Problem, StopReason, Stream, StreamQuestion

PRESET = cli.load_preset("tiny_memalpha")
TOKENIZER = setup.open_tokenizer(PRESET.model)
AGENT = agent_of(PRESET)
PROMPTS = AGENT.prompts
STREAMS = make_streams(
    replace(PRESET.data.streams, train_streams=2, test_streams=0, train_chunks=3, statements=2, questions=3)
)["train"]
KEY = jax.random.key(0)


def small(**sections):
    """The preset on one device, with short replies."""
    config = replace(
        PRESET,
        agent=replace(PRESET.agent, completion_tokens=12),
        memalpha=replace(PRESET.memalpha, answer_tokens=5),
        sampling=replace(PRESET.sampling, slots=4, prefill_buckets=(128,), decode_steps_per_call=4),
        rl=replace(PRESET.rl, keep_constant_reward_groups=True),
    )
    return replace(config, **sections)


@pytest.fixture(scope="module")
def params():
    return jax.jit(lambda key: qwen.init(key, PRESET.model))(jax.random.key(1))


def test_streams_are_read_questioned_and_trained(one_device, params):
    config = small(judge=CompleterConfig(backend="initial_policy"))
    engine, agent = Engine(config.model, config.sampling, TOKENIZER.stop_ids, one_device), agent_of(config)
    driver = RolloutDriver(engine, TOKENIZER, partial(agent.start, token_counter=TOKENIZER))
    loads = []

    def frozen():
        loads.append(1)
        return params

    reward_fn = RewardFn(agent, TOKENIZER, *open_completers(config, agent, TOKENIZER, one_device, frozen))
    trajectories, _ = driver.trajectories(make_jobs(STREAMS, 2), params, KEY, lambda line: None)
    batch = reward_fn(trajectories, KEY, lambda line: None)
    assert loads == [1], "answers and verdicts come from one copy of the weights"
    assert engine.scheduler.free_slots == [0, 1, 2, 3]
    for scored in batch:
        trajectory = scored.trajectory
        stream = trajectory.problem.stream
        assert isinstance(trajectory.outcome, StreamOutcome) and trajectory.outcome.stop is StopReason.STREAM_READ
        assert len(trajectory.contexts) == len(stream.chunks) == len(scored.context_rewards) == 3
        for context, turn, chunk in zip(trajectory.contexts, trajectory.outcome.turns, stream.chunks, strict=True):
            segments = TOKENIZER.prompt(PROMPTS.chunk_prompt(turn.memory, chunk))
            ids = tuple(id for segment in segments for id in segment)
            assert tuple(context.ids[: len(ids)]) == ids and not any(context.sampled[: len(ids)])
            assert all(context.sampled[len(ids) :]) and 1 <= len(context.ids) - len(ids) <= 12
        assert trajectory.outcome.counts["questions"] == 3 and 0 <= scored.scores["accuracy"] <= 1
        assert trajectory.outcome.answer.count("\n") == 2
    longest = TOKENIZER.clip("seven " * 99, config.agent.completion_tokens)
    question = TOKENIZER.clip("seven " * 99, config.agent.question_tokens)
    judge_prompts = [PROMPTS.judge_prompt(store, longest) for store in Store] + [
        PROMPTS.grade_prompt(question, "gold", "given")
    ]
    assert not any(reply.error for reply in reward_fn.judge.complete(judge_prompts, KEY)), (
        "the longest judge prompts fit"
    )
    examples = multi_context_advantages(batch, [0, 0, 1, 1], config.rl)
    assert [example.ids.tolist() for example in examples] == [
        list(context.ids) for scored in batch for context in scored.trajectory.contexts
    ], "only the contexts that read chunks are trained, no questions"


def test_the_context_check_counts_chunks_and_answers():
    config = PRESET

    def check_contexts(config):
        setup.check_contexts(config, agent_of(config), TOKENIZER)

    check_contexts(config)
    memory, chunk = (
        TOKENIZER.clip("seven " * limit, limit) for limit in (config.agent.memory_tokens, config.memalpha.chunk_tokens)
    )
    longest = sum(map(len, TOKENIZER.prompt(PROMPTS.chunk_prompt(memory, chunk)))) + config.agent.completion_tokens
    assert longest <= AGENT.longest_context(TOKENIZER) <= config.sampling.context_tokens
    answer = AGENT.completer_tokens(TOKENIZER, judge=config.judge.backend == "initial_policy")
    question_prompt = PROMPTS.answer_prompt(
        TOKENIZER.clip("seven " * 999, config.memalpha.answer_memory_tokens),
        TOKENIZER.clip("seven " * 99, config.agent.question_tokens),
    )
    assert sum(map(len, TOKENIZER.prompt(question_prompt))) + config.memalpha.answer_tokens < answer
    shorter = replace(config, model=replace(config.model, max_positions=answer - 1))
    with pytest.raises(ValueError, match=f"may need {answer} tokens .* but model.max_positions is {answer - 1}"):
        check_contexts(shorter)
    check_contexts(replace(shorter, answerer=CompleterConfig(backend="openai", url="http://h", model="m")))


def test_a_baseline_that_writes_no_memory_cannot_be_trained(tmp_path):
    config = replace(PRESET, memalpha=replace(PRESET.memalpha, answer_from="rag"))
    with pytest.raises(ValueError, match=r"memalpha\.answer_from rag writes no memory"):
        setup.prepare(config, tmp_path)


def test_unreadable_or_unjudgeable_problems_are_errors():
    question = StreamQuestion("q", "a")
    for problem, message in (
        (Problem.of_stream("1", Stream("lme_train", ("a chunk",), (question,))), "answers of lme_train are scored by"),
        (Problem.of_stream("1", Stream("squad", ("word " * 500,), (question,))), "has a chunk of"),
        (Problem("1", "Who?", ("a",)), "problem '1' is not a stream"),
    ):
        with pytest.raises(ValueError, match=message):
            AGENT.check_problems([problem], TOKENIZER.count, has_judge=False)
    AGENT.check_problems(STREAMS, TOKENIZER.count, has_judge=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"agent": dict(workflow="memsearcher", memory_tokens=32, completion_tokens=16, observation_tokens=32)},
            "agent.workflow memsearcher cannot read data.synthetic streams",
        ),
        (
            {"data": {"synthetic": "encyclopedia"}},
            "agent.workflow memalpha cannot read data.synthetic encyclopedia",
        ),
        ({"rl": {"credit": "last_context"}}, "rl.advantage_scope position credits each context: set rl.credit"),
        ({"answerer": {"backend": "none"}}, "only a judge is optional"),
        (
            {"memalpha": {"chunk_tokens": 88}},
            r"a context may need 257 tokens \(templates at least 1, agent.memory_tokens",
        ),
    ],
)
def test_incompatible_settings_are_errors(changes, message):
    config = replace(PRESET, **{name: replace(getattr(PRESET, name), **values) for name, values in changes.items()})
    with pytest.raises(ValueError, match=message):
        check(config)
