"""Candidates for a slice, and their order."""

from dataclasses import replace

import pytest

from memsearcher_jax.launch import cli
from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.planning import roofline, suggest
from memsearcher_jax.planning.roofline import Workload

V6E = roofline.Topology.of("v6e", (4, 8), range(32), range(4))


@pytest.fixture(scope="module")
def seven_b():
    return cli.load_preset("qwen7b")


def found(config, topology=V6E):
    return suggest.candidates(config, Workload(), topology)


def test_candidates_divide_and_are_sorted_by_tensor_axis_and_time(seven_b):
    candidates = found(seven_b)
    order = [(one.config.mesh.tensor, round(one.seconds, 3)) for one in candidates]
    assert order == sorted(order) and len(candidates) > 50
    for one in candidates:
        training = one.config.training
        assert one.config.mesh.fsdp * one.config.mesh.tensor == 32
        rows, odd_rows = divmod(training.minibatch_rows, training.grad_accum_steps * one.config.mesh.fsdp)
        assert rows in suggest.SIZES and not odd_rows


def test_weights_and_chunks_of_logits_must_divide(seven_b):
    narrow = replace(seven_b, model=replace(seven_b.model, kv_heads=2, heads=28))
    assert {one.config.mesh.tensor for one in found(narrow)} == {1, 2}
    one_card = roofline.Topology.of("h200", (1,), range(1), range(1))
    assert {one.config.mesh.tensor for one in found(seven_b, one_card)} == {1}
    assert {one.config.training.seq_len for one in found(seven_b)} == {8_192, 16_384, 32_768}
    chunks = replace(seven_b, training=replace(seven_b.training, logit_chunk=16_384))
    assert {one.config.training.seq_len for one in found(chunks)} == {16_384, 32_768}


def test_a_mini_batch_that_the_devices_cannot_share_is_no_lack_of_memory(seven_b):
    few = replace(seven_b, training=replace(seven_b.training, minibatch_rows=4, grad_accum_steps=1))
    with pytest.raises(ValueError, match=r"choose training\.minibatch_rows that 32 devices can share: a multiple"):
        found(few)


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
