"""What may be chosen for a slice, and in which order."""

import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.rl import roofline, suggest
from memsearcher_jax.rl.roofline import Load
from memsearcher_jax.rl.suggest import Choice

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
V6E = roofline.slice_of("v6e", (4, 8), 32, 8)


@pytest.fixture(scope="module")
def seven_b():
    return runpy.run_path(str(CONFIGS / "qwen7b.py"))["qwen7b"]()


def test_choices_divide_and_are_sorted(seven_b):
    found = suggest.choices(seven_b, Load(), V6E)
    seconds = [one.seconds for one in found]
    assert seconds == sorted(seconds) and len(found) > 50
    for one in found:
        assert one.mesh.data * one.mesh.fsdp * one.mesh.tensor == 32
        training = one.applied(seven_b).training
        assert training.accumulate * one.rows * one.mesh.data * one.mesh.fsdp == training.rows_per_update


def test_what_is_computed_again_costs_time(seven_b):
    found = {(one.remat, one.rows): one.seconds for one in suggest.choices(seven_b, Load(), V6E) if one.mesh.fsdp == 32}
    assert found["none", 1] < found["projections", 1] < found["attention", 1] < found["full", 1]


def test_kv_heads_bound_the_tensor_axis(seven_b):
    narrow = replace(seven_b, model=replace(seven_b.model, kv_heads=2, heads=28))
    assert {one.mesh.tensor for one in suggest.choices(narrow, Load(), V6E)} == {1, 2}


def test_what_needs_more_than_a_refused_choice_is_not_tried():
    mesh = MeshConfig(1, 32, 1)
    refused = Choice(mesh, "attention", 2, 1.0)
    assert Choice(mesh, "projections", 2, 1.0).needs_more_than(refused)
    assert Choice(mesh, "attention", 4, 1.0).needs_more_than(refused)
    assert not Choice(mesh, "full", 4, 1.0).needs_more_than(refused)
    assert not Choice(mesh, "none", 1, 1.0).needs_more_than(refused)
    assert not Choice(MeshConfig(2, 16, 1), "none", 4, 1.0).needs_more_than(refused)
