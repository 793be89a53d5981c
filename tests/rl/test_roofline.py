"""Times at the roofline, against arithmetic that fits on a page."""

from dataclasses import replace

import pytest

from memsearcher_jax.config import RunConfig
from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.rl import roofline
from memsearcher_jax.rl.roofline import Load, Phase
from memsearcher_jax.training.config import TrainingConfig

LOAD = Load(contexts=4, context_tokens=1_000, generated_tokens=250, prefilled_tokens=500, row_fill=1.0, efficiency=0.5)
CONFIG = RunConfig(training=TrainingConfig(row_tokens=8_000, rows_per_update=64, accumulate=2, logit_chunk=1_000))
V6E = roofline.slice_of("v6e", (4, 8), 32, 8)


def test_the_longest_limit_binds():
    phase = Phase("update", compute=2.0, memory=1.0, links=3.0)
    assert phase.seconds == 3.0 and phase.bound == "links"


def test_small_slices_send_half_as_fast_and_halves_of_chips_are_counted():
    assert roofline.slice_of("v6e", (16, 16), 256, 64).phase("x", 0, 0, 400e9).links == 1.0
    assert V6E.phase("x", 0, 0, 400e9).links == 2.0
    assert roofline.slice_of("tpu7x", (2, 2, 2), 16, 2).chips == 8


def test_a_step_has_the_rows_of_its_contexts_in_whole_micro_batches():
    trajectories = CONFIG.rl.problems * CONFIG.rl.rollouts
    assert roofline.rows_of_step(CONFIG, LOAD) == trajectories * 4 * 1_000 / 8_000 == 640
    assert roofline.micro_batches(CONFIG, LOAD) == 20
    assert roofline.micro_batches(CONFIG, replace(LOAD, row_fill=0.99)) == 21
    assert roofline.trained_row_tokens(CONFIG, LOAD) == 2_000  # a quarter of 8,000 in chunks of 1,000
    assert roofline.trained_row_tokens(CONFIG, replace(LOAD, generated_tokens=251)) == 3_000


def test_training_is_as_long_as_its_products():
    """640 rows over 32 devices: 20 each, of some 110 TFLOP forward and four times that for an update."""
    reference, update = roofline.training_phases(CONFIG, LOAD, V6E, tensor=1, sent={"update": 40e9})
    assert reference.bound == update.bound == "compute"
    assert reference.compute == pytest.approx(20 * 118e12 / 918e12, rel=0.05)
    assert update.links == pytest.approx(20 * 40e9 / 200e9)
    full = replace(CONFIG, model=replace(CONFIG.model, remat="full"))
    again = roofline.training_phases(full, LOAD, V6E, tensor=1, sent={})[1]
    assert again.compute / update.compute == pytest.approx(4 / 3, rel=0.1)


def test_without_divergence_there_is_no_reference():
    config = replace(CONFIG, training=replace(CONFIG.training, kl_coefficient=0.0))
    assert [one.name for one in roofline.training_phases(config, LOAD, V6E, tensor=1, sent={})] == ["update"]
    config = replace(config, training=replace(config.training, old_logprobs="trainer"))
    assert [one.name for one in roofline.training_phases(config, LOAD, V6E, tensor=1, sent={})] == [
        "reference",
        "update",
    ]


def test_decoding_reads_its_weights_for_every_token_of_a_slot():
    config = replace(CONFIG, sampling=replace(CONFIG.sampling, slots=64, tensor=4))
    one, many = (
        roofline.sampling_phases(replace(config, sampling=replace(config.sampling, slots=slots)), LOAD, V6E, sent={})[
            -1
        ]
        for slots in (64, 128)
    )
    assert one.bound == "memory"
    tokens_of_host = 1_280 * 4 * 250 / 8
    weights = 7.07e9 * 2 / 4
    cache = 2 * 28 * 4 * 128 * 2 * 750 * 64 / 4
    assert one.memory == pytest.approx(tokens_of_host / 64 * (weights + cache) / 1_640e9, rel=0.01)
    assert many.memory < one.memory and many.compute == pytest.approx(one.compute)


def test_a_run_takes_its_steps_at_the_assumed_share():
    found = roofline.outlook(CONFIG, LOAD, V6E, [Phase("a", 10, 1, 1), Phase("b", 1, 20, 1)])
    assert found.step_seconds == 60
    assert found.tokens_per_second == 1_280 * 4 * 1_000 / 60
    assert found.hours == CONFIG.rl.steps / 60 and found.chip_hours == 32 * found.hours


def test_the_assumed_lengths_are_those_of_the_workload():
    """Each number is the mean of benchmarks/workload.py, to a few tokens."""
    load, turns = Load(), 3.5  # 1 to 6
    fixed = 449 + 4 + 6 + 40.5
    memory = 225 * (turns - 1) / turns  # there is none at first
    observation = 600 * (turns - 1) / turns  # nor one at last
    generated = 90 + memory
    assert load.contexts == turns
    assert load.generated_tokens == pytest.approx(generated, abs=5)
    assert load.context_tokens == pytest.approx(fixed + memory + observation + generated, abs=5)
    assert load.prefilled_tokens == pytest.approx(fixed - 449 + memory + observation, abs=5)


def test_meshes_may_leave_an_axis_to_the_devices():
    from memsearcher_jax.rl.plan import parts

    assert parts(MeshConfig(1, -1, 4), 32) == 8
    assert parts(MeshConfig(2, 16, 1), 32) == 32
