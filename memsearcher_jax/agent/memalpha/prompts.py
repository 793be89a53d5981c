"""Mem-alpha's prompts, from the files of a template set, which `agent.prompts.TEMPLATE_SLOTS` lists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.agent.memalpha.memory import Store
from memsearcher_jax.agent.prompts import fill, read_templates
from memsearcher_jax.types import Prompt


@dataclass(frozen=True)
class MemalphaPrompts:
    """One template set. A tuple holds the texts around the slots of a template, so one more than it has slots."""

    tags: bool  # whether they show a memory in tags, as the original's do
    system: tuple[str, ...]
    chunk: tuple[str, ...]
    opening: str
    answer_system: tuple[str, ...]
    answer: tuple[str, ...]
    judge_system: tuple[str]
    judge: tuple[str, ...]
    grade_system: tuple[str]
    grade: tuple[str, ...]
    prefixes: dict[str, str]  # by source, or by the first words of several sources, such as icl of icl_nlu

    def chunk_prompt(self, memory: str, chunk: str) -> Prompt:
        """The context in which one chunk is read."""
        return fill(self.system, self.chunk, {"memory": memory, "chunk": chunk}, self.opening)

    def answer_prompt(self, memory: str, question: str) -> Prompt:
        """The context in which one question is answered; `question` comes from `with_prefix`."""
        return fill(self.answer_system, self.answer, {"memory": memory, "question": question}, self.opening)

    def judge_prompt(self, store: Store, content: str) -> Prompt:
        """Asks whether `content` belongs in `store`."""
        return fill(self.judge_system, self.judge, {"store": store.value, "content": content}, self.opening)

    def grade_prompt(self, question: str, gold: str, answer: str, rule: str = "") -> Prompt:
        """Asks whether `answer` is right, given the `gold` answer and perhaps a rule for such questions."""
        user = (*self.grade[:-1], self.grade[-1] + (f"\nRule: {rule}" if rule else ""))
        return fill(self.grade_system, user, {"question": question, "gold": gold, "answer": answer}, self.opening)

    def with_prefix(self, source: str, question: str) -> str:
        """The question after its source's prefix, if there is one. This text is also the retrieval query."""
        fitting = [key for key in self.prefixes if source == key or source.startswith(f"{key}_")]
        return f"{self.prefixes[max(fitting, key=len)]}\n\n{question}" if fitting else question


def load(config: AgentConfig) -> MemalphaPrompts:
    """Reads the set that `config.prompts` names. Raises FileNotFoundError or ValueError with one line."""
    texts: dict[str, Any] = read_templates(config, "memalpha")
    (opening,) = texts.pop("opening")
    (lines,) = texts.pop("prefixes")
    (memory,) = texts.pop("memory")
    if memory not in ("plain", "tags"):
        raise ValueError(f"agent.prompts {config.prompts}: memory.txt is {memory!r} and must be plain or tags")
    prefixes: dict[str, str] = {}
    for line in lines.splitlines():
        source, colon, prefix = line.partition(":")
        if colon:
            prefixes[source.strip()] = prefix.strip().replace(r"\n", "\n")
    return MemalphaPrompts(tags=memory == "tags", **texts, opening=opening, prefixes=prefixes)
