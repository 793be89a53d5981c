"""Two processes of four devices train as one process of eight devices, and restore checkpoints of each other."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from memsearcher_jax.hosts.distributed import Hosts
from memsearcher_jax.hosts.ending import RunEnded
from memsearcher_jax.model import sharding
from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.rl.batch import RolloutBatch, concatenate, exchange, from_bytes, to_bytes
from memsearcher_jax.rl.metrics import RolloutStats
from memsearcher_jax.types import ScoredTrajectory
from tests.rl import many_hosts
from tests.rl.processes import run_hosts


@pytest.fixture(scope="module")
def single_process():
    """State, metrics and arrays of one process."""
    mesh = sharding.make_mesh(many_hosts.MESH)
    state, metrics, _ = many_hosts.train(Hosts(), mesh)
    return state, metrics, many_hosts.leaves(state, mesh)


@pytest.mark.slow
def test_two_hosts_train_as_one_and_checkpoints_are_interchangeable(single_process, tmp_path, fast_compile):
    state, metrics, expected = single_process
    many_hosts.save(tmp_path / "by_one_process", state)
    run_hosts(Path(many_hosts.__file__), 2, 2, tmp_path)
    learned, other = (np.load(tmp_path / f"learned_{process}.npz") for process in range(2))
    for name in learned:
        np.testing.assert_array_equal(learned[name], other[name], err_msg=name)
    # Gradient sums round differently between processes than within one, and Adam scales gradients that are small
    # relative to their terms to full size. 1e-6 is a thousandth of the largest step of a weight. A key bias shifts all
    # scores of a query equally, so its gradient is only rounding error: its tolerance is the size of a step.
    for name, value in expected.items():
        difference = np.abs(learned[name] - value)
        if name.endswith("['bk']"):
            assert difference.max() <= 1e-4, name
        else:
            assert difference.max() <= 1e-5, name
            assert np.mean(difference > 1e-6) < 1e-3, name
    for name, value in metrics.items():
        np.testing.assert_allclose(learned[f"metric {name}"], value, rtol=1e-5, atol=1e-7, err_msg=name)
    assert metrics["updates"] > 1
    assert metrics["grad_norm"] > 0.1

    # Restoring is bit-identical with another number of processes and other mesh shapes.
    for process in range(2):
        read = np.load(tmp_path / f"read_{process}.npz")
        for name, value in expected.items():
            np.testing.assert_array_equal(read[name], value, err_msg=name)
        moved = np.load(tmp_path / f"moved_{process}.npz")  # what both wrote, by both, on another mesh
        for name in expected:
            np.testing.assert_array_equal(moved[name], learned[name], err_msg=name)
    for shape in ((1, 8, 1), (4, 1, 2)):
        mesh = sharding.make_mesh(MeshConfig(*shape))
        read = many_hosts.leaves(many_hosts.restore(tmp_path / "by_two_processes", mesh), mesh)
        for name, value in read.items():
            np.testing.assert_array_equal(value, learned[name], err_msg=name)


def test_a_batch_round_trips_through_bytes():
    batch = many_hosts.make_batch(0, 1)
    again = from_bytes(to_bytes(batch))
    assert (again.summaries, again.stats) == (batch.summaries, batch.stats)
    for example, other in zip(batch.examples, again.examples, strict=True):
        assert (example.advantage, example.number) == (other.advantage, other.number)
        for name in ("ids", "logprobs", "sampled"):
            np.testing.assert_array_equal(getattr(example, name), getattr(other, name))
    empty = RolloutBatch([], [], RolloutStats(search_latencies=(0.5,)))
    assert from_bytes(to_bytes(empty)) == empty
    scored = [ScoredTrajectory(None, 1.0)]
    assert exchange(Hosts(), replace(empty, scored=scored)).scored == scored
    assert concatenate([replace(empty, scored=scored), replace(empty, scored=scored)]).scored == 2 * scored


def test_exchange_of_a_single_host_is_the_identity_or_its_end():
    batch, hosts = many_hosts.make_batch(0, 1), Hosts()
    assert exchange(hosts, batch) is batch
    with hosts.guarded():
        raise TimeoutError("no answer")
    with pytest.raises(RunEnded, match=r"^TimeoutError: no answer$"):
        exchange(hosts, None)
