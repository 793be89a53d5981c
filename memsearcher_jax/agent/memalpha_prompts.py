"""The wording of Mem-alpha: what memorises, what answers, what judges, in the files of a template set.

    system.txt         {{memory}}            the system message of a chunk's context: the task, the memory, the tools
    chunk.txt          {{chunk}}             its user message, the same for every source of data
    opening.txt                              what begins every reply, such as the empty thought of Qwen3; may be empty
    answer_system.txt  {{memory}}            the system message of a question's context
    answer.txt         {{question}}          its user message
    judge_system.txt                         asks a judge whether a content belongs where it was written
    judge.txt          {{type}} {{content}}  one such content: the store's name, and the text
    grade_system.txt                         asks a judge whether an answer is right; the case is the user message
    prefixes.txt                             what precedes the questions of a source: lines `source: text`, where a
                                             source is one name or the beginning of several

`agent/prompts.py` reads them and adds the chat markup.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from memsearcher_jax.agent.memalpha_memory import Store
from memsearcher_jax.agent.prompts import ASSISTANT, END, SYSTEM, USER, texts_of
from memsearcher_jax.agent.types import AgentConfig, Prompt


@dataclass(frozen=True)
class MemalphaPrompts:
    """One template set. Each tuple holds a template's texts around its slots, so one more than it has slots."""

    system: tuple[str, str]
    chunk_message: tuple[str, str]
    opening: str
    answer_system: tuple[str, str]
    answer_message: tuple[str, str]
    judge_system: str
    judge_message: tuple[str, str, str]
    grade_system: str
    prefixes: dict[str, str] = field(default_factory=dict)

    def chunk(self, memory: str, chunk: str) -> Prompt:
        """The context in which one chunk is read."""
        return self._context(self.system, memory, self.chunk_message, chunk)

    def answer(self, memory: str, question: str) -> Prompt:
        """The context in which one question is answered; `question` comes from `asked`."""
        return self._context(self.answer_system, memory, self.answer_message, question)

    def asked(self, source: str, question: str) -> str:
        """The question behind what its source wants said first. This text is also what is searched for."""
        fitting = [key for key in self.prefixes if source.startswith(key)]
        return f"{self.prefixes[max(fitting, key=len)]}\n\n{question}" if fitting else question

    def judge(self, store: Store, content: str) -> Prompt:
        """Asks whether `content` belongs into `store`."""
        before, between, after = self.judge_message
        opened = f"{SYSTEM}{self.judge_system}{END}{USER}{before}"
        return Prompt(opened, store.value, between, content, f"{after}{END}{ASSISTANT}{self.opening}")

    def grade(self, question: str, gold: str, answer: str) -> Prompt:
        """Asks whether `answer` is right, the `gold` answer given."""
        case = f"Question: {question}\nCorrect answer: {gold}\nGiven answer: {answer}"
        opened = f"{SYSTEM}{self.grade_system}{END}{USER}"
        return Prompt(opened, "", "", case, f"{END}{ASSISTANT}{self.opening}")

    def _context(self, system: tuple[str, str], memory: str, message: tuple[str, str], text: str) -> Prompt:
        return Prompt(
            prefix=f"{SYSTEM}{system[0]}",
            question=memory,
            bridge=f"{system[1]}{END}{USER}{message[0]}",
            memory=text,
            suffix=f"{message[1]}{END}{ASSISTANT}{self.opening}",
        )


def load(config: AgentConfig) -> MemalphaPrompts:
    """Reads the set that `config.prompts` names. Raises FileNotFoundError or ValueError with one line."""
    texts = texts_of(config)
    return MemalphaPrompts(
        system=texts["system"],
        chunk_message=texts["chunk"],
        opening=texts["opening"][0],
        answer_system=texts["answer_system"],
        answer_message=texts["answer"],
        judge_system=texts["judge_system"][0],
        judge_message=texts["judge"],
        grade_system=texts["grade_system"][0],
        prefixes=_prefixes(texts["prefixes"][0]),
    )


def _prefixes(text: str) -> dict[str, str]:
    """The `source: text` lines; those without a colon say nothing."""
    lines = (line.partition(":") for line in text.splitlines())
    return {source.strip(): prefix.strip() for source, colon, prefix in lines if colon}
