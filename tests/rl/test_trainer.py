"""The trainer where the sampler's log-probabilities are not quite its own."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from memsearcher_jax.config import RunConfig
from memsearcher_jax.model import qwen, sharding
from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.rl.trainer import make_trainer
from memsearcher_jax.testing import NANO
from memsearcher_jax.training import update
from memsearcher_jax.training.config import TrainingConfig
from memsearcher_jax.training.rows import Sample

TRAINING = TrainingConfig(row_tokens=32, rows_per_update=2, logit_chunk=16, learning_rate=1e-3, kl_coefficient=0.0)
CONTEXTS, TOKENS = 10, 16  # two of them fill a row, four a mini-batch
OFF = 0.1  # nats


@pytest.fixture(scope="module")
def samples():
    """Contexts with the log-probabilities of the very weights that `learn` starts from."""
    rng = np.random.default_rng(0)
    ids_BT = rng.integers(0, NANO.vocab_size, (CONTEXTS, TOKENS))
    position_BT, segment_BT = np.tile(np.arange(TOKENS), (CONTEXTS, 1)), np.ones_like(ids_BT)
    logits_BTV, _ = jax.jit(qwen.forward, static_argnums=1)(params(), NANO, ids_BT, position_BT, segment_BT)
    logprob_BTV = jax.nn.log_softmax(logits_BTV[:, :-1])
    logprob_BT = np.take_along_axis(np.asarray(logprob_BTV), ids_BT[:, 1:, None], axis=2)[..., 0]
    sampled_T = np.arange(TOKENS) > 2
    return [
        Sample(ids_T, np.concatenate([[0], logprob_T]), sampled_T, float(rng.normal()))
        for ids_T, logprob_T in zip(ids_BT, logprob_BT, strict=True)
    ]


def params():
    return qwen.init(jax.random.key(0), NANO)


def wrong(samples):
    """The same from a sampler that is off by OFF at every token, up and down in turn."""
    off_T = OFF * np.where(np.arange(TOKENS) % 2, 1, -1)
    return [replace(sample, logprobs=sample.logprobs + off_T) for sample in samples]


def learn(samples, **changes):
    """The numbers of one pass over the samples: three mini-batches."""
    config = replace(RunConfig(), model=NANO, training=replace(TRAINING, **changes))
    mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=1, tensor=1), jax.devices()[:2])
    with jax.set_mesh(mesh):
        trainer = make_trainer(config, mesh, params())
        state = update.init_state(params(), NANO, update.make_optimizer(config.training), mesh)
        _, numbers = trainer.learn(state, samples, np.random.default_rng(1), lambda text: None)
    assert numbers["updates"] == 3
    return numbers


def assert_same_steps(one, other):
    """The norms of gradients and weights among them; Adam magnifies roundings, so single weights are not compared."""
    for name in other:
        if not name.startswith("logprob_difference"):
            np.testing.assert_allclose(one[name], other[name], rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.fixture(scope="module")
def exact(samples):
    return learn(samples)


def test_log_probabilities_of_its_own_make_the_samplers_not_matter(samples, exact):
    numbers = learn(wrong(samples), old_logprobs="trainer")
    assert_same_steps(numbers, exact)
    assert numbers["old_logprobs_recomputed"] == 1
    assert numbers["logprob_difference"] == pytest.approx(OFF, rel=1e-3)


def test_a_sampler_that_agrees_is_believed(samples, exact):
    numbers = learn(samples, old_logprobs="checked", old_logprob_threshold=OFF / 2)
    assert_same_steps(numbers, exact)
    assert numbers["old_logprobs_recomputed"] == 0
    assert numbers["logprob_difference_max"] < 1e-4


def test_a_sampler_that_does_not_agree_is_not_believed_and_its_draws_are_weighted(samples, exact, compilations):
    settings = {"old_logprobs": "checked", "old_logprob_threshold": OFF / 2, "importance_cap": 1.05}
    with compilations() as compiled:
        numbers = learn(wrong(samples), **settings)
    assert compiled.count("jit(update)") == 1
    assert numbers["old_logprobs_recomputed"] == 1
    # Of 13 trained tokens in a context the 7 at odd places are weighted exp(-OFF), the others would be exp(OFF).
    expected = (7 * np.exp(-OFF) + 6 * 1.05) / 13
    assert numbers["importance_mean"] == pytest.approx(expected, rel=1e-4)
    assert numbers["importance_capped"] == pytest.approx(6 / 13)
    assert numbers["grad_norm"] != pytest.approx(exact["grad_norm"], rel=1e-2)


def test_a_gradient_that_is_not_finite_is_left_out_and_counted(samples, exact):
    """One context has an advantage that is no number: its mini-batch changes nothing, and hides no other's numbers."""
    numbers = learn([*samples[:-1], replace(samples[-1], advantage=float("nan"))])
    assert (numbers["updates"], numbers["skipped"]) == (3, 1)
    assert numbers["skipped_last"] in (0, 1)
    assert np.isfinite([value for name, value in numbers.items() if not name.startswith("logprob_difference")]).all()
    assert (exact["skipped"], exact["skipped_last"]) == (0, 0)
    lost = learn([replace(sample, advantage=float("nan")) for sample in samples])
    assert (lost["updates"], lost["skipped"], lost["skipped_last"]) == (3, 3, 3)
    assert not np.isfinite(lost["loss"])
