"""Mem-alpha's prompts, from the files of a template set, which `agent.prompts.TEMPLATE_SLOTS` lists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.agent.memalpha.memory import Store
from memsearcher_jax.agent.prompts import ASSISTANT, END, SYSTEM, USER, read_templates
from memsearcher_jax.types import Prompt


@dataclass(frozen=True)
class MemalphaPrompts:
    """One template set. A tuple holds the texts around the slots of a template, so one more than it has slots."""

    system: tuple[str, ...]
    chunk: tuple[str, ...]
    opening: str
    answer_system: tuple[str, ...]
    answer: tuple[str, ...]
    judge_system: str
    judge: tuple[str, ...]
    grade_system: str
    prefixes: dict[str, str]  # by source, or by the beginning of several sources

    def chunk_prompt(self, memory: str, chunk: str) -> Prompt:
        """The context in which one chunk is read."""
        return self._system_and_user(self.system, ("memory", memory), self.chunk, ("chunk", chunk))

    def answer_prompt(self, memory: str, question: str) -> Prompt:
        """The context in which one question is answered; `question` comes from `with_prefix`."""
        return self._system_and_user(self.answer_system, ("memory", memory), self.answer, ("question", question))

    def judge_prompt(self, store: Store, content: str) -> Prompt:
        """Asks whether `content` belongs in `store`."""
        before, between, after = self.judge
        prefix = f"{self.judge_system}{END}{USER}{before}"
        return self._prompt(prefix, ("store", store.value), between, ("content", content), after)

    def grade_prompt(self, question: str, gold: str, answer: str, rule: str = "") -> Prompt:
        """Asks whether `answer` is right, given the `gold` answer and perhaps a rule for such questions."""
        case = f"Question: {question}\nCorrect answer: {gold}\nGiven answer: {answer}"
        case += f"\nRule: {rule}" if rule else ""
        return self._prompt(f"{self.grade_system}{END}{USER}", ("store", ""), "", ("case", case), "")

    def with_prefix(self, source: str, question: str) -> str:
        """The question after its source's prefix, if there is one. This text is also the retrieval query."""
        fitting = [key for key in self.prefixes if source.startswith(key)]
        return f"{self.prefixes[max(fitting, key=len)]}\n\n{question}" if fitting else question

    def _system_and_user(
        self, system: tuple[str, ...], memory: tuple[str, str], user: tuple[str, ...], content: tuple[str, str]
    ) -> Prompt:
        return self._prompt(system[0], memory, f"{system[1]}{END}{USER}{user[0]}", content, user[1])

    def _prompt(self, prefix: str, first: tuple[str, str], bridge: str, second: tuple[str, str], suffix: str) -> Prompt:
        return Prompt.of(f"{SYSTEM}{prefix}", first, bridge, second, f"{suffix}{END}{ASSISTANT}{self.opening}")


def load(config: AgentConfig) -> MemalphaPrompts:
    """Reads the set that `config.prompts` names. Raises FileNotFoundError or ValueError with one line."""
    texts: dict[str, Any] = {name: text[0] if len(text) == 1 else text for name, text in read_templates(config).items()}
    prefixes = (line.partition(":") for line in texts.pop("prefixes").splitlines())
    return MemalphaPrompts(
        **texts, prefixes={source.strip(): prefix.strip() for source, colon, prefix in prefixes if colon}
    )
