"""Prompts of the search workflows, from template files that a user may replace.

A template set is a folder with the UTF-8 text files that `TEMPLATE_SLOTS` lists for the workflow; those that come with
the package are templates/STYLE/WORKFLOW. Every slot, written `{{name}}`, occurs once in its file, in the order of the
table. The last newline of a file is not part of the text. The chat markup around the messages and the `<think>` that
opens a reply are added here, so template files contain none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.agent.protocol import THINK
from memsearcher_jax.types import Passage, Prompt, TextSpan, TokenCounter

_CALLS = {
    "passage": ("contents",),  # one passage; the passages of a call are concatenated and stripped
    "response": ("call", "result"),  # the response to one tool call
    "observation": ("responses",),  # the user message after tool calls, around all responses
}
_SEARCH_R1 = {
    "system": (),
    "turn": ("question",),
    "passage": ("number", "title", "text"),
    "observation": ("passages",),  # the text after a search
    "invalid": (),  # the text after a reply without an action
}
TEMPLATE_SLOTS: dict[str, dict[str, tuple[str, ...]]] = {
    # system: the system message, with rules, tools and tags; turn: the user message that opens a context
    "memsearcher": {"system": (), "turn": ("question", "memory"), **_CALLS},
    "react": {"system": (), "turn": ("question",), **_CALLS},
    # summary: the order to summarise, which follows the tool results in their message
    "compact": {"system": (), "turn": ("question", "memory"), **_CALLS, "summary": ()},
    "search_r1": _SEARCH_R1,
    "mem1": _SEARCH_R1,
    "memagent": {
        "system": (),
        "chunk": ("question", "memory", "chunk"),  # the user message that reads a chunk
        "turn": ("question", "memory"),  # the one that asks for the answer
        "empty": (),  # in place of a memory, before there is one
    },
    "direct": {"system": (), "turn": ("question",)},
    "rag": {"system": (), "turn": ("question", "passages"), "passage": ("contents",)},
    "memalpha": {
        "memory": (),  # `plain` or `tags`: how the prompts write a memory
        "system": ("memory",),  # of the context of a chunk: the task, the memory, the tools
        "chunk": ("chunk",),  # its user message, the same for every data source
        "opening": (),  # begins every reply, such as the empty thought of Qwen3; may be empty
        "answer_system": ("memory",),  # of the context of a question
        "answer": ("question",),
        "judge_system": (),  # asks a judge whether a text belongs in the store where it was written
        "judge": ("type", "content"),  # one such text: the store's name, and the text
        "grade_system": (),  # asks a judge whether an answer is right
        "grade": ("question", "gold", "answer"),  # one such answer
        "prefixes": (),  # lines `source: text` before the questions of sources that begin so; `\n`: a line end
    },
}
"""The template files of each workflow, and their slots."""

_TEMPLATES = files("memsearcher_jax.agent") / "templates"
_SLOT = re.compile(r"\{\{\s*(\w+)\s*\}\}")
_MARKUP = re.compile(r"<\|\w+\|>")

SYSTEM = "<|im_start|>system\n"
USER = "<|im_start|>user\n"
ASSISTANT = "<|im_start|>assistant\n"
END = "<|im_end|>\n"

PromptSet = TypeVar("PromptSet", bound="Prompts")


@dataclass(frozen=True)
class Prompts:
    """One template set. A tuple holds the texts around the slots of a template, so one more than it has slots.

    Templates that the workflow does not use are empty.
    """

    system: str
    turn: tuple[str, ...]
    passage: tuple[str, ...] = ("", "")
    response: tuple[str, ...] = ("", "", "")
    observation: tuple[str, ...] = ("", "")
    tools: tuple[str, ...] = ()  # names of the run's own tools

    opening: ClassVar[str] = THINK
    """The beginning of the first reply."""

    @classmethod
    def parse(cls: type[PromptSet], *, system: str, **templates: str) -> PromptSet:
        """A set from texts in place of files. Raises ValueError for slots that no file of that name has."""
        pieces = {}
        for name, text in templates.items():
            known = [slots[name] for slots in TEMPLATE_SLOTS.values() if name in slots]
            pieces[name] = _split(name, text, *known)
        return cls(system, **pieces)

    def with_tools(self: PromptSet, schemas: Sequence[Mapping[str, Any]]) -> PromptSet:
        """The set whose system message also describes these tools, by their JSON schemas."""
        if not schemas:
            return self
        # A description may come from a server, and must not forge a turn: JSON can escape the bar of chat markup.
        texts = (json.dumps({"type": "function", "function": schema}, ensure_ascii=False) for schema in schemas)
        lines = [text.replace("<|", "<\\u007c") for text in texts]
        system = "\n".join([f"{self.system}\n\nYou may also call these tools:", *lines])
        return replace(self, system=system, tools=tuple(schema["name"] for schema in schemas))

    def initial_prompt(self, question: str, memory: str = "") -> Prompt:
        """The prompt of a fresh context, with the opening of the reply. With rag, `memory` is the passages."""
        texts = {"question": question} if len(self.turn) == 2 else {"question": question, "memory": memory}
        return fill((self.system,), self.turn, texts, self.opening)

    def show_passage(self, number: int, passage: Passage) -> tuple[str, str, str]:
        """(text before, contents, text after) of a result's passage; numbers count from 1. The contents may be cut."""
        return self.passage[0], passage.contents, self.passage[1]

    def tool_message(self, pairs: Sequence[tuple[str, str]]) -> tuple[TextSpan, ...]:
        """The user message that shows (call, result) pairs, which are untrusted text."""
        before_call, before_result, after_result = self.response
        before_all, after_all = self.observation
        spans = [TextSpan(before_all, True)]
        for call, result in pairs:
            spans.append(TextSpan(before_call, True))
            spans.append(TextSpan(call, False))
            spans.append(TextSpan(before_result, True))
            spans.append(TextSpan(result, False))
            spans.append(TextSpan(after_result, True))
        spans.append(TextSpan(after_all, True))
        return _merge_trusted(spans)

    def continuation(self, message: Sequence[TextSpan], *, think: bool) -> tuple[TextSpan, ...]:
        """The text that follows a reply: a user message, and the beginning of the next assistant message.

        The context already holds the end token of the reply. `think` opens the next reply with `<think>`.
        """
        opening = END + ASSISTANT + (THINK if think else "")
        return _merge_trusted([TextSpan("\n" + USER, True), *message, TextSpan(opening, True)])

    def template_tokens(self, calls: int, token_counter: TokenCounter) -> int:
        """Maximum tokens of template text in the context of one turn with `calls` tool calls."""
        continuation = self.continuation(self.tool_message([("call", "result")] * calls), think=True)
        spans = (*self.initial_prompt("").segments, *continuation)
        return sum(token_counter.count(span.text) for span in spans if span.trusted)


def fill(system: Sequence[str], user: Sequence[str], texts: Mapping[str, str], opening: str = "") -> Prompt:
    """A fresh context: a system and a user message whose slots hold the outside texts.

    Args:
      system: the texts around the slots of the system message.
      user: the texts around the slots of the user message.
      texts: the text of every slot by its name, in the order of the slots: first those of `system`.
      opening: the beginning of the reply.
    """
    border = f"{system[-1]}{END}{USER}{user[0]}"
    around = [*system[:-1], border, *user[1:]]  # the texts around all slots
    around[0] = SYSTEM + around[0]
    around[-1] = f"{around[-1]}{END}{ASSISTANT}{opening}"
    segments = [TextSpan(around[0], True, "prefix")]
    for (name, text), after in zip(texts.items(), around[1:], strict=True):
        segments.append(TextSpan(text, False, name))
        segments.append(TextSpan(after, True))
    segments[-1] = replace(segments[-1], name="suffix")
    return Prompt(tuple(segments))


def load(config: AgentConfig, kind: type[PromptSet] = Prompts, workflow: str = "") -> PromptSet:
    """Reads the set for a workflow in the style that `config.prompts` names, or the one in that folder.

    Raises FileNotFoundError or ValueError with one line that names the file and the problem.
    """
    texts = read_templates(config, workflow)
    (system,) = texts.pop("system")
    return kind(system, **texts)


def read_templates(config: AgentConfig, workflow: str = "") -> dict[str, tuple[str, ...]]:
    """The texts around the slots of every file of a set, by default of `config.workflow`. Raises like `load`."""
    name = config.prompts
    workflow = workflow or config.workflow
    is_packaged = name in packaged()
    folder: Traversable = _TEMPLATES / name / workflow if is_packaged else Path(name)
    if not folder.is_dir():
        styles = ", ".join(style for style in packaged() if (_TEMPLATES / style / workflow).is_dir())
        raise FileNotFoundError(f"agent.prompts: {name!r} is neither a folder nor a style of {workflow} ({styles})")
    hint = f"; agent.workflow is {config.workflow}: choose agent.prompts for it"
    slots_of = TEMPLATE_SLOTS[workflow]
    return {file: _template(folder, f"{file}.txt", *slots, hint=hint) for file, slots in slots_of.items()}


def packaged() -> list[str]:
    """Names of the styles of templates that come with the package; write `./name` for a folder of such a name."""
    return sorted(folder.name for folder in _TEMPLATES.iterdir() if folder.is_dir())


def chat_messages(prompt: Prompt) -> tuple[str, str]:
    """The system and the user message of a prompt, without markup: for models with another chat template."""
    system = ""
    user = ""
    in_system = True
    for segment in prompt.segments:
        text = segment.text
        if segment.trusted:
            text = text.partition(END + ASSISTANT)[0]
        if segment.trusted and END + USER in text:
            end_of_system, _, text = text.partition(END + USER)
            system += end_of_system
            in_system = False
        if in_system:
            system += text
        else:
            user += text
    return system.removeprefix(SYSTEM), user


def _template(folder: Traversable, name: str, *slots: str, hint: str = "") -> tuple[str, ...]:
    """The texts of one file around its slots."""
    file = folder / name
    if not file.is_file():
        raise FileNotFoundError(f"the prompt set {folder} lacks {name}: see agent/prompts.py{hint}")
    try:
        text = file.read_text(encoding="utf-8-sig").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    if markup := _MARKUP.search(text):
        raise ValueError(f"{file} contains chat markup {markup[0]}: remove it, the program adds the markup")
    return _split(str(file), text, slots, hint=hint)


def _split(name: str, text: str, *allowed: tuple[str, ...], hint: str = "") -> tuple[str, ...]:
    """The texts around the slots of a template. Raises ValueError unless these are `allowed`, or nothing is known."""
    slots = tuple(_SLOT.findall(text))
    if allowed and slots not in allowed:
        needed = " or ".join(dict.fromkeys(map(_describe, allowed)))
        raise ValueError(f"{name} has {_describe(slots)} but must have {needed}{hint}")
    return tuple(_SLOT.split(text)[::2])


def _describe(slots: Sequence[str]) -> str:
    return "the slots " + " ".join("{{" + slot + "}}" for slot in slots) if slots else "no slots"


def _merge_trusted(spans: Sequence[TextSpan]) -> tuple[TextSpan, ...]:
    """Merges adjacent trusted spans: each span is encoded separately, and a border may split a token."""
    merged: list[TextSpan] = []
    with_text = (span for span in spans if span.text)
    for trusted, run in groupby(with_text, attrgetter("trusted")):
        if trusted:
            merged.append(TextSpan("".join(span.text for span in run), True))
        else:
            merged += run
    return tuple(merged)
