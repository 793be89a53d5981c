"""Streams with the real rollout driver and engine: contexts, rewards from frozen weights, examples; early checks."""

import re
from dataclasses import replace

import jax
import pytest

from memsearcher_jax.agent.memalpha import prompts
from memsearcher_jax.agent.memalpha.memory import Store
from memsearcher_jax.agent.memalpha.workflow import StreamOutcome
from memsearcher_jax.config import check
from memsearcher_jax.data.synthetic.streams import make_streams
from memsearcher_jax.launch import cli
from memsearcher_jax.model import qwen, sharding
from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.rl import setup, stream_reward
from memsearcher_jax.rl.advantages import multi_context_advantages
from memsearcher_jax.rl.config import CompleterConfig
from memsearcher_jax.rl.rollout import RolloutDriver, WorkflowExecutor, make_jobs
from memsearcher_jax.sampling.engine import Engine
from memsearcher_jax.types import Problem, StopReason, Stream, StreamQuestion

PRESET = cli.load_preset("tiny_memalpha")
TOKENIZER = setup.open_tokenizer(PRESET.model)
PROMPTS = prompts.load(PRESET.agent)
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
def mesh():
    return sharding.make_mesh(MeshConfig(1, 1, 1), jax.devices()[:1])


@pytest.fixture(scope="module")
def params():
    return jax.jit(lambda key: qwen.init(key, PRESET.model))(jax.random.key(1))


def test_streams_are_read_questioned_and_trained(mesh, params):
    config = small(judge=CompleterConfig(backend="initial_policy"))
    engine = Engine(config.model, config.sampling, TOKENIZER.stop_ids, mesh)
    factory = setup.workflow_factory(config, PROMPTS, TOKENIZER)
    driver = RolloutDriver(WorkflowExecutor(engine, TOKENIZER), factory)
    loads = []

    def frozen():
        loads.append(1)
        return params

    reward_fn = stream_reward.open_stream_reward_fn(config, PROMPTS, TOKENIZER, mesh, frozen)
    trajectories, _ = driver.rollout(make_jobs(STREAMS, 2), params, KEY, lambda line: None)
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
            assert context.ids[: len(ids)] == ids and not any(context.sampled[: len(ids)])
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


def test_the_context_check_is_exact():
    config = PRESET
    setup.open_prompts(config, TOKENIZER)

    def with_context(tokens):
        return replace(config, sampling=replace(config.sampling, context_tokens=tokens))

    with pytest.raises(ValueError, match="a context may need") as refusal:
        setup.open_prompts(with_context(1), TOKENIZER)
    needed = int(re.search(r"need (\d+) tokens", str(refusal.value))[1])
    setup.open_prompts(with_context(needed), TOKENIZER)
    with pytest.raises(ValueError, match="raise it or lower one of these"):
        setup.open_prompts(with_context(needed - 1), TOKENIZER)
    memory, chunk = (
        TOKENIZER.clip("seven " * limit, limit) for limit in (config.agent.memory_tokens, config.memalpha.chunk_tokens)
    )
    longest = sum(map(len, TOKENIZER.prompt(PROMPTS.chunk_prompt(memory, chunk)))) + config.agent.completion_tokens
    assert longest <= needed <= config.sampling.context_tokens
    answer = stream_reward.answer_context_tokens(config, PROMPTS, TOKENIZER)
    question_prompt = PROMPTS.answer_prompt(
        TOKENIZER.clip("seven " * 999, config.memalpha.answer_memory_tokens),
        TOKENIZER.clip("seven " * 99, config.agent.question_tokens),
    )
    assert sum(map(len, TOKENIZER.prompt(question_prompt))) + config.memalpha.answer_tokens < answer
    shorter = replace(config, model=replace(config.model, max_positions=answer - 1))
    with pytest.raises(ValueError, match=f"may need {answer} tokens .* but model.max_positions is {answer - 1}"):
        setup.open_prompts(shorter, TOKENIZER)
    remote_answerer = replace(shorter, answerer=CompleterConfig(backend="openai", url="http://h", model="m"))
    setup.open_prompts(remote_answerer, TOKENIZER)


def test_unreadable_or_unjudgeable_problems_are_errors():
    with pytest.raises(ValueError, match=r"answers of lme_train are scored by a judge, and judge.backend is none"):
        stream = Stream("lme_train", ("a chunk",), (StreamQuestion("q", "a"),))
        setup.check_problems([Problem.of_stream("1", stream)], PRESET, TOKENIZER)
    with pytest.raises(ValueError, match="has a chunk of"):
        long = Stream("squad", ("word " * 500,), (StreamQuestion("q", "a"),))
        setup.check_problems([Problem.of_stream("1", long)], PRESET, TOKENIZER)
    setup.check_problems(STREAMS, PRESET, TOKENIZER)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {
                "agent": {
                    "workflow": "memsearcher",
                    "memory_tokens": 32,
                    "completion_tokens": 16,
                    "observation_tokens": 32,
                }
            },
            "agent.workflow memsearcher cannot read data.synthetic streams",
        ),
        (
            {"data": {"synthetic": "encyclopedia"}},
            "agent.workflow memalpha cannot read data.synthetic encyclopedia",
        ),
        ({"rl": {"credit": "last_context"}}, "rl.advantage_scope position gives every context an advantage of its own"),
        ({"answerer": {"backend": "none"}}, "only a judge is optional"),
        ({"memalpha": {"core_tokens": 96}}, "memalpha.core_tokens 96 is not below agent.memory_tokens 96"),
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


def test_context_rewards_require_streams():
    nano = cli.load_preset("nano")
    with pytest.raises(ValueError, match=r"rl.advantage_scope pooled needs a reward for each context"):
        check(replace(nano, rl=replace(nano.rl, advantage_scope="pooled")))
