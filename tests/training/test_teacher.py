"""A teacher's advantages and its divergence against formulas by hand."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from memsearcher_jax.model import lora, qwen, sharding
from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.training import update
from memsearcher_jax.training.config import TeacherConfig, TrainingConfig
from memsearcher_jax.training.packing import TrainingExample, pack
from memsearcher_jax.training.trainer import make_trainer
from tests.support import NANO

TRAINING = TrainingConfig(
    seq_len=48, minibatch_rows=2, logit_chunk=16, learning_rate=1e-3, kl_coefficient=0.0, entropy_coefficient=0.0
)
BIGGER = replace(NANO, embed_size=2 * NANO.embed_size, layers=NANO.layers + 1, vocab_size=NANO.vocab_size + 8)
PROMPT = (3, 1, 4, 1, 5)
NO_UPDATE = {"learning_rate": np.float32(1), "skipped": np.float32(0)}


@pytest.fixture(scope="module")
def examples():
    """Contexts that begin alike, of two trajectories: the first has a wrong answer."""
    rng = np.random.default_rng(0)

    def example(right, advantage, length):
        ids = (*PROMPT, *rng.integers(0, NANO.vocab_size, length))
        sampled = np.arange(len(ids)) > len(PROMPT) + 1
        logprobs = np.where(sampled, -rng.random(len(ids)) - 4, 0).astype(np.float32)
        return TrainingExample(ids, logprobs, sampled, advantage, correct=right)

    return [example(False, -1.0, 9), example(True, 1.0, 12), example(True, 1.0, 7), example(False, -1.0, 14)]


def params(model, seed=0):
    return jax.jit(qwen.init, static_argnums=1)(jax.random.key(seed), model)


def logprobs_of(model, weights, ids):
    """Of each token but the first."""
    return distributions_of(model, weights, ids)[np.arange(len(ids) - 1), ids[1:]]


def distributions_of(model, weights, ids):
    """Log-probabilities of all tokens in each place but the first, by one context's pass in a row of its own."""
    ids_BT, position_BT = np.zeros((1, TRAINING.seq_len), int), np.arange(TRAINING.seq_len)[None]
    ids_BT[0, : len(ids)] = ids
    segment_BT = np.int32(position_BT < len(ids))
    logits_BTV, _ = jax.jit(qwen.forward, static_argnums=1)(weights, model, ids_BT, position_BT, segment_BT)
    return np.asarray(jax.nn.log_softmax(logits_BTV[0]))[: len(ids) - 1]


def trained(examples, objective, teacher, model=None, weights=None, student=NANO, run=False, **changes):
    """(the advantages that one step trains on by example, its metrics); the update itself is replaced."""
    settings = replace(TRAINING, objective=objective, **changes)
    mesh, seen = sharding.make_mesh(MeshConfig(data=2, fsdp=1, tensor=1), jax.devices()[:2]), []
    with jax.set_mesh(mesh):
        base = params(NANO)
        other = (model, jax.device_put(weights, sharding.param_shardings(model, mesh))) if model else None
        settings_of = {"method": "grpo", "temperature": 1.0, "teacher": teacher, "teacher_model": other}
        trainer = make_trainer(student, settings, mesh, base, **settings_of)
        adapters = lora.init(jax.random.key(1), student) if student.lora_rank else base
        state = update.init_state(adapters, student, update.make_optimizer(settings), mesh)

        def spy(state, batch, *rest):
            seen.append(jax.device_get(batch))
            return trainer.update(state, batch, *rest) if settings.kl_coefficient or run else (state, NO_UPDATE)

        _, metrics = replace(trainer, update=spy).step(state, examples, np.random.default_rng(1), print, 0)
    assert all((batch.teacher_weight_BT is None) == (not teacher.top_k) for batch in seen)
    found = {}
    for batch in seen:
        for row, segment in {(row, batch.segment_BT[row, t]) for row, t in np.argwhere(batch.mask_BT)}:
            place = (row, batch.mask_BT[row] & (batch.segment_BT[row] == segment))
            found[tuple(batch.ids_BT[place].tolist())] = batch.advantage_BT[place]
    sampled = [tuple(np.array(example.ids)[np.array(example.sampled)].tolist()) for example in examples]
    return [found.get(ids) for ids in sampled], metrics


def expected(examples, weights, own, coefficient=1.0, on="all"):
    """own x advantage + coefficient x (teacher - policy), where the teacher teaches."""
    for example in examples:
        teacher = np.append(0, logprobs_of(BIGGER, weights, example.ids))
        pull = coefficient * (teacher - example.logprobs) * (on == "all" or not example.correct)
        yield (own * example.advantage + pull)[example.sampled]


@pytest.mark.parametrize(
    ("objective", "teacher"),
    [
        pytest.param("distill", TeacherConfig("big"), marks=pytest.mark.slow),
        ("grpo+distill", TeacherConfig("big", on="wrong", coefficient=0.5)),
    ],
)
def test_advantages_are_the_reverse_divergence_from_the_teacher(examples, objective, teacher):
    """A teacher of another size and a larger table. Contexts share their beginning in a row."""
    assert (pack(examples, 48, 2, np.random.default_rng(1)).position_BT[:, 20:] > 0).any()
    weights, own = params(BIGGER, 5), float(objective != "distill")
    found, metrics = trained(examples, objective, teacher, BIGGER, weights)
    by_hand = list(expected(examples, weights, own, teacher.coefficient, teacher.on))
    for one, other in zip(found, by_hand, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)
    taught = [example for example in examples if teacher.on == "all" or not example.correct]
    pulls = np.concatenate(list(expected(taught, weights, 0.0)))
    np.testing.assert_allclose(metrics["teacher_kl"], -pulls.mean(), rtol=1e-4)


@pytest.mark.parametrize(
    ("objective", "teacher"),
    [
        pytest.param("distill", TeacherConfig("big", top_k=3), marks=pytest.mark.slow),
        pytest.param("grpo+distill", TeacherConfig("big", top_k=3, on="wrong"), marks=pytest.mark.variant),
    ],
)
def test_the_forward_divergence_over_the_most_likely_tokens_is_a_loss(examples, objective, teacher):
    model = replace(BIGGER, vocab_size=NANO.vocab_size)
    weights = params(model, 5)
    changes = {"aggregate": "seq-mean-token-sum-norm", "norm_tokens": 1}
    _, metrics = trained(examples, objective, teacher, model, weights, run=True, **changes)
    divergence = []
    for example in examples:
        taught, own = distributions_of(model, weights, example.ids), distributions_of(NANO, params(NANO), example.ids)
        top = np.argsort(-taught)[:, :3]
        p, log_q = (np.take_along_axis(x, top, axis=1) for x in (np.exp(taught), own))
        if teacher.on == "all" or not example.correct:
            divergence.append(np.sum(p * (np.log(p) - log_q), axis=1)[example.sampled[1:]])
    divergence = np.concatenate(divergence)
    np.testing.assert_allclose(metrics["teacher_kl"], divergence.mean(), rtol=1e-4)
    np.testing.assert_allclose(metrics["loss"] - metrics["policy_loss"], divergence.sum(), rtol=1e-4)


def test_adapters_are_taught_and_the_divergence_is_that_from_the_teacher(examples):
    """New adapters change nothing, so that the policy is its base; the base is neither teacher nor reference."""
    student, weights = replace(NANO, lora_rank=2), params(BIGGER, 5)
    changes = {"kl_coefficient": 0.1, "offload_reference": True, "student": student}
    found, metrics = trained(examples, "distill", TeacherConfig("big"), BIGGER, weights, **changes)
    for one, other in zip(found, expected(examples, weights, 0.0), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)
    assert metrics["kl"] > 0.01
