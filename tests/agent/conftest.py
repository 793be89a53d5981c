"""A scripted policy, a search function, and a token counter that counts words: workflows run in microseconds."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from memsearcher_jax.agent.base import Agent
from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.agent.registry import make_agent
from memsearcher_jax.types import (
    Completion,
    FinishReason,
    Outcome,
    Passage,
    Problem,
    Prompt,
    Query,
    Search,
    SearchResult,
    Workflow,
)

END_OF_SCRIPT = "end of script"
ENDINGS = {
    "eos": ("<|im_end|>", FinishReason.STOP),
    "pad": ("<|endoftext|>", FinishReason.STOP),
    "im_start": ("<|im_start|>", FinishReason.FORGED_TURN),
    "length": ("", FinishReason.LENGTH),
}


class WordCounter:
    """A token is a word with the white space in front of it."""

    extra_markup_tokens = 0

    def count(self, text: str) -> int:
        return len(re.findall(r"\s*\S+|\s+$", text))

    def clip(self, text: str, limit: int) -> str:
        return "".join(re.findall(r"\s*\S+|\s+$", text)[:limit])

    def prompt(self, prompt: Prompt) -> list[range]:
        return [range(self.count(segment.text)) for segment in prompt.segments]


class RecordedCounter:
    """The counter that Mem-alpha's records were made with: words and marks."""

    def count(self, text):
        return len(re.findall(r"\w+|[^\w\s]", text))

    def clip(self, text, limit):
        ends = [match.end() for match in re.finditer(r"\w+|[^\w\s]", text)]
        return text if len(ends) <= limit else text[: ends[limit - 1] if limit else 0]


@dataclass
class Sampled:
    """One context as text: its prompt, then (sampled, text) segments."""

    prompt: str
    segments: list[tuple[int, str]] = field(default_factory=list)

    def add(self, sampled: int, text: str) -> None:
        if self.segments and self.segments[-1][0] == sampled:
            text = self.segments.pop()[1] + text
        if text:
            self.segments.append((sampled, text))

    @property
    def text(self) -> str:
        return self.prompt + "".join(text for _, text in self.segments)


@dataclass
class ScriptedRun:
    """A workflow run on a script; `outcome` is None if the workflow requests more than the script holds."""

    outcome: Outcome | None = None
    contexts: list[Sampled] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)  # the complete context at each `Generate` request
    searches: list[Search] = field(default_factory=list)
    trusted: str = ""  # all template text that extended a context

    @property
    def transcript(self) -> str:
        return self.contexts[-1].text


def run_script(
    workflow: Workflow,
    script: Sequence[tuple[str, str] | str | None],
    search: Callable[[Query], SearchResult] | None = None,
) -> ScriptedRun:
    """Runs `workflow` on `script`: texts, (text, ending) pairs, or None where the text to add does not fit."""
    run, lines, answer = ScriptedRun(), iter(script), None
    try:
        while True:
            request = workflow.send(answer)
            if isinstance(request, Search):
                run.searches.append(request)
                answer = tuple(search(query) for query in request.queries)
                continue
            line = next(lines, END_OF_SCRIPT)
            if line is None:
                answer = Completion("", FinishReason.CONTEXT_FULL)
                continue
            if request.same_turn and run.contexts[-1].segments[-1][1].endswith("<|im_end|>"):
                sampled, text = run.contexts[-1].segments.pop()
                run.contexts[-1].add(sampled, text.removesuffix("<|im_end|>"))
            if isinstance(request.text, Prompt):
                run.contexts.append(Sampled(str(request.text)))
            else:
                run.contexts[-1].add(0, "".join(span.text for span in request.text))
                run.trusted += "".join(span.text for span in request.text if span.trusted)
            run.prompts.append(run.transcript)
            if line == END_OF_SCRIPT:
                return run
            text, ending = (line, "eos") if isinstance(line, str) else line
            token, finish = ENDINGS[ending]
            if request.stop and re.search(request.stop, text, re.DOTALL):
                token = ""
            run.contexts[-1].add(1, text + token)
            answer = Completion(text, finish)
    except StopIteration as end:
        run.outcome = end.value
        return run


def passages(query: Query) -> SearchResult:
    """Pages about the query, as many as it asks for."""
    return SearchResult(tuple(Passage(str(n), f'"Page {n}"\nabout {query.text}\nmore') for n in range(query.top_n)))


def play(
    name: str,
    script: Sequence[tuple[str, str] | str | None],
    search: Callable[[Query], SearchResult] = passages,
    question: str = "who?",
    **settings,
) -> ScriptedRun:
    """Runs the agent of the workflow `name` on `script`, with its own templates and default settings but `settings`."""
    workflow = agent_of(name, **settings).start(Problem("1", question, ()), WordCounter())
    return run_script(workflow, script, search)


def agent_of(name: str, **settings) -> Agent:
    return make_agent(AgentConfig(workflow=name, **settings))


@pytest.fixture(scope="session")
def recorded(shared) -> Callable[[str], list[dict]]:
    """Reads the cases of a file of recorded behaviour, such as "memsearcher/reward.jsonl"."""

    def read(name: str) -> list[dict]:
        return [json.loads(line) for line in (shared / "reference" / name).open(encoding="utf-8")]

    return read


@pytest.fixture(scope="session")
def token_counter() -> WordCounter:
    return WordCounter()


@pytest.fixture(scope="session")
def scripted() -> Callable[..., ScriptedRun]:
    return run_script
