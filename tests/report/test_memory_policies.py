"""Memory metrics of scripted policies with known values."""

import json

import pytest

from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.agent.memsearcher import memsearcher
from memsearcher_jax.agent.prompts import load
from memsearcher_jax.agent.react import react
from memsearcher_jax.agent.run import run_workflow
from memsearcher_jax.report.memory_quality import memory_quality
from memsearcher_jax.types import Completion, Passage, Problem, Prompt, StopReason, Trajectory
from tests.support import TinyIndex


class WordCounter:
    """A token is a word."""

    def count(self, text):
        return len(text.split())

    def clip(self, text, limit):
        return " ".join(text.split()[:limit])


TOWNS = (
    Passage("1", '"Red Mill"\nThe Red Mill stands in Lakeside, says every guide to the valley.'),
    Passage("2", '"Lakeside"\nLakeside was founded by Ada Byron in the spring of 1850.'),
    Passage("3", '"Ada Byron"\nAda Byron was born in Porto and travelled north as a child.'),
)
QUESTION = Problem(
    "towns",
    "Where was the founder of the town of the Red Mill born?",
    ("Porto",),
    {"supporting_titles": [passage.title for passage in TOWNS], "hops": 3},
)
QUERIES = ("Red Mill stands", "Lakeside was founded", "Ada Byron was born")


def run_policy(write, workflow=memsearcher, prompts="memsearcher", **settings):
    """Search three times and answer; `write(old memory, passage text, turn)` returns the new memory."""
    config = AgentConfig(workflow=workflow.__name__, prompts=prompts, max_turns=4, **settings)
    memory, read = "", []

    def find(request):
        found = TinyIndex(TOWNS).answer(request)
        read.append(found[0].passages[0])
        return found

    def speak(say):
        nonlocal memory
        if isinstance(say.text, Prompt):
            memory = say.text["memory"]
        elif workflow is memsearcher:
            return Completion(f"<memory>{write(memory, body(read[-1]), len(read))}</memory>")
        if len(read) == len(QUERIES):
            return Completion("I know.</think>\n\\boxed{Porto}")
        call = {"name": "wikipedia_search", "arguments": {"query": QUERIES[len(read)], "top_n": 1}}
        return Completion(f"I look.</think>\n<tool_call>{json.dumps(call)}</tool_call>")

    token_counter = WordCounter()
    outcome = run_workflow(
        workflow(QUESTION.question, config=config, prompts=load(config), token_counter=token_counter), speak, find
    )
    assert outcome.stop is StopReason.ANSWERED
    return memory_quality(Trajectory(QUESTION, 0, outcome, (), ""))


def body(passage):
    return passage.contents.partition("\n")[2]


def column(done, name):
    return [turn.metrics.get(name) for turn in done.turns]


def test_an_agent_that_carries_no_memory_holds_nothing_before():
    """The ablation `agent.carry_memory false`: the policy writes memories that are not carried over."""
    done = run_policy(lambda old, text, turn: text, carry_memory=False)
    assert [turn.wrote_memory for turn in done.turns] == [True, True, True, False]
    assert column(done, "supporting/held") == [0.0, 0.0, 0.0, None]
    assert column(done, "memory/words") == column(done, "memory/cut") == [0.0, 0.0, 0.0, None]
    assert "memory/copied" not in done.means


def test_a_memory_over_its_budget_counts_as_cut():
    done = run_policy(lambda old, text, turn: f"{old} {text}".strip(), memory_tokens=15)
    assert column(done, "memory/words") == [12.0, 15.0, 15.0, None]
    assert column(done, "memory/cut") == [0.0, 1.0, 1.0, None]
    assert column(done, "golden/held") == [0.0, 0.0, 0.0, None]  # the end of the memory was cut


def test_an_agent_without_a_memory_has_only_shown_metrics():
    done = run_policy(None, workflow=react, prompts="react")
    assert column(done, "supporting/shown") == pytest.approx([2 / 3, 2 / 3, 1 / 3, None])
    assert {name.split("/")[1] for name in done.means} == {"shown", "any_shown"}
    assert done.last == {}
