"""Two processes of four devices: weights are published to both, and each runs its rollouts independently."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from memsearcher_jax.model import qwen
from tests.rl.processes import run_hosts
from tests.support import NANO


@pytest.mark.slow
def test_each_host_samples_its_problems_with_the_published_weights(tmp_path):
    run_hosts(Path(__file__).with_name("two_hosts.py"), 2, tmp_path)
    recorded = [json.loads((tmp_path / f"{process}.json").read_text()) for process in range(2)]
    assert [len(entries) for entries in recorded] == [2 * 2 * 2, 2 * 2 * 5]
    assert all(stop == "answered" for entries in recorded for _, _, _, stop, _ in entries)

    forward = jax.jit(lambda params, *row: jax.nn.log_softmax(qwen.forward(params, NANO, *row)[0][0]))
    for step in range(2):
        params = jax.jit(lambda key: qwen.init(key, NANO))(jax.random.key(step))
        for entry_step, process, _, _, contexts in (entry for entries in recorded for entry in entries):
            if entry_step != step:
                continue
            assert len(contexts) == 1 + 2 * process
            for ids, logprobs in contexts:
                ids_1T = np.pad(ids, (0, 96 - len(ids)))[None]
                segment_1T = (np.arange(96) < len(ids)).astype(np.int32)[None]
                logprob_TV = forward(params, ids_1T, np.arange(96)[None], segment_1T)
                expected_T = np.take_along_axis(
                    np.asarray(logprob_TV)[: len(ids) - 1], ids_1T[0, 1 : len(ids), None], 1
                )
                sampled_T = np.array(logprobs[1:]) != 0
                assert sampled_T.sum() > 0
                np.testing.assert_allclose(np.array(logprobs[1:])[sampled_T], expected_T[sampled_T, 0], atol=1e-4)
