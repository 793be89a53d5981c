"""The draws are those of the sampler before it had pages, recorded with the weights and conversations of conftest.py.

Log-probabilities may differ in their last bits, because pages cut the sum of a softmax elsewhere, and because the CPU
that recorded them summed products in another order.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from memsearcher_jax.sampling.config import SamplingParams

RECORDED = json.loads(Path(__file__).with_name("recorded_draws.json").read_text())


@pytest.mark.parametrize("name", RECORDED)
def test_draws_are_the_recorded_ones(name, params, nano):
    settings = RECORDED[name]["settings"].copy()
    rule = SamplingParams(settings.pop("temperature", 1.0), settings.pop("top_k", 0), settings.pop("top_p", 1.0))
    engine = nano.make_engine(replace(nano.SETTINGS, **settings))
    done = nano.run_conversations(engine, params, range(6), rule)
    for number, (ids, logprobs) in enumerate(zip(RECORDED[name]["ids"], RECORDED[name]["logprobs"], strict=True)):
        assert list(done[number].ids) == ids
        np.testing.assert_allclose(done[number].logprobs, logprobs, atol=3e-5)
