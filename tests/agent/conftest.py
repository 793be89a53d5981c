"""A scripted policy, a search that is a function, and a ruler that counts words: workflows run in microseconds."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from memsearcher_jax.agent.types import Find, Finish, Found, Outcome, Prompt, Query, Reply, Workflow

ENDINGS = {
    "eos": ("<|im_end|>", Finish.END),
    "pad": ("<|endoftext|>", Finish.END),
    "im_start": ("<|im_start|>", Finish.MARKUP),
    "length": ("", Finish.LENGTH),
}


class WordRuler:
    """A token is a word with the white space in front of it."""

    def count(self, text: str) -> int:
        return len(re.findall(r"\s*\S+|\s+$", text))

    def clip(self, text: str, limit: int) -> str:
        return "".join(re.findall(r"\s*\S+|\s+$", text)[:limit])


@dataclass
class Spoken:
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
class Played:
    """What a workflow did with a script; `outcome` is None where it asked for more than the script holds."""

    outcome: Outcome | None = None
    contexts: list[Spoken] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)  # the whole context at each request to speak
    finds: list[Find] = field(default_factory=list)
    trusted: str = ""  # all template text that extended a context

    @property
    def transcript(self) -> str:
        return self.contexts[-1].text


def play_script(
    workflow: Workflow, script: Sequence[tuple[str, str] | str | None], search: Callable[[Query], Found] | None = None
) -> Played:
    """Runs `workflow` on `script`: texts, (text, ending) pairs, or None where the text to add does not fit."""
    played, lines, answer = Played(), iter(script), None
    try:
        while True:
            request = workflow.send(answer)
            if isinstance(request, Find):
                played.finds.append(request)
                answer = tuple(search(query) for query in request.queries)
                continue
            line = next(lines, "the script is over")
            if line is None:
                answer = Reply("", Finish.NO_ROOM)
                continue
            if isinstance(request.text, Prompt):
                parts = request.text
                opened = parts.prefix + parts.question + parts.bridge + parts.memory + parts.suffix
                played.contexts.append(Spoken(opened))
            else:
                played.contexts[-1].add(0, "".join(piece.text for piece in request.text))
                played.trusted += "".join(piece.text for piece in request.text if piece.trusted)
            played.prompts.append(played.transcript)
            if line == "the script is over":
                return played
            text, ending = (line, "eos") if isinstance(line, str) else line
            token, finish = ENDINGS[ending]
            played.contexts[-1].add(1, text + token)
            answer = Reply(text, finish)
    except StopIteration as end:
        played.outcome = end.value
        return played


@pytest.fixture(scope="session")
def ruler() -> WordRuler:
    return WordRuler()


@pytest.fixture(scope="session")
def play() -> Callable[..., Played]:
    return play_script
