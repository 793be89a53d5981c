"""Two processes of four devices train as one process of eight does, and read each other's checkpoints."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from memsearcher_jax.model import sharding
from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.rl.hosts import Hosts
from memsearcher_jax.rl.part import Part, from_bytes, gather, to_bytes
from tests.rl import many_hosts


def run(processes: int, folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(many_hosts.__file__)
    words = (str(processes), str(folder))
    environment = {"PYTHONPATH": str(script.parents[2]), "PATH": "/usr/bin:/bin", "XLA_FLAGS": os.environ["XLA_FLAGS"]}
    hosts = [
        subprocess.Popen(
            [sys.executable, script, str(port), str(process), *words],
            cwd=script.parents[2],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(processes)
    ]
    try:
        for host in hosts:
            _, said = host.communicate(timeout=500)
            assert host.returncode == 0, said[-5_000:]
    finally:
        for host in hosts:
            host.kill()


@pytest.fixture(scope="module")
def alone():
    """State, numbers and arrays of one process."""
    mesh = sharding.make_mesh(many_hosts.MESH)
    state, numbers, _ = many_hosts.learn(Hosts(), mesh)
    return state, numbers, many_hosts.leaves(state, mesh)


@pytest.mark.slow
def test_two_hosts_learn_what_one_learns_and_read_each_others_checkpoints(alone, tmp_path, quick_to_compile):
    state, numbers, expected = alone
    many_hosts.save(tmp_path / "by_one", state)
    run(2, tmp_path)
    learned, other = (np.load(tmp_path / f"learned_{process}.npz") for process in range(2))
    for name in learned:
        np.testing.assert_array_equal(learned[name], other[name], err_msg=name)
    # Sums of the devices' gradients round otherwise between processes than within one, and Adam brings a gradient that
    # is small beside its terms to full size. 1e-6 is a thousandth of what a step may move a weight. All scores of a
    # query shift alike with a bias of keys, whose gradient is nothing but rounding: that is compared with the step.
    for name, value in expected.items():
        difference = np.abs(learned[name] - value)
        if name.endswith("['bk']"):
            assert difference.max() <= 1e-4, name
        else:
            assert difference.max() <= 1e-5, name
            assert np.mean(difference > 1e-6) < 1e-3, name
    for name, value in numbers.items():
        np.testing.assert_allclose(learned[f"number {name}"], value, rtol=1e-5, atol=1e-7, err_msg=name)
    assert numbers["updates"] > 1
    assert numbers["grad_norm"] > 0.1

    # Bit for bit, on another number of processes and on meshes of other shapes.
    for process in range(2):
        read = np.load(tmp_path / f"read_{process}.npz")
        for name, value in expected.items():
            np.testing.assert_array_equal(read[name], value, err_msg=name)
    for shape in ((1, 8, 1), (4, 1, 2)):
        mesh = sharding.make_mesh(MeshConfig(*shape))
        read = many_hosts.leaves(many_hosts.restore(tmp_path / "by_two", mesh), mesh)
        for name, value in read.items():
            np.testing.assert_array_equal(value, learned[name], err_msg=name)


def test_a_part_comes_over_as_it_was():
    part = many_hosts.part_of(0, 1)
    again = from_bytes(to_bytes(part))
    assert (again.facts, again.counters, again.seconds, again.packed) == (
        part.facts,
        part.counters,
        part.seconds,
        part.packed,
    )
    for one, other in zip(part.samples, again.samples, strict=True):
        assert one.advantage == other.advantage
        for name in ("ids", "logprobs", "sampled"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert from_bytes(to_bytes(Part([], [], waited=[0.5]))) == Part([], [], waited=[0.5])


def test_one_host_is_on_its_own():
    part = many_hosts.part_of(0, 1)
    assert gather(Hosts(), part) is part
    assert gather(Hosts(), None) is None
