"""The demonstrations that the packaged weights were trained on, token for token, as recorded when they were made."""

import hashlib
from itertools import groupby

import numpy as np
import pytest

from examples.warmstart import documents, search, streams
from examples.warmstart.record import open_run
from memsearcher_jax.launch import cli

STEPS = {
    ("tiny_warmstart", 0): "7d822d3d42334224",
    ("tiny_warmstart", 3): "9089891941126c81",
    ("tiny_baselines_warmstart", 0): "97515e5fb65ab310",
    ("tiny_baselines_warmstart", 3): "9718dc7c24641131",
    ("tiny_compact_warmstart", 0): "772247bbe53b8eab",
    ("tiny_compact_warmstart", 3): "81c048ab44adf49f",
    ("tiny_memagent_warmstart", 0): "ad2203b3c567f518",
    ("tiny_memagent_warmstart", 80): "5c8d3c3d07344efe",
    ("tiny_memalpha_warmstart", 0): "f08130e71d7d79e2",
    ("tiny_memalpha_warmstart", 3): "ce9e2a668aaa8046",
}
HELD_OUT = {
    "tiny_warmstart": {
        "query": "d142d22216eb975f",
        "fact": "b371704d8134ab36",
        "answer": "834ede7b90628f83",
        "react/query": "d2666c2634dddff8",
        "react/answer": "990eac833bb9efbf",
    },
    "tiny_baselines_warmstart": {
        "query": "ed396326f9e44c80",
        "answer": "8368b9225fca07ee",
        "rag/answer": "5452cac04b297b26",
        "direct/answer": "5d91e2b54d94ebf5",
    },
    "tiny_compact_warmstart": {
        "0/query": "bbdf1268bc93951d",
        "0/fact": "48821dca02c0a928",
        "0/answer": "253fef423197bbd3",
        "96/query": "bfe9dc902fae94b4",
        "96/fact": "c7261f3082b62c5e",
        "96/answer": "56b876c1e5500d48",
        "176/query": "7ad35c72cf42e350",
        "176/fact": "283d5ff87abefcfb",
        "176/answer": "e74178a4678b2723",
        "256/query": "026092e282513c81",
        "256/fact": "b11bb7562176752c",
        "256/answer": "847a7692f8ca1fb8",
        "1000/query": "a94a9ffdbb55c704",
        "1000/answer": "a740565bad1eb0ae",
    },
    "tiny_memalpha_warmstart": {
        "calls": "44eb7c83532721ee",
        "store_all": "8ef75e044ed412dd",
        "answer/person": "6f3ddd2b56d1fe79",
        "answer/event": "e27ba65e5d3325cd",
        "answer/fact": "00df90048a6c7852",
        "answer/rule": "599081cd2eb091cc",
    },
}


def digest(demonstrations):
    digest = hashlib.sha256()
    for context in (context for one in demonstrations for context in one.trajectory.contexts):
        digest.update(np.asarray(context.ids, np.int32).tobytes() + b"|")
        digest.update(np.asarray(context.sampled, bool).tobytes() + b"\n")
    return digest.hexdigest()[:16]


def script_of(preset):
    return {"tiny_memalpha_warmstart": streams, "tiny_memagent_warmstart": documents}.get(preset, search)


@pytest.mark.parametrize(("preset", "step"), STEPS)
def test_the_demonstrations_of_a_step_are_those_of_the_packaged_weights(preset, step):
    assert digest(script_of(preset).step(open_run(cli.load_preset(preset)), step)) == STEPS[preset, step]


@pytest.mark.parametrize("preset", HELD_OUT)
def test_held_out_decisions_are_those_that_were_measured(preset):
    held_out = script_of(preset).held_out(open_run(cli.load_preset(preset)))
    found = groupby(held_out, lambda one: one.trajectory.problem.metadata["source"])
    assert {source: digest(group) for source, group in found} == HELD_OUT[preset]
