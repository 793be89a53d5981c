import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from memsearcher_jax.model import sharding
from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.sampling import draw_kernel, logits
from memsearcher_jax.sampling.draw_kernel import largest_threshold


def truncate(logits_SV, top_k, top_p):
    """One rule for all rows."""
    rows = logits_SV.shape[:1]
    return jax.jit(logits.truncate)(logits_SV, np.full(rows, top_k), np.full(rows, top_p))


def sample(logits_SV, key_S, temperature=1.0, top_k=0, top_p=1.0):
    """One rule for all rows."""
    rules_S = [np.full(logits_SV.shape[:1], rule) for rule in (temperature, top_k, top_p)]
    return sample_with_keys(logits_SV, key_S, *rules_S)


@jax.jit
def sample_with_keys(logits_SV, key_S, *rules_S):
    return logits.sample(logits_SV, jax.vmap(jax.random.uniform)(key_S), *rules_S)


@jax.jit
def kth_largest(value_SV, k):
    applies_S = jnp.ones(len(value_SV), bool)
    return largest_threshold(applies_S, lambda threshold_S: (value_SV >= threshold_S[:, None]).sum(-1) >= k)


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
    kept_SV = np.isfinite(truncate(logits_SV, top_k, top_p))
    np.testing.assert_array_equal(kept_SV, [kept_by_sorting(row, top_k, top_p) for row in logits_SV])


def test_a_sum_that_rounds_below_top_p_keeps_all_tokens():
    logits_SV = np.zeros((1, 1000))
    assert np.isfinite(truncate(logits_SV, 0, float(np.nextafter(np.float32(1), np.float32(0))))).all()


@settings(deadline=None, max_examples=50)
@given(
    hnp.arrays(np.float32, (3, 9), elements=st.floats(-(2.0**90), 2.0**90, width=32, allow_subnormal=False)),
    st.integers(1, 9),
)
def test_bisection_keeps_exactly_the_k_largest_values(value_SV, k):
    """Compares the kept values: XLA reads subnormal numbers as 0, so the threshold itself may be subnormal for 0."""
    kept_SV = jax.jit(jnp.greater_equal)(value_SV, kth_largest(value_SV, k)[:, None])
    np.testing.assert_array_equal(kept_SV, value_SV >= np.sort(value_SV, axis=-1)[:, -k, None])


def test_draws_follow_the_truncated_distribution():
    """Chi-square against the renormalised probabilities; chance exceeds the bound for one seed in 10,000."""
    logits_V = np.array([2.0, 1.5, 1.0, 0.0, -1.0, -3.0], np.float32)
    rows = 20_000
    keys = jax.random.split(jax.random.key(0), rows)
    token_S, _ = sample(np.broadcast_to(logits_V, (rows, 6)), keys, temperature=0.7, top_k=4, top_p=0.97)
    kept_V = kept_by_sorting(logits_V / 0.7, 4, 0.97)
    expected_V = np.where(kept_V, np.exp(logits_V / 0.7), 0)
    expected_V = expected_V / expected_V.sum() * rows
    observed_V = np.bincount(token_S, minlength=6)
    assert observed_V[~kept_V].sum() == 0
    chi_square = ((observed_V - expected_V)[kept_V] ** 2 / expected_V[kept_V]).sum()
    assert chi_square < 21.1


def test_logprobs_are_untruncated_at_the_sampling_temperature():
    logits_SV = np.random.default_rng(1).normal(size=(4, 30)).astype(np.float32)
    keys = jax.random.split(jax.random.key(1), 4)
    token_S, logprob_S = sample(logits_SV, keys, temperature=0.5, top_k=3, top_p=0.8)
    expected_SV = np.asarray(jax.nn.log_softmax(logits_SV / 0.5))
    np.testing.assert_allclose(logprob_S, expected_SV[np.arange(4), token_S], rtol=1e-6)


def test_temperature_zero_is_the_argmax_with_its_logprob_at_temperature_one():
    logits_SV = np.array([[0.0, 3.0, 1.0]])
    token_S, logprob_S = sample(logits_SV, jax.random.split(jax.random.key(2), 1), temperature=0.0)
    assert token_S.tolist() == [1]
    np.testing.assert_allclose(logprob_S, np.asarray(jax.nn.log_softmax(logits_SV))[0, 1:2], rtol=1e-6)


RULES = {
    "greedy": (0.0, 5, 0.5),
    "all": (1.0, 0, 1.0),
    "top_k": (0.7, 9, 1.0),
    "top_p": (1.3, 0, 0.8),
    "both": (1.0, 9, 0.9),
}


def rows_of_every_rule():
    """(logits_SV, key_S, temperature_S, top_k_S, top_p_S)."""
    logits_SV = np.random.default_rng(3).normal(0, 2, size=(8, 40)).astype(np.float32)
    rules_S = [np.tile(rule, 2)[:8] for rule in zip(*RULES.values(), strict=True)]
    return logits_SV, jax.random.split(jax.random.key(3), 8), *rules_S


def test_each_row_follows_its_own_rule_as_it_does_alone():
    logits_SV, key_S, *rules_S = rows_of_every_rule()
    together = sample_with_keys(logits_SV, key_S, *rules_S)
    alone = [
        sample(logits_SV[i : i + 1], key_S[i : i + 1], *(float(rule_S[i]) for rule_S in rules_S)) for i in range(8)
    ]
    for drawn_S, drawn_alone in zip(together, zip(*alone, strict=True), strict=True):
        np.testing.assert_array_equal(drawn_S, np.concatenate(drawn_alone))


@pytest.mark.parametrize("sizes", [(1, 1, 4), (2, 1, 2), (1, 1, 8)])
def test_devices_that_share_the_vocabulary_exchange_logits_once(sizes):
    """The draws are the same, and the compiled program reduces nothing over devices."""
    logits_SV, key_S, *rules_S = rows_of_every_rule()
    arguments = (logits_SV, jax.vmap(jax.random.uniform)(key_S), *rules_S)
    expected = jax.jit(logits.sample)(*arguments)
    mesh = sharding.make_mesh(MeshConfig(*sizes), jax.devices()[: math.prod(sizes)])
    logits_SV = jax.device_put(arguments[0], sharding.named_sharding(mesh, ("batch", "vocab")))
    with jax.set_mesh(mesh):
        compiled = jax.jit(logits.sample).lower(logits_SV, *arguments[1:]).compile()
        drawn = compiled(logits_SV, *arguments[1:])
    for drawn_S, expected_S in zip(drawn, expected, strict=True):
        np.testing.assert_array_equal(drawn_S, expected_S)
    text = compiled.as_text()
    assert "all-reduce" not in text
    assert text.count(" all-to-all(") == 1


@pytest.mark.parametrize(("X", "V"), [(1, 300), (2, 128)])
def test_the_kernel_draws_the_same(X, V, interpreted):
    """With columns and rows that fill no register, ties of the largest logit, and rows that are not finite."""
    rng = np.random.default_rng(4)
    S, bad = 12, [10, 11]
    logits_SV = rng.normal(0, 3, (S, X * V)).astype(np.float32)
    logits_SV[0, [7, X * V - 9]] = 99
    logits_SV[bad[0], 5], logits_SV[bad[1], 100] = np.nan, np.inf
    rules_S = [np.resize(rule, S) for rule in zip(*RULES.values(), strict=True)]
    uniform_S = rng.random(S).astype(np.float32)
    uniform_S[3] = 1 - 2.0**-24
    token_S, logprob_S = jax.jit(logits.draw)(logits_SV, uniform_S, *rules_S)
    kernel = jax.jit(draw_kernel.draw)
    drawn = [np.asarray(x) for x in kernel(np.moveaxis(logits_SV.reshape(S, X, V), 1, 0), uniform_S, *rules_S)]
    np.testing.assert_array_equal(drawn[0][: bad[0]], token_S[: bad[0]])
    np.testing.assert_allclose(drawn[1], logprob_S, rtol=1e-5)
    assert np.isnan(drawn[1][bad[0] :]).all()
