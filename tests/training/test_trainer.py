"""The trainer with log-probabilities of an inaccurate sampler."""

import gc
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memsearcher_jax.model import qwen, sharding
from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.training import update
from memsearcher_jax.training.config import TrainingConfig
from memsearcher_jax.training.objective import Grpo
from memsearcher_jax.training.packing import TrainingExample
from memsearcher_jax.training.trainer import check_offload, make_trainer
from tests.support import NANO
from tests.training.conftest import host_params

TRAINING = TrainingConfig(seq_len=32, minibatch_rows=2, logit_chunk=16, learning_rate=1e-3, kl_coefficient=0.0)
CONTEXTS, TOKENS = 10, 16  # two of them fill a row, four a mini-batch
OFF = 0.1  # nats


@pytest.fixture(scope="module")
def examples():
    """Contexts with the log-probabilities of the initial weights."""
    rng = np.random.default_rng(0)
    ids_BT = rng.integers(0, NANO.vocab_size, (CONTEXTS, TOKENS))
    position_BT, segment_BT = np.tile(np.arange(TOKENS), (CONTEXTS, 1)), np.ones_like(ids_BT)
    logits_BTV, _ = jax.jit(qwen.forward, static_argnums=1)(params(), NANO, ids_BT, position_BT, segment_BT)
    logprob_BTV = jax.nn.log_softmax(logits_BTV[:, :-1])
    logprob_BT = np.take_along_axis(np.asarray(logprob_BTV), ids_BT[:, 1:, None], axis=2)[..., 0]
    sampled_T = np.arange(TOKENS) > 2
    return [
        TrainingExample(ids_T, np.concatenate([[0], logprob_T]), sampled_T, float(rng.normal()))
        for ids_T, logprob_T in zip(ids_BT, logprob_BT, strict=True)
    ]


def params():
    """A new copy each time, because the first update donates it."""
    return jax.tree.map(jnp.array, host_params(NANO))


def wrong(examples):
    """The same from a sampler with errors of +OFF and -OFF at alternating tokens."""
    off_T = OFF * np.where(np.arange(TOKENS) % 2, 1, -1)
    return [replace(example, logprobs=example.logprobs + off_T) for example in examples]


def train_step(examples, **changes):
    """The metrics of one step over the examples: three mini-batches."""
    settings = replace(TRAINING, **changes)
    mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=1, tensor=1), jax.devices()[:2])
    with jax.set_mesh(mesh):
        trainer = make_trainer(NANO, settings, mesh, params(), method="grpo", temperature=1.0)
        state = update.init_state(params(), NANO, update.make_optimizer(settings), mesh)
        _, metrics = trainer.step(state, examples, np.random.default_rng(1), lambda message: None, 0)
    assert metrics["updates"] == 3
    return metrics


def assert_same_steps(one, other):
    """Compares metrics such as the norms of gradients and weights: Adam magnifies rounding errors of single weights."""
    for name in other:
        if not name.startswith("logprob_diff"):
            np.testing.assert_allclose(one[name], other[name], rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.fixture(scope="module")
def exact(examples):
    return train_step(examples)


def test_with_trainer_logprobs_errors_of_the_sampler_do_not_matter(examples, exact, compilations):
    with compilations() as compiled:
        metrics = train_step(wrong(examples), old_logprobs="trainer")
    assert compiled.count("jit(update)") == 1
    assert_same_steps(metrics, exact)
    assert metrics["logprob_diff_mean"] == pytest.approx(OFF, rel=1e-3)


def test_updates_with_non_finite_gradients_are_skipped_and_counted(examples, exact):
    """One context has a NaN advantage: its mini-batch is skipped and does not affect the metrics of the others."""
    metrics = train_step([*examples[:-1], replace(examples[-1], advantage=float("nan"))])
    assert (metrics["updates"], metrics["skipped_updates"]) == (3, 1)
    assert np.isfinite([value for name, value in metrics.items() if not name.startswith("logprob_diff")]).all()
    assert exact["skipped_updates"] == 0
    lost = train_step([replace(example, advantage=float("nan")) for example in examples])
    assert (lost["updates"], lost["skipped_updates"]) == (3, 3)
    assert not np.isfinite(lost["loss"])


def test_an_offloaded_reference_is_on_the_device_only_while_it_is_used(examples, quick_collections):
    """The metrics are those of a reference that stays there."""
    kept = train_step(examples, kl_coefficient=0.1)
    mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=1, tensor=1), jax.devices()[:2])
    with jax.set_mesh(mesh):
        settings = replace(TRAINING, kl_coefficient=0.1, offload_reference=True)
        trainer = make_trainer(NANO, settings, mesh, params(), method="grpo", temperature=1.0)
        state = update.init_state(params(), NANO, update.make_optimizer(settings), mesh)
        before, during = device_bytes(), []
        watched = replace(trainer, update=lambda *args: during.append(device_bytes()) or trainer.update(*args))
        _, metrics = watched.step(state, examples, np.random.default_rng(1), lambda message: None, 0)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(trainer.reference.params)} == {"pinned_host"}
    assert max(during) < before + 10_000 < before + sum(x.nbytes for x in jax.tree.leaves(trainer.reference.params))
    assert metrics == kept and metrics["kl"] > 0


@pytest.mark.parametrize(
    ("first_program", "changes"),
    [("update", {}), ("reference", {"kl_coefficient": 0.1}), ("trainer", {"old_logprobs": "trainer"})],
)
def test_rows_of_a_mini_batch_are_made_after_the_one_before_was_dispatched(examples, first_program, changes):
    """So the devices compute the first while the host makes the second: whatever the first program of a step is."""
    settings = replace(TRAINING, **changes)
    mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=1, tensor=1), jax.devices()[:2])
    events = []

    class Recorded(Grpo):
        def make_batch(self, rows):
            events.append("made")
            return super().make_batch(rows)

    def recorded(name, function):
        return lambda *args: (events.append(name), function(*args))[1]

    with jax.set_mesh(mesh):
        trainer = make_trainer(NANO, settings, mesh, params(), method="grpo", temperature=1.0)
        state = update.init_state(params(), NANO, update.make_optimizer(settings), mesh)
        trainer = replace(
            trainer,
            objective=Recorded(),
            update=recorded("update", trainer.update),
            logprob_fn=recorded("trainer", trainer.logprob_fn),
            reference=trainer.reference
            and replace(trainer.reference, logprob_fn=recorded("reference", trainer.reference.logprob_fn)),
        )
        trainer.step(state, examples, np.random.default_rng(1), lambda message: None, 0)
    assert events[:6] == ["made", first_program] * 3


def device_bytes():
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays() if x.sharding.memory_kind == "device")


def test_sequence_logprobs_are_those_of_the_trained_tokens(examples):
    mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=1, tensor=1), jax.devices()[:2])
    with jax.set_mesh(mesh):
        one = make_trainer(NANO, TRAINING, mesh, params(), method="sft", temperature=1.0)
        found = one.sequence_logprobs(params(), examples, np.random.default_rng(0))
    expected = [np.sum(example.logprobs[example.sampled]) for example in examples]
    np.testing.assert_allclose(sorted(found), sorted(expected), atol=1e-3)


def test_devices_without_pinned_host_memory_keep_the_reference():
    device = SimpleNamespace(device_kind="abacus", addressable_memories=lambda: [SimpleNamespace(kind="device")])
    mesh = SimpleNamespace(devices=np.array([device]))
    check_offload(TRAINING, mesh)
    with pytest.raises(ValueError, match="does not offer on abacus: set it to False"):
        check_offload(replace(TRAINING, offload_reference=True), mesh)
