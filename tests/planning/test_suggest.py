"""Candidates for a slice, and their order."""

from dataclasses import replace

import pytest

from memsearcher_jax.launch import cli
from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.planning import roofline, suggest
from memsearcher_jax.planning.roofline import Workload
from memsearcher_jax.planning.suggest import Candidate

V6E = roofline.Topology.of("v6e", (4, 8), range(32), range(4))


@pytest.fixture(scope="module")
def seven_b():
    return cli.load_preset("qwen7b")


def found(config):
    return suggest.candidates(config, Workload(), V6E)


def test_candidates_divide_and_are_sorted_by_tensor_axis_and_time(seven_b):
    candidates = found(seven_b)
    order = [(one.config.mesh.tensor, round(one.seconds, 3)) for one in candidates]
    assert order == sorted(order) and len(candidates) > 50
    for one in candidates:
        training = one.config.training
        assert one.config.mesh.fsdp * one.config.mesh.tensor == 32
        assert training.grad_accum_steps * one.rows * one.config.mesh.fsdp == training.minibatch_rows
        assert f"--training.grad_accum_steps {training.grad_accum_steps}" in str(one)


def test_recomputation_costs_time(seven_b):
    seconds = {
        one.config.model.remat: one.seconds
        for one in found(seven_b)
        if (one.config.mesh.tensor, one.config.training.seq_len, one.rows) == (1, 8_192, 1)
    }
    by_remat = [seconds[remat] for remat in suggest.REMAT]
    assert by_remat == sorted(set(by_remat))


def test_weights_and_chunks_of_logits_must_divide(seven_b):
    narrow = replace(seven_b, model=replace(seven_b.model, kv_heads=2, heads=28))
    assert {one.config.mesh.tensor for one in found(narrow)} == {1, 2}
    assert {one.config.training.seq_len for one in found(seven_b)} == {8_192, 16_384, 32_768}
    chunks = replace(seven_b, training=replace(seven_b.training, logit_chunk=16_384))
    assert {one.config.training.seq_len for one in found(chunks)} == {16_384, 32_768}


@pytest.mark.parametrize(
    ("tensor", "remat", "seq_len", "rows", "more"),
    [
        (1, "save_qkv_attention", 8_192, 2, True),
        (1, "save_attention", 8_192, 4, True),
        (1, "save_attention", 16_384, 1, True),
        (1, "save_attention", 8_192, 1, False),
        (1, "nothing_saveable", 8_192, 4, False),
        (1, "none", 8_192, 1, False),
        (2, "none", 8_192, 4, False),
    ],
)
def test_candidates_that_certainly_need_more_memory_are_known(tensor, remat, seq_len, rows, more, seven_b):
    def candidate(tensor, remat, seq_len, rows):
        model, training = replace(seven_b.model, remat=remat), replace(seven_b.training, seq_len=seq_len)
        mesh = MeshConfig(1, 32 // tensor, tensor)
        return Candidate(replace(seven_b, mesh=mesh, model=model, training=training), rows, 1.0)

    refused = candidate(1, "save_attention", 8_192, 2)
    assert candidate(tensor, remat, seq_len, rows).needs_more_memory_than(refused) == more


def test_rows_save_what_their_remat_policy_names(seven_b):
    """In bfloat16: 28 layers of 8,192 tokens; heads and features are split over the tensor axis."""

    def saved(remat, tensor):
        config = replace(seven_b, model=replace(seven_b.model, remat=remat), mesh=MeshConfig(1, -1, tensor))
        return suggest.min_row_bytes(config) / (2 * 28 * 8_192)

    qkv = 28 * 128 + 2 * 4 * 128
    assert saved("nothing_saveable", 4) == 3_584
    assert saved("save_qkv_attention", 1) == 3_584 + 28 * 128 + qkv
    assert saved("save_qkv_attention_up", 2) == 3_584 + (28 * 128 + qkv + 18_944) / 2
    assert saved("none", 1) == 3_584 + 28 * 128 + qkv + 4 * 18_944
