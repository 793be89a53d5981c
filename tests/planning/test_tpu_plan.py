"""Candidates for a slice, and their order."""

import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.planning import roofline, tpu_plan
from memsearcher_jax.planning.roofline import Workload
from memsearcher_jax.planning.tpu_plan import Candidate

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
V6E = roofline.make_slice("v6e", (4, 8), 32, 8)


@pytest.fixture(scope="module")
def seven_b():
    return runpy.run_path(str(CONFIGS / "qwen7b.py"))["qwen7b"]()


def test_candidates_divide_and_are_sorted_by_time(seven_b):
    candidates = tpu_plan.candidates(seven_b, Workload(), V6E)
    seconds = [round(candidate.seconds, 3) for candidate in candidates]
    assert seconds == sorted(seconds) and len(candidates) > 50
    for candidate in candidates:
        mesh, training = candidate.mesh, candidate.apply(seven_b).training
        assert mesh.data * mesh.fsdp * mesh.tensor == 32
        assert training.grad_accum_steps * candidate.rows * mesh.data * mesh.fsdp == training.minibatch_rows


def test_recomputation_costs_time(seven_b):
    seconds = {(c.mesh.fsdp, c.remat, c.rows): c.seconds for c in tpu_plan.candidates(seven_b, Workload(), V6E)}
    by_remat = [seconds[32, remat, 1] for remat in tpu_plan.REMAT]
    assert by_remat == sorted(set(by_remat))


def test_the_tensor_axis_is_at_most_the_kv_heads(seven_b):
    narrow = replace(seven_b, model=replace(seven_b.model, kv_heads=2, heads=28))
    assert {candidate.mesh.tensor for candidate in tpu_plan.candidates(narrow, Workload(), V6E)} == {1, 2}


def test_candidates_that_certainly_need_more_memory_are_known():
    mesh = MeshConfig(1, 32, 1)
    refused = Candidate(mesh, "save_attention", 2, 1.0)
    assert Candidate(mesh, "save_qkv_attention", 2, 1.0).needs_more_memory_than(refused)
    assert Candidate(mesh, "save_attention", 4, 1.0).needs_more_memory_than(refused)
    assert not Candidate(mesh, "nothing_saveable", 4, 1.0).needs_more_memory_than(refused)
    assert not Candidate(mesh, "none", 1, 1.0).needs_more_memory_than(refused)
    assert not Candidate(MeshConfig(2, 16, 1), "none", 4, 1.0).needs_more_memory_than(refused)
