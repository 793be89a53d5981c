"""Kernels, interpreted on a CPU, against the plain path; a wrong one must be found."""

import pytest
from jax.experimental.pallas import tpu

from memsearcher_jax.device_check.kernels import Kernels, Sizes, kernel_rows
from memsearcher_jax.ops import append_to_pages as appending
from memsearcher_jax.ops import paged_attention as paged
from memsearcher_jax.ops.splash_attention import splash_attention
from memsearcher_jax.sampling import draw_kernel

SIZES = Sizes(2, 1, 128, 256, row_tokens=128, contexts=4, context_pages=2, page_tokens=16)


def forgets_its_last_entry(q_AKQWH, pools, layer, page_table_AI, length_A):
    return paged.paged_attention(q_AKQWH, pools, layer, page_table_AI, length_A - 1)


def one_page_late(pools, new, page_table_AI, start_A, added_A):
    return appending.append_to_pages(pools, new, page_table_AI, start_A + 1, added_A)


def sees_the_next_token(q_BNTH, k_BKTH, v_BKTH, visible):
    return splash_attention(q_BNTH * 1.05, k_BKTH, v_BKTH, visible)


def ignores_top_p(logits_XSV, uniform_S, temperature_S, top_k_S, top_p_S):
    return draw_kernel.draw(logits_XSV, uniform_S, temperature_S, top_k_S, top_p_S * 0 + 1)


def does_not_compile(*_):
    raise NotImplementedError("Mosaic failed to compile TPU kernel")


def rows_with(kernels):
    with tpu.force_tpu_interpret_mode(True):
        return list(kernel_rows(SIZES, "cpu", kernels))


@pytest.mark.slow
def test_every_row_of_a_wrong_kernel_fails():
    rows = rows_with(Kernels(sees_the_next_token, forgets_its_last_entry, one_page_late, ignores_top_p))
    assert len(rows) == 11
    assert all(row.passed is False and "attention xla" in row.way_out for row in rows), rows


@pytest.mark.variant
def test_a_kernel_that_does_not_compile_fails_alone_with_its_message():
    rows = rows_with(Kernels(draw=does_not_compile))
    (row,) = (row for row in rows if row.passed is False)
    assert "Mosaic failed" in row.found and "sampling.attention xla" in row.way_out
