"""Roofline times against arithmetic by hand."""

from dataclasses import replace

import jax
import pytest

from benchmarks.workload import SYSTEM, make_workload
from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.config import RunConfig
from memsearcher_jax.hosts.meshes import make_meshes
from memsearcher_jax.launch.cli import load_preset
from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.planning import roofline
from memsearcher_jax.planning.hlo import Work
from memsearcher_jax.planning.roofline import Phase, Workload
from memsearcher_jax.planning.tpu_plan import resident_memory
from memsearcher_jax.runs.run_dir import located
from memsearcher_jax.training.config import TeacherConfig, TrainingConfig

WORKLOAD = Workload(
    contexts=4,
    context_tokens=1_000,
    generated_tokens=250,
    shared_tokens=0,
    prefilled_tokens=500,
    packing_efficiency=1.0,
    efficiency=0.5,
)
CONFIG = RunConfig(training=TrainingConfig(seq_len=8_000, minibatch_rows=64, grad_accum_steps=2, logit_chunk=1_000))
V6E = roofline.Topology.of("v6e", (4, 8), range(32), range(4))


def test_a_phase_is_bound_by_its_largest_limit_and_links_without_rings_send_at_half_rate():
    assert Phase("update", compute=2.0, memory=1.0, links=3.0).bound == "links"
    phase = Phase("update", compute=2.0, memory=1.0, links=3.0, operations=4.0)
    assert phase.seconds == 4.0 and phase.bound == "operations"
    assert roofline.Topology.of("v6e", (16, 16), range(256), range(4)).phase("x", 0, 0, 400e9).links == 1.0
    assert V6E.phase("x", 0, 0, 400e9).links == 2.0
    assert roofline.Topology.of("tpu7x", (2, 2, 2), range(16), range(8)).chips == 8, "of two devices each"


def test_a_step_has_the_rows_of_its_contexts_in_full_micro_batches():
    trajectories = CONFIG.rl.prompts_per_step * CONFIG.rl.group_size
    assert roofline.rows_per_step(CONFIG, WORKLOAD) == trajectories * 4 * 1_000 / 8_000 == 640  # 20 micro-batches
    full, more = (
        roofline.training_phases(CONFIG, replace(WORKLOAD, packing_efficiency=share), V6E)[1] for share in (1, 0.99)
    )
    assert more.memory == pytest.approx(full.memory * 21 / 20)
    config = replace(CONFIG, training=replace(CONFIG.training, seq_len=8_192, logit_chunk=1_024))
    shared = replace(WORKLOAD, context_tokens=1_024, shared_tokens=512)  # a row holds them once
    assert roofline.contexts_per_row(config, shared) == 15  # 512 + 15 x 512
    assert roofline.rows_per_step(config, shared) == 1_280 * 4 / 15


def test_training_time_is_that_of_its_flops():
    """640 rows over 32 devices: 20 each, about 118 TFLOP forward each and four times that for an update."""
    reference, update = roofline.training_phases(CONFIG, WORKLOAD, V6E)
    assert reference.bound == update.bound == "compute"
    assert reference.compute == pytest.approx(20 * 118e12 / 918e12, rel=0.05)
    full = replace(CONFIG, model=replace(CONFIG.model, remat="nothing_saveable"))
    again = roofline.training_phases(full, WORKLOAD, V6E)[1]
    assert again.compute / update.compute == pytest.approx(4 / 3, rel=0.1)


def test_an_update_sends_all_weights_three_times():
    """To gather them for the forward and for the backward pass, and to scatter the gradients, in 20 micro-batches.

    The compiled update of 7B on v5e 4x8 sends 40.2 GB in each.
    """
    config = load_preset("qwen7b")
    config = replace(config, training=replace(CONFIG.training, seq_len=8_192, logit_chunk=1_024))
    reference, update = roofline.training_phases(config, replace(WORKLOAD, context_tokens=1_024), V6E)
    assert update.links == pytest.approx(20 * 40.2e9 / 200e9, rel=0.04)
    assert reference.links == pytest.approx(update.links / 3)
    split = replace(config, mesh=MeshConfig(1, -1, 4))  # a quarter of each matrix, from seven others
    _, quarter = roofline.training_phases(split, replace(WORKLOAD, context_tokens=1_024), V6E)
    assert quarter.links == pytest.approx(update.links / 4 * (7 / 8) / (31 / 32))


def test_slices_exchange_their_gradients_once_per_update():
    config = replace(load_preset("qwen3b"), mesh=MeshConfig(2, -1, 1))
    of_two = roofline.Topology.of("v6e", (4, 8), range(64), range(4), slices=2)
    *_, exchange = roofline.training_phases(config, WORKLOAD, of_two)
    updates = 1_280 * 4 / 640
    gradient_gb = 3.09 * 4 / 32  # float32, over the 32 chips of a slice
    assert exchange.name == "gradients between slices" and exchange.bound == "links"
    assert exchange.links == pytest.approx(updates * gradient_gb / 12.5, rel=0.01)  # of two slices each sends all
    of_four = roofline.Topology.of("v6e", (4, 8), range(128), range(4), slices=4)
    *_, longer = roofline.training_phases(replace(config, mesh=MeshConfig(4, -1, 1)), WORKLOAD, of_four)
    assert longer.links == pytest.approx(1.5 * exchange.links)
    adapters = replace(config, model=replace(config.model, lora_rank=16))
    assert roofline.training_phases(adapters, WORKLOAD, of_two)[-1].links == 0


def test_the_reference_phase_needs_a_kl_term_or_trainer_logprobs():
    for kl, logprobs, names in ((0.0, "sampler", ["update"]), (0.0, "trainer", ["reference", "update"])):
        config = replace(CONFIG, training=replace(CONFIG.training, kl_coefficient=kl, old_logprobs=logprobs))
        assert [phase.name for phase in roofline.training_phases(config, WORKLOAD, V6E)] == names


def test_a_teacher_has_a_phase_and_memory_in_the_place_of_the_reference():
    config = replace(
        CONFIG, model=replace(CONFIG.model, compute_dtype="float32"), sampling=load_preset("nano").sampling
    )
    taught = replace(config, teacher=TeacherConfig("package:tiny"))
    phases = roofline.training_phases(taught, WORKLOAD, V6E)
    reference, update = roofline.training_phases(config, WORKLOAD, V6E)
    assert [phase.name for phase in phases] == ["teacher", "update"] and phases[1] == update
    assert phases[0].compute < reference.compute / 100
    meshes = make_meshes(taught, jax.devices(), jax.local_devices())
    size = (located("package:tiny") / "model.safetensors").stat().st_size
    planned = [resident_memory(planned, meshes).reference for planned in (taught, config)]
    assert planned[0] == pytest.approx(size / 8, rel=0.1) and planned[1] > 100 * planned[0]


def sampling_phases(config, **work):
    return {phase.name: phase for phase in roofline.sampling_phases(config, WORKLOAD, V6E, work)}


TOKENS_OF_HOST = 1_280 * 4 * 250 / 8
WEIGHTS = 7.07e9 * 2 / 4
CONTEXT = 2 * 28 * 4 * 128 * 2 * (750 + 64)
"""Bytes of 750 cached tokens in pages of 128, of which the last is half full on average."""


def decode_config(slots, carry_over=0):
    sampling = replace(CONFIG.sampling, slots=slots, tensor=4, page_tokens=128)
    return replace(CONFIG, sampling=sampling, rl=replace(CONFIG.rl, carry_over=carry_over))


@pytest.mark.parametrize(("slots", "carry_over", "active"), [(64, 0, 64), (256, 0, 160), (256, 1, 256)])
def test_decoding_reads_the_weights_once_for_all_active_slots_and_their_pages(slots, carry_over, active):
    """A host has 160 trajectories; with `rl.carry_over` those of later steps use the other slots."""
    decode = sampling_phases(decode_config(slots, carry_over))["decode"]
    expected = TOKENS_OF_HOST / active * WEIGHTS + TOKENS_OF_HOST * CONTEXT / 4
    assert decode.memory == pytest.approx(expected / 1_640e9, rel=0.01)
    assert decode.bound == "memory"


def test_in_int8_decoding_reads_half_of_the_projections_and_of_the_pages():
    config = decode_config(256, carry_over=1)
    config = replace(config, sampling=replace(config.sampling, weights="int8", kv="int8"))
    output = 152_064 * 3_584 * 2 / 4  # stays in bfloat16
    weights, context = (WEIGHTS - output) / 2 + output, CONTEXT / 2 * (128 + 4) / 128
    expected = TOKENS_OF_HOST / 256 * weights + TOKENS_OF_HOST * context / 4
    assert sampling_phases(config)["decode"].memory == pytest.approx(expected / 1_640e9, rel=0.01)


def test_the_longest_trajectory_decodes_its_tokens_one_after_the_other():
    """2,310 tokens, when 160 active slots decode all others in 1,000 steps."""
    phases = sampling_phases(decode_config(256))
    assert phases["longest trajectory"].memory == pytest.approx(1_310 * WEIGHTS / 1_640e9, rel=0.01)
    assert "longest trajectory" not in sampling_phases(decode_config(64))  # 2,500 steps
    assert "longest trajectory" not in sampling_phases(decode_config(256, carry_over=1))


def test_operations_take_time_of_their_own():
    config = decode_config(64)
    phases = sampling_phases(config, decode=Work(cycles=7e6 * config.sampling.decode_steps_per_call))
    assert phases["decode"].operations == pytest.approx(TOKENS_OF_HOST / 64 * 7e6 / 1.75e9)
    assert phases["decode"].bound == "operations"


def test_the_default_workload_is_that_of_the_benchmarks():
    """Each number is the mean of a drawn workload, to the error of the draws."""
    workload, plans = Workload(), make_workload(2_000, 1, 100)
    contexts = generated = prefilled = thought = read = 0
    for plan in plans:
        memory = 0
        for number, turn in enumerate(plan.turns, start=1):
            prefilled += len(plan.before) - SYSTEM + memory + len(plan.after)
            generated += turn.think
            if number < len(plan.turns):  # the last turn answers
                prefilled += len(turn.observation)
                generated += turn.memory
            memory = turn.memory
        contexts += len(plan.turns)
        thought += sum(turn.think for turn in plan.turns)
        read += len(plan.before) - SYSTEM + len(plan.after) + sum(len(turn.observation) for turn in plan.turns[:-1])
    assert workload.contexts == pytest.approx(contexts / len(plans), abs=0.05)
    assert workload.generated_tokens == pytest.approx(generated / contexts, abs=5)
    assert workload.prefilled_tokens == pytest.approx(prefilled / contexts, abs=5)
    assert workload.context_tokens == pytest.approx(SYSTEM + (prefilled + generated) / contexts, abs=10)
    react = Workload().of_run(replace(CONFIG, agent=AgentConfig(workflow="react")))
    assert (react.contexts, react.context_tokens) == (1, pytest.approx(SYSTEM + (thought + read) / len(plans), abs=30))
    assert react.generated_tokens == pytest.approx(thought / len(plans), abs=10)


def test_the_default_workload_fits_the_contexts_of_the_run():
    """A context of `tiny` holds 360 tokens. What is given stays."""
    tiny = Workload(generated_tokens=40).of_run(load_preset("tiny"))
    assert (tiny.contexts, tiny.context_tokens, tiny.generated_tokens) == (3.5, 360, 40)
    assert tiny.prefilled_tokens == pytest.approx(640 * 360 / 1_340)
    published = replace(CONFIG, published_model=True)
    assert Workload().of_run(published) == Workload()


def test_an_index_of_wikipedia_is_assumed_for_published_models_without_a_service():
    published = replace(CONFIG, published_model=True)
    served = replace(published, retrieval=replace(CONFIG.retrieval, url="http://127.0.0.1:8000"))
    passages = [Workload().of_run(config).passages for config in (published, served, CONFIG)]
    assert passages == [21_015_324, 0, 0]
    assert Workload(passages=9_000).of_run(CONFIG).passages == 9_000
