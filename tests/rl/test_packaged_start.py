"""The warm start that comes with the package: it is found wherever that is installed, and knows the format."""

from dataclasses import replace

import cli
import pytest

from memsearcher_jax.agent.types import Stop
from memsearcher_jax.rl import build, score, source, start
from memsearcher_jax.rl.evaluate import evaluate

START = "package:tiny"


@pytest.fixture(scope="module")
def config():
    preset = cli.load_preset("tiny_warmstart")
    evaluation = replace(preset.evaluation, temperature=1.0, questions=40)
    return replace(preset, model=replace(preset.model, path=START), evaluation=evaluation)


def test_it_is_the_model_of_the_preset_that_makes_it(config):
    source.check_weights(START, config.model)
    assert build.open_tokenizer(config.model).vocab_size <= config.model.vocab_size
    assert source.newest_step(START) is None


@pytest.mark.slow
def test_it_keeps_the_format_and_does_the_job_badly(config, tmp_path):
    run = build.prepare(config, tmp_path, training=False)
    params = build.sampler_params(run, start.starting_params(run))
    done = evaluate(run, build.make_driver(run, evaluation=True), params, print)
    answered = sum(one.trajectory.outcome.stop is Stop.ANSWERED for one in done) / len(done)
    assert answered > 0.85
    assert 0.05 < score.summarise(done)["exact_match"] < 0.5
