"""Splitting, merging and looping over micro-batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memsearcher_jax.training.microbatches import merge, num_nonempty, scan_first, split


def test_merge_inverts_split():
    x_BT = np.arange(24).reshape(8, 3)
    parts = split(x_BT, 4)
    np.testing.assert_array_equal(parts[1], x_BT[1::4])
    np.testing.assert_array_equal(merge(parts), x_BT)


@pytest.mark.parametrize(
    ("holds", "expected"), [([1, 1, 1], 3), ([1, 1, 0], 2), ([0, 1, 0], 2), ([0, 0, 1], 3), ([0, 0, 0], 0), ([0], 1)]
)
def test_num_nonempty_counts_up_to_the_last_micro_batch_with_a_token(holds, expected):
    segment_nBT = np.zeros((len(holds), 2, 4), np.int32)
    segment_nBT[:, 1, 2] = holds
    assert num_nonempty(segment_nBT) == expected


@pytest.mark.parametrize("count", [0, 2, 3])
def test_scan_first_runs_only_the_first_entries(count):
    ran = []

    def step(total, part):
        jax.debug.callback(lambda x: ran.append(float(x)), part["x"][0])
        return total + part["x"].sum(), {"twice": 2 * part["x"]}

    x_nB = jnp.arange(1.0, 7).reshape(3, 2)
    ys = {"twice": jnp.zeros_like(x_nB)}
    total, out = jax.jit(lambda count: scan_first(step, jnp.float32(10), {"x": x_nB}, ys, count))(count)
    jax.effects_barrier()
    assert total == 10 + x_nB[:count].sum()
    np.testing.assert_array_equal(out["twice"], np.where(np.arange(3)[:, None] < count, 2 * x_nB, 0))
    assert sorted(ran) == x_nB[:count, 0].tolist()
