r"""The wording of the conversation, in template files that a user may replace.

A template set is a folder with five UTF-8 text files:

    file             slots                    is
    system.txt                                the system message: rules, tools, tags
    turn.txt         {{question}} {{memory}}  the user message that opens a context
    passage.txt      {{contents}}             one passage; a call's passages follow each other and are then stripped
    response.txt     {{call}} {{result}}      the answer to one tool call
    observation.txt  {{responses}}            the user message after tool calls, around all answers

Not every workflow needs all of it. A set for react has no {{memory}} in turn.txt, one for rag has {{passages}} in its
place and lacks response.txt and observation.txt, one for direct is system.txt and turn.txt with {{question}} alone.
The files of a set for memalpha are those of `FILES`; agent/memalpha_prompts.py says what they are.
Each slot stands in its file once, in this order. The last newline of a file is not part of the text. The chat markup
around the messages and the `<think>` that opens a reply are added here, so a set holds words only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from memsearcher_jax.agent.protocol import THINK
from memsearcher_jax.agent.types import AgentConfig, Piece, Prompt, Ruler

_CALLS = {"passage": ("contents",), "response": ("call", "result"), "observation": ("responses",)}
FILES: dict[str, dict[str, tuple[str, ...]]] = {
    "memsearcher": {"system": (), "turn": ("question", "memory"), **_CALLS},
    "react": {"system": (), "turn": ("question",), **_CALLS},
    "direct": {"system": (), "turn": ("question",)},
    "rag": {"system": (), "turn": ("question", "passages"), "passage": ("contents",)},
    "memalpha": {
        "system": ("memory",),
        "chunk": ("chunk",),
        "opening": (),
        "answer_system": ("memory",),
        "answer": ("question",),
        "judge_system": (),
        "judge": ("type", "content"),
        "grade_system": (),
        "prefixes": (),
    },
}
"""The files of each workflow's sets, and their slots."""

_SLOT = re.compile(r"\{\{\s*(\w+)\s*\}\}")
_MARKUP = re.compile(r"<\|\w+\|>")

SYSTEM = "<|im_start|>system\n"
USER = "<|im_start|>user\n"
ASSISTANT = "<|im_start|>assistant\n"
END = "<|im_end|>\n"


@dataclass(frozen=True)
class Prompts:
    """One template set. Each tuple holds the template's texts around its slots, so one more than it has slots.

    Those that a workflow does not use are empty.
    """

    system: str
    turn: tuple[str, ...]
    passage: tuple[str, ...] = ("", "")
    response: tuple[str, ...] = ("", "", "")
    observation: tuple[str, ...] = ("", "")

    def opening(self, question: str, memory: str = "") -> Prompt:
        """A fresh context, up to and including the `<think>` that opens the reply; of rag, `memory` is the passages."""
        before, *bridge, after = self.turn
        return Prompt(
            prefix=f"{SYSTEM}{self.system}{END}{USER}{before}",
            question=question,
            bridge="".join(bridge),
            memory=memory,
            suffix=f"{after}{END}{ASSISTANT}{THINK}",
        )

    def message(self, answers: Sequence[tuple[str, str]]) -> tuple[Piece, ...]:
        """The user message that shows (call, result) pairs: template text is trusted, theirs is not."""
        before, between, after = self.response
        pieces = [Piece(self.observation[0], True)]
        for call, result in answers:
            pieces += [Piece(before, True), Piece(call, False), Piece(between, True), Piece(result, False)]
            pieces += [Piece(after, True)]
        return _joined([*pieces, Piece(self.observation[1], True)])

    def extension(self, message: Sequence[Piece], *, think: bool) -> tuple[Piece, ...]:
        """What a context grows by after a reply: a user message and the opening of the next reply.

        The reply's own end token is in the context already. `think` opens the next reply with a thought.
        """
        opening = END + ASSISTANT + (THINK if think else "")
        return _joined([Piece("\n" + USER, True), *message, Piece(opening, True)])

    def template_tokens(self, calls: int, ruler: Ruler) -> int:
        """At most so many tokens of one turn's context are template: its opening, and the answers to `calls` calls."""
        opening = self.opening("")
        answered = self.extension(self.message([("call", "result")] * calls), think=True)
        texts = [opening.prefix, opening.bridge, opening.suffix, *(piece.text for piece in answered if piece.trusted)]
        return sum(ruler.count(text) for text in texts)


def load(config: AgentConfig) -> Prompts:
    """Reads the set that `config.prompts` names: a packaged one, or a folder (write `./name` if both exist).

    Raises FileNotFoundError or ValueError with one line that names the file and what is wrong with it.
    """
    texts = texts_of(config)
    (system,) = texts.pop("system")
    return Prompts(system, **texts)


def texts_of(config: AgentConfig) -> dict[str, tuple[str, ...]]:
    """The texts around the slots of every file of the set that `config.prompts` names. Raises as `load` does."""
    folder = _folder(config.prompts)
    # A set of another workflow may have the right slots and the wrong words.
    if config.prompts in packaged() and (fitting := packaged_for(config.workflow, config.prompts)) != config.prompts:
        raise ValueError(
            f"agent.prompts {config.prompts} is for another workflow, and agent.workflow is {config.workflow}: "
            f"choose {fitting}"
        )
    hint = f"; agent.workflow is {config.workflow}: choose agent.prompts for it"
    return {name: _template(folder, f"{name}.txt", *slots, hint=hint) for name, slots in FILES[config.workflow].items()}


def packaged_for(workflow: str, prompts: str) -> str:
    """The packaged set for `workflow` in the style of the packaged set `prompts`: for rag and "brief", "brief_rag".

    Raises ValueError if `prompts` is no packaged set.
    """
    if prompts not in packaged():
        raise ValueError(f"agent.prompts {prompts!r} is a set of your own, for one workflow: name yours for {workflow}")
    style = "_".join(word for word in prompts.split("_") if word not in FILES)
    if workflow == "memsearcher":
        return style or workflow
    return f"{style}_{workflow}" if style else workflow


def with_workflow(config: AgentConfig, workflow: str) -> AgentConfig:
    """The config with another workflow and, unless it is the same one, the packaged prompts for it."""
    if workflow == config.workflow:
        return config
    return replace(config, workflow=workflow, prompts=packaged_for(workflow, config.prompts))


def packaged() -> list[str]:
    """Names of the template sets that ship with the package."""
    return sorted(folder.name for folder in _templates().iterdir() if folder.is_dir())


def messages(prompt: Prompt) -> tuple[str, str]:
    """The words of the system and of the user message of a fresh prompt, without markup: for other chat templates."""
    words, role = ["", ""], 0
    trusted = prompt.prefix, prompt.bridge, prompt.suffix.rpartition(END + ASSISTANT)[0]
    for template, outside in zip(trusted, (prompt.question, prompt.memory, ""), strict=True):
        before, border, after = template.partition(END + USER)
        words[role] += before
        role += bool(border)
        words[role] += after + outside
    return words[0].removeprefix(SYSTEM), words[1]


def _templates() -> Traversable:
    return files("memsearcher_jax.agent") / "templates"


def _folder(name: str) -> Traversable:
    if name in packaged():
        return _templates() / name
    if Path(name).is_dir():
        return Path(name)
    raise FileNotFoundError(f"agent.prompts: {name!r} is no folder and no packaged set ({', '.join(packaged())})")


def _template(folder: Traversable, name: str, *slots: str, hint: str = "") -> tuple[str, ...]:
    """The texts of one file around its slots."""
    file = folder / name
    if not file.is_file():
        raise FileNotFoundError(
            f"the prompt set {folder} lacks {name}, which its workflow needs: see agent/prompts.py{hint}"
        )
    try:
        text = file.read_text(encoding="utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    if markup := _MARKUP.search(text):
        raise ValueError(f"{file} holds chat markup {markup[0]}: a template has words only, markup is added to it")
    found = tuple(_SLOT.findall(text))
    if found != slots:
        raise ValueError(f"{file} has {_listed(found)} but must have {_listed(slots)}{hint}")
    return tuple(_SLOT.split(text)[::2])


def _listed(slots: Sequence[str]) -> str:
    return "the slots " + " ".join("{{" + slot + "}}" for slot in slots) if slots else "no slots"


def _joined(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """The same text in as few pieces as trust allows: each is encoded apart, and a border may split a word."""
    joined: list[Piece] = []
    for piece in pieces:
        if joined and joined[-1].trusted and piece.trusted:
            joined[-1] = Piece(joined[-1].text + piece.text, True)
        elif piece.text:
            joined.append(piece)
    return tuple(joined)
