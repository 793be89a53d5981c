"""The demonstrations that the packaged weights were trained on, token for token, as recorded from version 0.2.0."""

import hashlib

import numpy as np
import pytest

from memsearcher_jax.agent.registry import WORKFLOWS
from memsearcher_jax.launch import cli
from memsearcher_jax.rl import setup
from memsearcher_jax.sft import search_tasks, stream_tasks

STEPS = {
    ("tiny_warmstart", 0): "7d822d3d42334224",
    ("tiny_warmstart", 3): "9089891941126c81",
    ("tiny_baselines_warmstart", 0): "97515e5fb65ab310",
    ("tiny_baselines_warmstart", 3): "9718dc7c24641131",
    ("tiny_memalpha_warmstart", 0): "f08130e71d7d79e2",
    ("tiny_memalpha_warmstart", 3): "ce9e2a668aaa8046",
}


def digest(examples):
    digest = hashlib.sha256()
    for example in examples:
        digest.update(np.asarray(example.ids, np.int32).tobytes() + b"|")
        digest.update(np.asarray(example.sampled, bool).tobytes() + b"\n")
    return digest.hexdigest()[:16]


@pytest.mark.parametrize(("preset", "step"), STEPS)
def test_the_demonstrations_of_a_step_are_those_of_the_packaged_weights(preset, step):
    config = cli.load_preset(preset)
    prompts = WORKFLOWS[config.agent.workflow].load_prompts(config.agent)
    run = setup.Run(config, None, setup.open_tokenizer(config.model), prompts, None, None)
    tasks = stream_tasks if config.agent.workflow == "memalpha" else search_tasks
    assert digest(tasks.step_examples(run, step)[0]) == STEPS[preset, step]
