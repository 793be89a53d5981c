import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from memsearcher_jax.sampling.config import SamplingConfig
from memsearcher_jax.sampling.logits import draw, largest_threshold, truncate


def kept_by_sorting(logits_V: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """The textbook rule, with a sort, in float64."""
    kept_V = np.ones(len(logits_V), bool)
    if 0 < top_k < len(logits_V):
        kept_V &= logits_V >= np.sort(logits_V)[-top_k]
    if top_p < 1.0:
        probability_V = np.where(kept_V, np.exp(logits_V - logits_V.max(), dtype=np.float64), 0.0)
        probability_V /= probability_V.sum()
        order = np.argsort(-probability_V, kind="stable")
        mass_before_V = np.cumsum(probability_V[order]) - probability_V[order]
        edge = probability_V[order][mass_before_V < top_p].min()
        kept_V &= probability_V >= edge
    return kept_V


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 1.0), (1, 1.0), (7, 1.0), (0, 0.9), (0, 0.05), (20, 0.7), (500, 0.99)]
)
def test_truncation_agrees_with_sorting(top_k, top_p):
    logits_SV = np.random.default_rng(0).normal(0, 3, (16, 200)).astype(np.float32)
    kept_SV = np.isfinite(truncate(jnp.array(logits_SV), top_k, top_p))
    np.testing.assert_array_equal(kept_SV, [kept_by_sorting(row, top_k, top_p) for row in logits_SV])


def test_ties_with_the_last_one_kept_are_kept():
    logits_SV = jnp.array([[1.0, 2.0, 2.0, 0.0]])
    assert np.isfinite(truncate(logits_SV, 1, 1.0)).tolist() == [[False, True, True, False]]


def test_a_sum_that_rounds_below_top_p_keeps_everything():
    logits_SV = jnp.zeros((1, 1000))
    assert np.isfinite(truncate(logits_SV, 0, float(np.nextafter(np.float32(1), np.float32(0))))).all()


numbers = st.floats(-(2.0**90), 2.0**90, width=32, allow_subnormal=False)


@settings(deadline=None, max_examples=50)
@given(
    hnp.arrays(np.float32, (3, 9), elements=st.floats(-(2.0**90), 2.0**90, width=32, allow_subnormal=False)),
    st.integers(1, 9),
)
def test_bisection_keeps_exactly_the_values_from_the_kth_largest_on(value_SV, k):
    """Compared by what is kept: XLA reads subnormal numbers as 0, so the edge itself may be one where 0 is meant."""
    found_S = largest_threshold(3, lambda edge_S: (jnp.array(value_SV) >= edge_S[:, None]).sum(-1) >= k)
    np.testing.assert_array_equal(
        jnp.array(value_SV) >= found_S[:, None], value_SV >= np.sort(value_SV, axis=-1)[:, -k, None]
    )


def test_draws_follow_the_truncated_distribution():
    """Chi-square against the renormalised probabilities; the bound is passed by chance once in 10,000 seeds."""
    logits_V = jnp.array([2.0, 1.5, 1.0, 0.0, -1.0, -3.0])
    rows = 20_000
    keys = jax.random.split(jax.random.key(0), rows)
    rule = SamplingConfig(temperature=0.7, top_k=4, top_p=0.97)
    token_S, _ = draw(jnp.broadcast_to(logits_V, (rows, 6)), keys, rule)
    kept_V = kept_by_sorting(np.array(logits_V) / 0.7, 4, 0.97)
    expected_V = np.where(kept_V, np.exp(np.array(logits_V) / 0.7), 0)
    expected_V = expected_V / expected_V.sum() * rows
    observed_V = np.bincount(token_S, minlength=6)
    assert observed_V[~kept_V].sum() == 0
    chi_square = ((observed_V - expected_V)[kept_V] ** 2 / expected_V[kept_V]).sum()
    assert chi_square < 21.1


def test_logprob_is_that_of_the_whole_vocabulary_at_the_temperature():
    logits_SV = jnp.array(np.random.default_rng(1).normal(size=(4, 30)), jnp.float32)
    keys = jax.random.split(jax.random.key(1), 4)
    token_S, logprob_S = draw(logits_SV, keys, SamplingConfig(temperature=0.5, top_k=3, top_p=0.8))
    expected_SV = jax.nn.log_softmax(logits_SV / 0.5)
    np.testing.assert_allclose(logprob_S, expected_SV[jnp.arange(4), token_S], rtol=1e-6)


def test_temperature_zero_is_the_likeliest_token_at_temperature_one():
    logits_SV = jnp.array([[0.0, 3.0, 1.0]])
    token_S, logprob_S = draw(logits_SV, jax.random.split(jax.random.key(2), 1), SamplingConfig(temperature=0.0))
    assert token_S.tolist() == [1]
    np.testing.assert_allclose(logprob_S, jax.nn.log_softmax(logits_SV)[0, 1:2], rtol=1e-6)


def test_one_row_does_not_see_another():
    logits_SV = jnp.array(np.random.default_rng(3).normal(size=(5, 40)), jnp.float32)
    keys = jax.random.split(jax.random.key(3), 5)
    rule = SamplingConfig(top_k=9, top_p=0.9)
    together_S, _ = draw(logits_SV, keys, rule)
    alone_S = [int(draw(logits_SV[row : row + 1], keys[row : row + 1], rule)[0][0]) for row in range(5)]
    assert together_S.tolist() == alone_S
