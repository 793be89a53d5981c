"""A tiny model on one device and its engine, whose programs are compiled once for the tests of rollouts."""

from dataclasses import replace

import jax
import pytest

from memsearcher_jax.model import qwen, sharding
from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.sampling.engine import Engine
from tests.support import NANO, NANO_SAMPLING, byte_tokenizer


@pytest.fixture(scope="session")
def one_device():
    return sharding.make_mesh(MeshConfig(1, 1, 1), jax.devices()[:1])


@pytest.fixture(scope="session")
def engine(one_device):
    return Engine(NANO, replace(NANO_SAMPLING, context_tokens=160), byte_tokenizer().stop_ids, one_device)


@pytest.fixture(scope="session")
def params():
    return jax.jit(lambda key: qwen.init(key, NANO))(jax.random.key(0))
