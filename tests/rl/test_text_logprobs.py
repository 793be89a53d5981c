"""`scoring.logprobs` against a plain forward pass, on meshes of the sampler, and in a user's reward."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from scipy.special import log_softmax

from memsearcher_jax.agent.base import Scoring
from memsearcher_jax.agent.config import AgentConfig, RewardConfig
from memsearcher_jax.agent.registry import make_agent
from memsearcher_jax.hosts.ending import EndReason, RunEnded
from memsearcher_jax.launch import tpu_train
from memsearcher_jax.logs.trajectories import read_trajectories
from memsearcher_jax.model import qwen, sharding
from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.rl.rewards import RewardFn, own_rewards
from memsearcher_jax.rl.text_logprobs import TextLogprobs, chunk_tokens, program, widths
from memsearcher_jax.types import Outcome, Problem, Prompt, ScoredTrajectory, StopReason, TextSpan, Trajectory
from tests.support import NANO, SMALL_RUN, byte_tokenizer, make_prompt, with_flags

TOKENIZER = byte_tokenizer()
CONTEXT_TOKENS = 500
PROMPTS = [
    make_prompt("<|im_start|>", "who?" * (5 * number + 1), " ", "a memory", "<|im_end|>") for number in range(5)
] + [make_prompt("<|im_start|>", "who?" * 100, " ", "", "<|im_end|>")]
TEXTS = ["Ada", "é <|im_end|>", "", "Lovelace, of London", "B" * 60, "C" * 80]


def scorer(mesh, **changes):
    settings = {"context_tokens": CONTEXT_TOKENS, "logit_chunk": 32} | changes
    return TextLogprobs(replace(NANO, **settings.pop("model", {})), "float32", mesh, TOKENIZER, **settings)


def published(logprobs, params):
    return sharding.on_submesh(
        jax.device_put(
            qwen.publish(params, logprobs.model, "cpu", logprobs.weights_dtype),
            jax.tree.map(
                lambda spec: sharding.named_sharding(logprobs.mesh, spec.axes),
                sharding.sampler_specs(logprobs.model, logprobs.mesh, logprobs.weights_dtype),
            ),
        ),
        logprobs.mesh,
    )


def expected(params, prompt, text):
    """The number from the whole logits of one context without padding."""
    prompt_ids = TOKENIZER.encode_spans(prompt.segments)
    ids_1T = np.array([prompt_ids + TOKENIZER.encode_untrusted(text)])
    position_1T = np.arange(ids_1T.size)[None]
    logits_1TV, _ = qwen.forward(params, NANO, ids_1T, position_1T, np.ones_like(position_1T))
    logprob_TV = log_softmax(np.asarray(logits_1TV[0], np.float64), axis=-1)
    return sum(logprob_TV[t - 1, ids_1T[0, t]] for t in range(len(prompt_ids), ids_1T.size))


@pytest.fixture(scope="module")
def plain(params):
    return [expected(params, *pair) for pair in zip(PROMPTS, TEXTS, strict=True)]


@pytest.mark.parametrize("is_unstacked", [False, True])
def test_numbers_are_those_of_a_plain_forward_pass_whatever_is_in_the_batch(
    params, plain, one_device, is_unstacked, monkeypatch
):
    if is_unstacked:  # as large models are published on CPUs and GPUs
        monkeypatch.setattr(qwen, "LAST_LEVEL_CACHE", 0)
    logprobs = scorer(one_device, logit_chunk=16 if is_unstacked else 32)  # a program of its own
    weights = published(logprobs, params)
    assert isinstance(weights["layers"], list) == is_unstacked
    numbers = logprobs(weights, PROMPTS, TEXTS)
    np.testing.assert_allclose(numbers, plain, rtol=1e-5, atol=1e-5)
    assert numbers[2] == 0.0, "of an empty text"
    programs = program.cache_info().misses
    again = logprobs(weights, [*PROMPTS[::-1], *PROMPTS * 3], [*TEXTS[::-1], *TEXTS * 3])
    assert again == [*numbers[::-1], *numbers * 3]
    for prompt, text, number in zip(PROMPTS, TEXTS, numbers, strict=True):
        assert logprobs(weights, [prompt], [text]) == [number]
    assert logprobs(weights, [], []) == []
    assert program.cache_info().misses == programs, "no call makes another program"
    for width in widths(CONTEXT_TOKENS):
        chunk = chunk_tokens(logprobs.logit_chunk, widths(CONTEXT_TOKENS)[-1] // width, width)
        assert program(logprobs.model, "float32", one_device, width, chunk)._cache_size() == 1


@pytest.mark.slow
def test_a_host_scores_on_its_own_mesh_of_several_devices(params, plain):
    mesh = sharding.make_mesh(MeshConfig(2, 1, 2), jax.devices()[4:])
    logprobs = scorer(mesh)
    np.testing.assert_allclose(logprobs(published(logprobs, params), PROMPTS, TEXTS), plain, rtol=1e-5, atol=1e-5)
    rounded = replace(logprobs, weights_dtype="int8")
    numbers = np.array(rounded(published(rounded, params), PROMPTS, TEXTS))
    assert 0 < np.abs(numbers - plain).max() < 3.0, "weights of an int8 sampler are those that it samples with"


def test_widths_are_few_and_logits_of_all_rows_stay_within_the_chunk():
    assert widths(8192) == [128, 512, 2048, 8192]
    assert widths(100) == [128] and widths(300) == [128, 384]
    assert [chunk_tokens(1024, 8192 // width, width) for width in widths(8192)] == [16, 64, 256, 1024]
    assert chunk_tokens(1000, 1, 384) == 128 and chunk_tokens(3, 64, 128) == 1


def test_what_cannot_be_scored_is_one_clear_line(params, one_device):
    logprobs = scorer(one_device)
    with pytest.raises(ValueError, match=r"a prompt of \d+ tokens and its text of 450 have \d+ together, more than t"):
        logprobs(params, PROMPTS[-1:], ["x" * 450])
    with pytest.raises(ValueError, match="2 texts for 1"):
        logprobs(params, PROMPTS[:1], ["a", "b"])
    with pytest.raises(ValueError, match="a prompt has no token"):
        logprobs(params, [Prompt((TextSpan("", True),))], ["a"])
    broken = jax.tree.map(lambda x: x * np.nan, params)
    with pytest.raises(FloatingPointError, match="not finite"):
        logprobs(published(logprobs, broken), PROMPTS[:1], TEXTS[:1])


def finished(rollout=0):
    outcome = Outcome(StopReason.ANSWERED, "Ada")
    return Trajectory(Problem("q", "Who?", ("Ada",)), rollout, outcome, (), "")


REWARD = """
from memsearcher_jax.types import Prompt, TextSpan

def reward(trajectories, scoring):
    questions = [Prompt((TextSpan(one.problem.question, False),)) for one in trajectories]
    return scoring.logprobs(questions, [one.problem.golden_answers[0] for one in trajectories])
"""


def test_an_error_never_becomes_a_reward(params, one_device, tmp_path):
    file = tmp_path / "reward.py"
    file.write_text(REWARD)
    reward_fn = RewardFn(make_agent(AgentConfig(), RewardConfig(function=str(file))), TOKENIZER)
    (lost,) = reward_fn([finished()], jax.random.key(0), print, params)
    assert lost.trajectory.outcome.stop is StopReason.FAULT
    assert "scoring.logprobs needs the weights of the policy, and here are none" in lost.trajectory.outcome.error
    reward_fn = replace(reward_fn, text_logprobs=scorer(one_device, context_tokens=6))
    (lost,) = reward_fn([finished()], jax.random.key(0), print, params)
    assert "have 7 together" in lost.trajectory.outcome.error and lost.scores == {}

    def stopped(prompts, texts):
        raise RunEnded(EndReason.SIGNAL, "SIGTERM")

    with pytest.raises(RunEnded):
        own_rewards(str(file), [ScoredTrajectory(finished(), 0.0)], Scoring(TOKENIZER, logprobs=stopped))


@pytest.mark.parametrize(
    ("parameters", "takes_scoring"),
    [("them", False), ("them, scale=2", False), ("*them", False), ("them, s", True), ("them, scoring=None", True)],
)
def test_scoring_is_given_to_a_function_that_takes_it(parameters, takes_scoring, tmp_path):
    file = tmp_path / "reward.py"
    body = "    given = [value for value in locals().values() if type(value).__name__ == 'Scoring']\n"
    file.write_text(f"def reward({parameters}):\n{body}    return [float(len(given))]\n")
    (scored,) = own_rewards(str(file), [ScoredTrajectory(finished(), 0.0)], Scoring(TOKENIZER))
    assert scored.reward == takes_scoring


@pytest.mark.slow
def test_a_reward_of_log_probabilities_trains_and_evaluates(tmp_path, fast_compile):
    """The reward is one number of the weights before the step for all trajectories of a problem."""
    file = tmp_path / "reward.py"
    file.write_text(REWARD)
    out = tmp_path / "run"
    flags = ("--reward.function", str(file), "--rl.steps", "1", "--rl.evaluate_every", "1")
    tpu_train.main([*with_flags(SMALL_RUN.split(), *flags), "--out", str(out)])
    scored = list(read_trajectories(next((out / "trajectories").iterdir())))
    rewards = {one.trajectory.problem.id: one.reward for one in scored if not np.isnan(one.reward)}
    assert len(scored) == 8 and len(rewards) == 4 and all(reward < 0 for reward in rewards.values())
    assert all(one.reward == rewards[one.trajectory.problem.id] for one in scored)
