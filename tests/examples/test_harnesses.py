"""The agents of other frameworks in examples/: they ask as the packaged agent does, and learn."""

import asyncio
import importlib
import os
import subprocess
import sys

import pytest

from memsearcher_jax.agent.registry import make_agent
from memsearcher_jax.agent.run import run_workflow
from memsearcher_jax.configs.tiny import tiny
from memsearcher_jax.launch import tpu_train
from memsearcher_jax.logs.metrics import read_metrics
from memsearcher_jax.runs.run_dir import located
from memsearcher_jax.tokenizer import ChatTokenizer
from memsearcher_jax.types import Completion, Prompt, Query, SearchResult
from tests.rl.scripted_endpoint import PASSAGES, client_of, scripted_endpoint

TOKENIZER = ChatTokenizer.load(located("package:tiny"))
CALL = '{"name": "wikipedia_search", "arguments": {"query": "Title 2"}}'
REPLIES = [
    f"I do not know.</think>\n<tool_call>{CALL}</tool_call>",
    "<memory> a note </memory>",
    "The note says it.</think>\n\\boxed{number 2}",
]
HARNESSES = ("openai_client", "langgraph_agent")


def workflow_ids(problem):
    """What the packaged agent is shown in each context, after the same replies."""
    contexts = []
    replies = iter(REPLIES)

    def generate(request):
        if isinstance(request.text, Prompt):
            contexts.append([id for segment in TOKENIZER.prompt(request.text) for id in segment])
        else:
            contexts[-1] += TOKENIZER.encode_spans(request.text)
        reply = next(replies)
        contexts[-1] += [*TOKENIZER.encode_untrusted(reply), TOKENIZER.end_ids[0]]
        return Completion(reply)

    def search(request):
        assert request.queries == (Query("Title 2", 1),)
        return (SearchResult((PASSAGES[2],)),)

    outcome = run_workflow(make_agent(tiny().agent).start(problem, TOKENIZER), generate, search)
    return contexts, outcome.answer


@pytest.mark.parametrize("name", HARNESSES)
def test_a_harness_shows_the_model_what_the_packaged_agent_does(name):
    pytest.importorskip("langgraph")
    harness = getattr(importlib.import_module(f"examples.{name}"), name)
    with scripted_endpoint(*REPLIES, tokenizer=TOKENIZER) as (openai, session):
        answer = asyncio.run(harness(session.job.problem, client_of(openai)))
    contexts, expected = workflow_ids(session.job.problem)
    assert answer == expected == "number 2"
    assert [TOKENIZER.transcript(context.ids.tolist()) for context in session.contexts] == [
        TOKENIZER.transcript(ids) for ids in contexts
    ]
    assert [context.ids.tolist() for context in session.contexts] == contexts
    assert session.altered_replies == 0


@pytest.mark.parametrize("name", HARNESSES)
def test_a_harness_that_gives_up_has_no_answer(name):
    pytest.importorskip("langgraph")
    harness = getattr(importlib.import_module(f"examples.{name}"), name)
    with scripted_endpoint("I do not know.</think> Sorry.", tokenizer=TOKENIZER) as (openai, session):
        assert asyncio.run(harness(session.job.problem, client_of(openai))) is None
    with scripted_endpoint(REPLIES[0], "no memory", tokenizer=TOKENIZER) as (openai, session):
        assert asyncio.run(harness(session.job.problem, client_of(openai))) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", HARNESSES)
def test_a_harness_learns(name, tmp_path):
    """Sampled exact match of the first step, before any update, and of the sixth."""
    pytest.importorskip("langgraph")
    file = importlib.import_module(f"examples.{name}").__file__
    fewer_programs = "--sampling.decode_batch_sizes --training.grad_accum_steps 4"  # compilation takes half of the time
    flags = f"--config tiny --rl.steps 6 --rl.evaluate_every 0 {fewer_programs} --agent.harness {file}"
    environment = {variable: value for variable, value in os.environ.items() if variable != "XLA_FLAGS"}  # one device
    command = [sys.executable, tpu_train.__file__, *flags.split(), "--out", str(tmp_path / name)]
    subprocess.run(command, check=True, env=environment, timeout=600)
    steps = read_metrics(tmp_path / name / "metrics.jsonl")
    assert steps[0]["exact_match"] < 0.5
    assert steps[-1]["exact_match"] > 0.7
    assert steps[-1]["requests"] > steps[-1]["contexts"] > 1
    assert "stop/fault" not in steps[-1] or steps[-1]["stop/fault"] == 0
