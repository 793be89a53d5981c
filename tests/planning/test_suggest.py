"""Candidates for a slice, and their order."""

from dataclasses import replace

import pytest

from memsearcher_jax.launch import cli
from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.planning import roofline, suggest
from memsearcher_jax.planning.roofline import Workload

V6E = roofline.Topology.of("v6e", (4, 8), range(32), range(4))
ONE_CARD = roofline.Topology.of("h200", (1,), range(1), range(1))


@pytest.fixture(scope="module")
def seven_b():
    return cli.load_preset("qwen7b")


def found(config, topology=V6E):
    return suggest.training_candidates(config, Workload(), topology)


def test_candidates_divide_and_are_sorted_by_tensor_axis_and_time(seven_b):
    candidates = found(seven_b)
    order = [(candidate.config.mesh.tensor, round(candidate.seconds, 3)) for candidate in candidates]
    assert order == sorted(order) and len(candidates) > 50
    for candidate in candidates:
        training = candidate.config.training
        shape = candidate.config.mesh.shape(32)
        assert shape["fsdp"] * shape["tensor"] == 32
        rows, odd_rows = divmod(training.minibatch_rows, training.grad_accum_steps * shape["fsdp"])
        assert rows in suggest.SIZES and not odd_rows
        assert candidate.rows_per_device == rows / shape["tensor"]


def test_weights_and_chunks_of_logits_must_divide(seven_b):
    narrow = replace(seven_b, model=replace(seven_b.model, kv_heads=2, heads=28))
    assert {candidate.config.mesh.tensor for candidate in found(narrow)} == {1, 2}
    assert {candidate.config.mesh.tensor for candidate in found(seven_b, ONE_CARD)} == {1}
    assert {candidate.config.training.seq_len for candidate in found(seven_b)} == {8_192, 16_384, 32_768}
    chunks = replace(seven_b, training=replace(seven_b.training, logit_chunk=16_384))
    assert {candidate.config.training.seq_len for candidate in found(chunks)} == {16_384, 32_768}
    chunks = replace(seven_b, training=replace(seven_b.training, logit_chunk=3_000))
    with pytest.raises(ValueError, match=r"multiple of training\.logit_chunk 3000: choose another"):
        found(chunks)


def test_rows_of_the_preset_are_among_the_candidates():
    """Those of `tiny_memagent` are one and a half times its longest context."""
    config = cli.load_preset("tiny_memagent")
    assert config.training.seq_len % config.sampling.context_tokens
    lengths = {candidate.config.training.seq_len for candidate in found(config, ONE_CARD)}
    assert lengths == {config.training.seq_len}


def test_on_few_devices_a_row_at_a_time_is_among_the_candidates(seven_b):
    """32 accumulation steps of 256 rows are 8 rows of one device: with 256 steps it holds one."""
    steps = {candidate.config.training.grad_accum_steps for candidate in found(seven_b, ONE_CARD)}
    assert steps == {64, 128, 256}


def test_a_mini_batch_that_the_devices_cannot_share_gets_rows_that_stay_empty(seven_b):
    few = replace(seven_b, training=replace(seven_b.training, minibatch_rows=4, grad_accum_steps=1))
    for candidate in found(few):
        training = candidate.config.training
        assert training.minibatch_rows >= 4 and training.grad_accum_steps == 1


def test_micro_batches_leave_as_many_updates_as_the_smallest_do(seven_b):
    """4,480 contexts of some 510 rows make seven updates: 64 devices with two rows each would make four."""
    chips = roofline.Topology.of("v5e", (8, 8), range(64), range(4))
    candidates = found(seven_b, chips)
    assert {roofline.updates_per_step(candidate.config, Workload()) for candidate in candidates} == {7}
    of_one = [candidate for candidate in candidates if candidate.config.mesh.tensor == 1]
    assert {(each.rows_per_device, each.row_tokens) for each in of_one} == {(1, 8_192)}
    assert any(candidate.rows_per_device == 1 and candidate.config.mesh.tensor == 2 for candidate in candidates)


def test_slices_share_no_weights(seven_b):
    """Rows are divided over the slices along the axis "data", weights inside each of them."""
    two = roofline.Topology.of("v6e", (4, 8), range(64), range(4), slices=2)
    shapes = [candidate.config.mesh.shape(64) for candidate in found(seven_b, two)]
    assert {shape["data"] for shape in shapes} == {2} and {shape["fsdp"] for shape in shapes} == {32, 16, 8}


def test_what_needs_more_than_a_compiled_candidate_that_does_not_fit_is_not_compiled(seven_b):
    """What a policy saves is known but for "none"; 20 GB are 4 too many."""
    candidates = [candidate for candidate in found(seven_b) if candidate.config.mesh.tensor == 1]
    of_one_row = {
        candidate.config.model.remat: candidate
        for candidate in candidates
        if candidate.rows_per_device == 1 and candidate.row_tokens == 8_192
    }
    some = of_one_row["save_qkv_attention"]
    less = of_one_row["save_attention"]
    saved = some.saved_bytes - less.saved_bytes
    too_large = suggest.TooLarge(some, 20e9)
    assert some.exceeds(16e9, [too_large]) and of_one_row["none"].exceeds(16e9, [too_large])
    assert less.exceeds(20e9 - saved - 1, [too_large]) and not less.exceeds(20e9 - saved + 1, [too_large])
    assert not less.exceeds(16e9, [suggest.TooLarge(of_one_row["none"], 99e9)])
    longer = next(each for each in candidates if each.row_tokens == 16_384 and each.saved_bytes > some.saved_bytes)
    shorter_but_smaller = replace(less, saved_bytes=longer.saved_bytes - 1)
    assert less.exceeds(16e9, [too_large])
    assert not shorter_but_smaller.exceeds(16e9, [suggest.TooLarge(longer, 99e9)]), "fewer temporary arrays"
    split = next(each for each in found(seven_b) if each.config.mesh.tensor == 2)
    assert not split.exceeds(16e9, [too_large])


def samplers(config, topology):
    found = suggest.sampler_candidates(config, topology)
    return [(each.sampling.tensor, each.sampling.slots, each.sampling.kv_tokens) for each in found]


def test_a_sampler_that_fits_stays_as_it_is(seven_b):
    assert samplers(seven_b, V6E)[0] == (4, 256, 524_288)


def test_a_sampler_keeps_its_share_of_the_cache_and_shares_its_weights_before_it_halves_its_slots(seven_b):
    """A host of v6e:2x4 has eight devices, whose weights have four heads of keys and values."""
    host = roofline.Topology.of("v6e", (2, 4), range(8), range(8))
    alone = replace(seven_b, sampling=replace(seven_b.sampling, tensor=2))
    found = samplers(alone, host)
    assert found[:2] == [(2, 256, 524_288), (2, 192, 393_216)]
    assert {tensor for tensor, _, _ in found} == {2, 4}
    slots = [slots for tensor, slots, _ in found if tensor == 2]
    assert slots == sorted(slots, reverse=True) and min(slots) == 8
    first_half = found.index((2, 128, 262_144))
    assert (4, 192, 393_216) in found[:first_half]
    assert (2, 8, 32_768) in found, "each of four replicas has room for a complete context"


def test_a_sampler_of_one_device_has_weights_of_its_own_and_slots_for_its_trajectories(seven_b):
    assert {tensor for tensor, _, _ in samplers(seven_b, ONE_CARD)} == {1}
    few = replace(seven_b, sampling=replace(seven_b.sampling, slots=32, kv_tokens=65_536))
    assert samplers(few, ONE_CARD)[0] == (1, 256, 524_288)
    fewer = replace(few, rl=replace(few.rl, prompts_per_step=16, group_size=8))
    assert samplers(fewer, ONE_CARD)[0] == (1, 128, 262_144)


def test_rows_save_what_their_remat_policy_names(seven_b):
    """In bfloat16: 28 layers of 8,192 tokens, one row per group; heads and features are split over the tensor axis."""

    def saved(remat, tensor):
        config = replace(seven_b, model=replace(seven_b.model, remat=remat), mesh=MeshConfig(1, -1, tensor))
        config = replace(config, training=replace(config.training, grad_accum_steps=config.training.minibatch_rows))
        return suggest.min_saved_bytes(config, 32) / (2 * 28 * 8_192)

    qkv = 28 * 128 + 2 * 4 * 128
    assert saved("nothing_saveable", 4) == 3_584
    assert saved("save_qkv_attention", 1) == 3_584 + 28 * 128 + qkv
    assert saved("save_qkv_attention_up", 2) == 3_584 + (28 * 128 + qkv + 18_944) / 2
    assert saved("none", 1) == 3_584 + 28 * 128 + qkv + 4 * 18_944
