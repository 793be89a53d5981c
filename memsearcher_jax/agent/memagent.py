"""The MemAgent workflow: a long text, read chunk by chunk for one question (arXiv 2507.02259).

The context of a chunk holds the question, the memory and the chunk; its reply is the next memory. The last context
holds the question and the memory, and its reply answers in a box.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from memsearcher_jax.agent import protocol
from memsearcher_jax.agent.base import QuestionAgent
from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.agent.prompts import ASSISTANT, Prompts, fill
from memsearcher_jax.agent.reward import Parsed
from memsearcher_jax.types import FinishReason, Generate, Outcome, Problem, Prompt, TokenCounter, Turn, Workflow


@dataclass(frozen=True)
class MemAgentPrompts(Prompts):
    """A template set of this protocol; `turn` asks for the answer."""

    chunk: tuple[str, ...] = ("", "", "", "")
    empty: tuple[str, ...] = ("",)  # shown before there is a memory
    opening: ClassVar[str] = ""

    def read(self, question: str, memory: str, chunk: str) -> Prompt:
        texts = {"question": question, "memory": memory or self.empty[0], "chunk": chunk}
        return fill((self.system,), self.chunk, texts)

    def initial_prompt(self, question: str, memory: str = "") -> Prompt:
        return super().initial_prompt(question, memory or self.empty[0])

    def template_tokens(self, calls: int, token_counter: TokenCounter) -> int:
        def tokens(prompt: Prompt) -> int:
            return sum(token_counter.count(span.text) for span in prompt.segments)

        return max(tokens(self.read("", "", "")), tokens(self.initial_prompt("")))


def chunks_of(texts: Iterable[str], limit: int, token_counter: TokenCounter) -> Iterator[str]:
    """Chunks of at most `limit` tokens: whole texts where they fit, else pieces.

    Of a long text only the first 16 characters per token of the limit are encoded at a time.
    """
    chunk = ""
    for text in texts:
        rest = text
        while rest:
            joined = f"{chunk}\n\n{rest}" if chunk else rest
            if len(rest) <= 16 * limit and token_counter.count(joined) <= limit:
                chunk = joined
                rest = ""
            elif chunk:
                yield chunk
                chunk = ""
            else:
                piece = token_counter.clip(rest[: 16 * limit], limit) or rest[0]
                yield piece
                rest = rest[len(piece) :]
    if chunk:
        yield chunk


def memagent(
    question: str, texts: Iterable[str], *, config: AgentConfig, prompts: MemAgentPrompts, token_counter: TokenCounter
) -> Workflow:
    """Yields one `Generate` for each chunk and one for the answer, returns an `Outcome`. A cut-off memory is kept."""
    memory = ""
    turns: list[Turn] = []
    counts = {"memory_tokens": 0, "memory_cuts": 0}
    for chunk in chunks_of(texts, config.observation_tokens, token_counter):
        completion = yield Generate(prompts.read(question, memory, chunk), config.max_rewrite_tokens, kind="memory")
        if completion.finish in (FinishReason.CONTEXT_FULL, FinishReason.FORGED_TURN):
            return Outcome(protocol.STOP_REASONS[completion.finish], turns=tuple(turns), counts=counts)
        written = protocol.memory(completion.text) or completion.text.strip()
        new_memory = token_counter.clip(written, config.memory_tokens)
        turns.append(Turn(memory, completion.text, new_memory=new_memory))
        memory = new_memory
        counts["memory_cuts"] += memory != written
        counts["memory_tokens"] = token_counter.count(memory)

    completion = yield Generate(prompts.initial_prompt(question, memory), config.completion_tokens)
    answer = protocol.final_answer(completion, prompts.opening)
    return protocol.ended(*answer, turns, Turn(memory, completion.text), counts)


def parse_answer(transcript: str) -> Parsed:
    answer = protocol.boxed_answer(transcript.rpartition(ASSISTANT)[2])
    return answer, "" if answer is not None else "no box"


class MemAgent(QuestionAgent):
    """`agent.observation_tokens` are those of a chunk, `agent.rewrite_tokens` those of a reply with a memory."""

    templates = "memagent"
    keeps_memory = True
    kinds = frozenset(("action", "memory"))
    synthetic_data = "documents"
    parse_answer = staticmethod(parse_answer)
    prompt_set = MemAgentPrompts

    def start(self, problem: Problem, token_counter: TokenCounter) -> Workflow:
        assert problem.stream is not None, "`check_problems` refuses problems without a text"
        return memagent(
            problem.question,
            problem.stream.chunks,
            config=self.config,
            prompts=self.prompts,
            token_counter=token_counter,
        )

    def check_problems(self, problems: Iterable[Problem], count: Callable[[str], int], *, has_judge: bool) -> None:
        problems = list(problems)
        for problem in problems:
            if problem.stream is None:
                raise ValueError(
                    f"problem {problem.id!r} has no text: agent.workflow memagent reads one for a question"
                )
        super().check_problems(problems, count, has_judge=has_judge)

    def context_budget(self) -> dict[str, int]:
        config = self.config
        return {
            "agent.question_tokens": config.question_tokens,
            "agent.memory_tokens": config.memory_tokens,
            "agent.observation_tokens": config.observation_tokens,
            "agent.rewrite_tokens": max(config.max_rewrite_tokens, config.completion_tokens),
        }
