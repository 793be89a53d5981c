"""GSPO's ratio against its formulas written as loops over sequences, value and gradient."""

import jax
import numpy as np
import pytest

from memsearcher_jax.training import grpo

CLIP = {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 3.0}
# Per sequence: advantage, log-ratio of each token, and which tokens are trained. Between them: inside the clip range,
# clipped above and below, on the side where clipping does not act, beyond the dual clip, and one token only.
SEQUENCES = [
    (1.0, [9.0, 0.1, 0.2, -0.1], [0, 1, 1, 1]),
    (2.0, [0.0, 0.9, 0.1], [0, 1, 1]),
    (-1.5, [0.0, -0.9, 0.3, 9.0], [0, 1, 1, 0]),
    (-1.0, [0.0, 0.8, 0.4], [0, 1, 1]),
    (0.5, [0.0, -1.0, -2.0], [0, 1, 1]),
    (-0.7, [0.0, 1.5, 1.6, 1.1], [0, 1, 1, 1]),
    (1.2, [0.0, 0.05], [0, 1]),
]


def by_hand():
    """(loss of each sequence, its gradient by the sequence's tokens) as arXiv 2507.18071 defines them, section 4.

    s = (p(y) / p_old(y))^(1 / |y|); where the clip does not decide, the gradient of -s A by log p(y_t) is -s A / |y|.
    """
    losses, gradients = [], []
    for advantage, log_ratio, trained in SEQUENCES:
        trained = np.array(trained, bool)
        length = trained.sum()
        s = np.prod(np.exp(np.array(log_ratio)[trained])) ** (1 / length)
        free, bounded = -advantage * s, -advantage * np.clip(s, 1 - CLIP["clip_low"], 1 + CLIP["clip_high"])
        loss, moves = max(free, bounded), free >= bounded
        if advantage < 0 and loss > -advantage * CLIP["dual_clip"]:
            loss, moves = -advantage * CLIP["dual_clip"], False
        losses.append(loss)
        gradients.append(np.where(trained, -s * advantage / length if moves else 0, 0))
    return np.array(losses), gradients


PLACES = [(0, 0, 1), (0, 4, 2), (1, 0, 1), (1, 4, 2), (1, 7, 3), (2, 0, 1), (2, 4, 2)]  # row, start, segment
SHAPE = 3, 11


def loss_and_gradient(aggregate):
    """(loss, metrics, gradient of each sequence) of the sequences in packed rows, with NaN elsewhere."""
    arrays = {name: np.full(SHAPE, np.nan, np.float32) for name in ("log_ratio", "advantage")}
    arrays |= {name: np.zeros(SHAPE, np.int32) for name in ("mask", "segment")}
    places = [(row, slice(start, start + len(one[1]))) for (row, start, _), one in zip(PLACES, SEQUENCES, strict=True)]
    for place, (*_, segment), (advantage, log_ratio, trained) in zip(places, PLACES, SEQUENCES, strict=True):
        arrays["log_ratio"][place], arrays["mask"][place] = log_ratio, trained
        arrays["advantage"][place], arrays["segment"][place] = advantage, segment
    old_BT = np.float32(-2.0)

    def loss(logprob_BT):
        return grpo.policy_loss(
            logprob_BT,
            old_BT,
            arrays["advantage"],
            arrays["mask"],
            aggregate=aggregate,
            importance_sampling_level="sequence",
            norm_tokens=4,
            segment_BT=arrays["segment"],
            **CLIP,
        )

    loss_and_gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (value, statistics), gradient_BT = jax.device_get(loss_and_gradient(old_BT + arrays["log_ratio"]))
    return value, statistics, [gradient_BT[place] for place in places]


@pytest.mark.parametrize("aggregate", ["seq-mean-token-mean", "token-mean", "seq-mean-token-sum-norm"])
def test_loss_and_gradient_are_the_papers(aggregate):
    losses, gradients = by_hand()
    lengths = np.array([np.sum(trained) for _, _, trained in SEQUENCES])
    share = {  # of a sequence in the loss; the first is the paper's
        "seq-mean-token-mean": np.full(len(lengths), 1 / len(lengths)),
        "token-mean": lengths / lengths.sum(),
        "seq-mean-token-sum-norm": lengths / 4,
    }[aggregate]
    value, statistics, parts = loss_and_gradient(aggregate)
    np.testing.assert_allclose(value, losses @ share, rtol=1e-5)
    for part, gradient, weight in zip(parts, gradients, share, strict=True):
        np.testing.assert_allclose(part, gradient * weight, rtol=1e-5, atol=1e-7)
    assert [bool(np.any(part)) for part in parts] == [True, False, False, True, True, False, True]
    np.testing.assert_allclose(statistics["clip_fraction"], (2 + 2) / lengths.sum())
    np.testing.assert_allclose(statistics["dual_clip_fraction"], 3 / lengths.sum())
