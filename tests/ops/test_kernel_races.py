"""The TPU kernels on a simulated TPU: copies that wait for their semaphores, memory that begins as NaN, and races.

The tests of their results are repeated there. A kernel that races on purpose shows that a race would be found.
"""

import contextlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from memsearcher_jax.ops import paged_attention as kernels
from memsearcher_jax.ops.splash_attention import splash_attention
from tests.ops import test_attention, test_paged_attention
from tests.sampling import test_logits

pytestmark = pytest.mark.slow
COPIES = ("eager", "on_wait")


@contextlib.contextmanager
def simulated(copies):
    """Kernels run on a simulated TPU, whose copies begin at once or as late as they may."""
    parameters = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", dma_execution_mode=copies)
    pltpu.reset_tpu_interpret_mode_state()
    try:
        with pltpu.force_tpu_interpret_mode(parameters):
            yield
    finally:
        pltpu.reset_tpu_interpret_mode_state()


def raced() -> bool:
    """Whether the last kernel had a race."""
    return interpret_pallas_call.races.races_found


@pytest.fixture
def random():
    rng = np.random.default_rng(0)
    return lambda *shape: rng.normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("heads", ["two", "full"])
@pytest.mark.parametrize("lengths", ["ragged", "empty_groups"])
def test_attention_to_pages_does_not_race(copies, int8, heads, lengths, random, monkeypatch):
    monkeypatch.setattr(kernels, "BLOCK_ENTRIES", 2 * test_paged_attention.PAGE)
    shape = test_paged_attention.HEADS[heads]
    read = test_paged_attention.LENGTHS[lengths]
    with simulated(copies):
        attention = jax.jit(partial(kernels.paged_attention))
        test_paged_attention.test_attention_reads_the_pages_of_each_chunk(shape, read, int8, random, attention)
        assert not raced()


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("heads", ["two", "full"])
def test_decoding_does_not_race(copies, int8, heads, random):
    with simulated(copies):
        test_paged_attention.test_decoding_also_reads_the_decode_buffer_and_its_own_token(heads, int8, random)
        assert not raced()


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(("K", "H"), [(2, 16), (1, 128)])
@pytest.mark.parametrize(
    ("W", "starts", "added"), [(6, (0, 6, 13, 5), (6, 5, 6, 0)), (20, (0, 20, 3, 17), (20, 3, 19, 20))]
)
def test_appending_does_not_race(copies, int8, K, H, W, starts, added, random):
    with simulated(copies):
        append = test_paged_attention.test_chunks_are_appended_exactly_and_nothing_else_changes
        append(K, H, W, starts, added, int8, random)
        assert not raced()


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize(("X", "V"), [(1, 300), (2, 128)])
def test_drawing_does_not_race(copies, X, V):
    with simulated(copies):
        test_logits.test_the_kernel_draws_the_same(X, V, None)
        assert not raced()


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("shared", [0, 0.5])
def test_packed_attention_does_not_race_forward_and_backward(copies, shared):
    with simulated(copies):
        row = test_attention.make_row(256, B=1, N=2, H=128, shared=shared)
        # Kernels run on after they are dispatched, and the state of the simulation may be reset only after them.
        out, dqkv = jax.block_until_ready(test_attention.gradients(splash_attention, row))
        assert not raced()
    expected_out, expected_dqkv = test_attention.dense_gradients(row)
    np.testing.assert_allclose(out, expected_out, atol=1e-5)
    for gradient, expected in zip(dqkv, expected_dqkv, strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=2e-5)


def read_too_early(x_hbm, out_ref, buffer, semaphore, *, waits):
    """Copies the input, and reads the copy before or after it is complete."""
    copy = pltpu.make_async_copy(x_hbm, buffer, semaphore)
    copy.start()
    if waits:
        copy.wait()
    out_ref[...] = buffer[...] + 1
    if not waits:
        copy.wait()


@pytest.mark.parametrize("waits", [True, False])
def test_a_kernel_that_reads_a_copy_too_early_is_found(waits):
    with simulated("on_wait"):
        call = pl.pallas_call(
            partial(read_too_early, waits=waits),
            out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32), pltpu.SemaphoreType.DMA],
        )
        out = np.asarray(jax.jit(call)(jnp.ones((8, 128))))
        assert raced() is not waits
    assert np.array_equal(out, np.full((8, 128), 2.0)) is waits
