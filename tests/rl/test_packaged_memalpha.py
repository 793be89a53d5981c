"""The warm start for streams that comes with the package: it reads, copies and answers, and mostly stores too little.

From it a short run learns to store more.
"""

import os
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import cli
import pytest

from memsearcher_jax.agent.types import Stop
from memsearcher_jax.report.metrics import read_metrics
from memsearcher_jax.report.page_facts import facts_of
from memsearcher_jax.rl import build, exam, source, start
from memsearcher_jax.rl.evaluate import evaluate

START = "package:tiny_memalpha"
TRAIN = Path(cli.__file__).with_name("tpu_train.py")


@pytest.fixture(scope="module")
def config():
    preset = cli.load_preset("tiny_memalpha")
    streams = replace(preset.data.streams, train_streams=1, test_streams=8, test_chunks=(10,))
    return replace(
        preset,
        data=replace(preset.data, streams=streams),
        evaluation=replace(preset.evaluation, temperature=1.0),
    )


def test_it_is_the_model_of_the_preset_that_makes_it(config):
    made = cli.load_preset("tiny_memalpha_warmstart")
    assert config.model == replace(made.model, path=START)
    assert (config.agent, config.memalpha) == (made.agent, made.memalpha)
    source.check_weights(START, config.model)
    assert build.open_tokenizer(config.model).vocab_size <= config.model.vocab_size
    assert source.newest_step(START) is None


@pytest.mark.slow
def test_it_answers_from_what_it_stores_and_stores_a_part(config, tmp_path):
    run = build.prepare(config, tmp_path, training=False)
    params = build.sampler_params(run, start.starting_params(run))
    asked = start.open_exam(run, evaluation=True)
    done = evaluate(run, build.make_driver(run, evaluation=True), params, print, asked)
    assert all(one.trajectory.outcome.stop is Stop.REMEMBERED for one in done)
    numbers = exam.summarise_facts([facts_of(one) for one in done])
    assert 0.1 < numbers["accuracy"] < 0.6
    assert numbers["calls_ok_share"] > 0.7


@pytest.mark.slow
def test_answers_become_better_within_a_few_steps(tmp_path):
    """In a process of its own: on one device, as on a laptop."""
    settings = "--config tiny_memalpha --rl.steps 12 --sampling.decode_rows --training.accumulate 4"
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    run = [sys.executable, str(TRAIN), *settings.split(), "--out", str(tmp_path / "run")]
    subprocess.run(run, check=True, env=environment, capture_output=True, timeout=900)
    accuracy = [step["accuracy"] for step in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert statistics.fmean(accuracy[-3:]) - statistics.fmean(accuracy[:3]) > 0.1, accuracy
