"""Streams through the real driver and sampler: contexts, buffers, an exam by frozen weights, samples; early checks."""

import re
from dataclasses import replace

import cli
import jax
import pytest

from memsearcher_jax.agent import memalpha_prompts
from memsearcher_jax.agent.memalpha import Memorised
from memsearcher_jax.agent.memalpha_memory import Store
from memsearcher_jax.agent.types import Stop, Stream, StreamQuestion
from memsearcher_jax.config import check
from memsearcher_jax.data.stream_world import make_streams
from memsearcher_jax.model import qwen, sharding
from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.rl import build, reading
from memsearcher_jax.rl.assemble import samples_of
from memsearcher_jax.rl.config import SpeakerConfig
from memsearcher_jax.rl.evaluate import roll_out
from memsearcher_jax.rl.rollout import RolloutDriver, jobs_for
from memsearcher_jax.sampling.engine import Engine

PRESET = cli.load_preset("tiny_memalpha")
TOKENIZER = build.open_tokenizer(PRESET.model)
PROMPTS = memalpha_prompts.load(PRESET.agent)
STREAMS = make_streams(
    replace(PRESET.data.streams, train_streams=2, test_streams=0, train_chunks=3, facts=2, questions=3)
)["train"]
KEY = jax.random.key(0)


def small(**sections):
    """The preset on one device, with short replies."""
    config = replace(
        PRESET,
        agent=replace(PRESET.agent, reply_tokens=12),
        memalpha=replace(PRESET.memalpha, answer_tokens=5),
        sampling=replace(PRESET.sampling, slots=4, rows_per_call=4, prefill_buckets=(128,), decode_tokens=4),
        rl=replace(PRESET.rl, even_groups=True),
    )
    return replace(config, **sections)


@pytest.fixture(scope="module")
def mesh():
    return sharding.make_mesh(MeshConfig(1, 1, 1), jax.devices()[:1])


@pytest.fixture(scope="module")
def params():
    return jax.jit(lambda key: qwen.init(key, PRESET.model))(jax.random.key(1))


def test_streams_are_read_asked_about_and_learnt_from(mesh, params):
    config = small(judge=SpeakerConfig(who="start"))
    widths = reading.chunk_widths(config, PROMPTS, TOKENIZER)
    engine = Engine(config.model, config.sampling, widths, TOKENIZER.stop_ids, mesh)
    driver = RolloutDriver(engine, TOKENIZER, None, reading.workflow_maker(config, PROMPTS, TOKENIZER))
    loads = []

    def frozen():
        loads.append(1)
        return params

    exam = reading.open_exam(config, PROMPTS, TOKENIZER, mesh, frozen)
    batch = roll_out(driver, jobs_for(STREAMS, 2), params, KEY, lambda text: None, exam)
    assert loads == [1], "answers and verdicts come from one copy of the weights"
    assert engine.free == [0, 1, 2, 3]
    for one in batch:
        trajectory = one.trajectory
        stream = Stream.of(trajectory.problem)
        assert isinstance(trajectory.outcome, Memorised) and trajectory.outcome.stop is Stop.REMEMBERED
        assert len(trajectory.contexts) == len(stream.chunks) == len(one.context_rewards) == 3
        for context, turn, chunk in zip(trajectory.contexts, trajectory.outcome.turns, stream.chunks, strict=True):
            opened = TOKENIZER.prompt(PROMPTS.chunk(turn.memory, chunk))
            ids = tuple(id for part in opened.parts for id in part)
            assert context.ids[: len(ids)] == ids and not any(context.sampled[: len(ids)])
            assert all(context.sampled[len(ids) :]) and 1 <= len(context.ids) - len(ids) <= 12
        assert trajectory.outcome.counts["questions"] == 3 and 0 <= one.scores["accuracy"] <= 1
        assert trajectory.outcome.answer.count("\n") == 2
    longest = TOKENIZER.clip("seven " * 99, config.agent.reply_tokens)
    question = TOKENIZER.clip("seven " * 99, config.agent.question_tokens)
    judged = [PROMPTS.judge(store, longest) for store in Store] + [PROMPTS.grade(question, "gold", "given")]
    assert not any(said.error for said in exam.judge.say(judged, KEY)), "there is room for what is judged"
    samples = samples_of(batch, [0, 0, 1, 1], config.rl)
    assert [sample.ids.tolist() for sample in samples] == [
        list(context.ids) for one in batch for context in one.trajectory.contexts
    ], "what is trained is what read the chunks: no question is among it"


def test_the_longest_contexts_fit_exactly():
    config = PRESET
    reading.check_contexts(config, PROMPTS, TOKENIZER)

    def with_context(tokens):
        return replace(config, sampling=replace(config.sampling, context_tokens=tokens))

    with pytest.raises(ValueError, match="a chunk's context may need") as refusal:
        reading.check_contexts(with_context(1), PROMPTS, TOKENIZER)
    needed = int(re.search(r"need (\d+) tokens", str(refusal.value))[1])
    reading.check_contexts(with_context(needed), PROMPTS, TOKENIZER)
    with pytest.raises(ValueError, match="raise it or lower one"):
        reading.check_contexts(with_context(needed - 1), PROMPTS, TOKENIZER)
    memory, chunk = (
        TOKENIZER.clip("seven " * limit, limit) for limit in (config.agent.memory_tokens, config.memalpha.chunk_tokens)
    )
    longest = len(TOKENIZER.prompt(PROMPTS.chunk(memory, chunk))) + config.agent.reply_tokens
    assert longest <= needed <= config.sampling.context_tokens
    answer = reading.answer_context(config, PROMPTS, TOKENIZER)
    asked = PROMPTS.answer(
        TOKENIZER.clip("seven " * 999, config.memalpha.answer_memory_tokens),
        TOKENIZER.clip("seven " * 99, config.agent.question_tokens),
    )
    assert len(TOKENIZER.prompt(asked)) + config.memalpha.answer_tokens < answer
    shorter = replace(config, model=replace(config.model, max_positions=answer - 1))
    with pytest.raises(ValueError, match=f"may need {answer} tokens .* but model.max_positions is {answer - 1}"):
        reading.check_contexts(shorter, PROMPTS, TOKENIZER)
    by_others = replace(shorter, answerer=SpeakerConfig(who="endpoint", url="http://h", model="m"))
    reading.check_contexts(by_others, PROMPTS, TOKENIZER)


def test_problems_that_cannot_be_read_or_judged_are_named_early():
    with pytest.raises(ValueError, match=r"answers of lme_train are scored by a judge, and judge.who is nobody"):
        stream = Stream("lme_train", ("a chunk",), (StreamQuestion("q", "a"),))
        reading.check_streams([stream.problem("1")], PRESET, TOKENIZER)
    with pytest.raises(ValueError, match="has a chunk of"):
        long = Stream("squad", ("word " * 500,), (StreamQuestion("q", "a"),))
        reading.check_streams([long.problem("1")], PRESET, TOKENIZER)
    reading.check_streams(STREAMS, PRESET, TOKENIZER)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"agent": {"workflow": "memsearcher", "reply_tokens": 16, "observation_tokens": 64}},
            "agent.workflow memsearcher does not read what data.made streams is",
        ),
        ({"data": {"made": "world"}}, "agent.workflow memalpha does not read what data.made world is"),
        ({"rl": {"credit": "last context"}}, "rl.baseline position gives every context an advantage of its own"),
        ({"answerer": {"who": "nobody"}}, "somebody has to answer the questions"),
        ({"memalpha": {"core_tokens": 96}}, "memalpha.core_tokens 96 is not below agent.memory_tokens 96"),
        ({"memalpha": {"chunk_tokens": 88}}, r"a turn may need 256 tokens and its templates \(agent.memory_tokens"),
    ],
)
def test_settings_that_do_not_go_together(changes, message):
    config = replace(PRESET, **{name: replace(getattr(PRESET, name), **values) for name, values in changes.items()})
    with pytest.raises(ValueError, match=message):
        check(config)


def test_a_reward_for_each_context_is_for_streams_alone():
    nano = cli.load_preset("nano")
    with pytest.raises(ValueError, match=r"rl.baseline pooled needs a reward for each context"):
        check(replace(nano, rl=replace(nano.rl, baseline="pooled")))
