"""What rollouts on simulated devices are about: problems, passages, and the replies of the policy.

Trajectories have about 3.5 contexts, five passages of 120 tokens for each search, and memories of 200 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from memsearcher_jax.data.config import EncyclopediaConfig
from memsearcher_jax.data.synthetic.encyclopedia import make_encyclopedia
from memsearcher_jax.tokenizer import ChatTokenizer
from memsearcher_jax.types import Passage, Problem, Stream, StreamQuestion

TURNS = (1, 2, 3, 4, 5, 6)  # of a trajectory, uniformly
THOUGHT = (40, 120)  # tokens
MEMORY = 200  # tokens
PASSAGE = 120  # tokens
PASSAGES = 5  # of a search
CHUNK = 600  # tokens of a stream's chunk
GROUP = 5  # rollouts of a problem
Workflow = Literal["memsearcher", "react", "memalpha", "memagent"]


@dataclass(frozen=True)
class Workload:
    """Problems, and scripted replies by the numbers of trajectory and context."""

    problems: list[Problem]
    replies: dict[tuple[int, int], list[np.ndarray]]
    passages: list[Passage]


class Writer:
    """Writes text of any number of tokens, from the sentences of the synthetic encyclopedia."""

    def __init__(self, tokenizer: ChatTokenizer, seed: int):
        self.rng = np.random.default_rng(seed)
        self._tokenizer = tokenizer
        passages = make_encyclopedia(EncyclopediaConfig()).passages
        self._sentences = [line for passage in passages for line in passage.contents.partition("\n")[2].split(". ")]

    def text(self, tokens: int) -> str:
        count = tokens // 5 + 2
        chosen = self.rng.choice(len(self._sentences), count)
        return self._tokenizer.clip(". ".join(self._sentences[index] for index in chosen), tokens)

    def ids(self, text: str) -> np.ndarray:
        """A reply as it is sampled."""
        return np.array((*self._tokenizer.encode_untrusted(text), self._tokenizer.end_ids[0]), np.int32)


def make_workload(workflow: Workflow, tokenizer: ChatTokenizer, problem_count: int) -> Workload:
    """So many problems, with replies for `GROUP` rollouts of each."""
    writer = Writer(tokenizer, 0)
    passages = [Passage(str(n), f'"Page {n}"\n{writer.text(PASSAGE - 6)}') for n in range(2_000)]
    problems = []
    replies: dict[tuple[int, int], list[np.ndarray]] = {}
    for index in range(problem_count):
        question = f"{writer.text(16)}, and who is number {index}?"
        turns = int(writer.rng.choice(TURNS))
        if workflow in ("memalpha", "memagent"):
            asked = (StreamQuestion("Who?", "nobody"),) if workflow == "memalpha" else ()
            chunks = tuple(writer.text(CHUNK) for _ in range(max(1, turns - (workflow == "memagent"))))
            stream = Stream("synthetic", chunks, asked)
            problem = replace(Problem.of_stream(f"q{index}", stream), question=question, golden_answers=("nobody",))
        else:
            problem = Problem(f"q{index}", question, ("nobody",))
        problems.append(problem)
        for number in range(index * GROUP, (index + 1) * GROUP):
            rollout_turns = len(problem.stream.chunks) if problem.stream else int(writer.rng.choice(TURNS))
            contexts = scripts(workflow, writer, rollout_turns, number)
            for context, generations in enumerate(contexts):
                replies[number, context] = [writer.ids(text) for text in generations]
    return Workload(problems, replies, passages)


def scripts(workflow: Workflow, writer: Writer, turns: int, number: int) -> list[list[str]]:
    """The replies of a trajectory, by context."""

    def thought() -> str:
        return f" {writer.text(int(writer.rng.integers(*THOUGHT)))}. </think> "

    def call(turn: int) -> str:
        query = f"{writer.text(8)} {number} {turn}".replace('"', "").replace("\n", " ")
        return f'<tool_call> {{"name": "wikipedia_search", "arguments": {{"query": "{query}"}}}} </tool_call>'

    def memory() -> str:
        return f"<memory> {writer.text(MEMORY)} </memory>"

    answer = "\\boxed{nobody}"
    if workflow == "memsearcher":
        return [*([thought() + call(turn), memory()] for turn in range(turns - 1)), [thought() + answer]]
    if workflow == "react":
        return [[*(thought() + call(turn) for turn in range(min(turns, 5) - 1)), thought() + answer]]
    if workflow == "memagent":
        return [*([memory()] for _ in range(turns)), [thought() + answer]]
    insert = '✿FUNCTION✿: new_memory_insert\n✿ARGS✿: {{"memory_type": "{}", "content": "{}"}}\n✿RESULT✿'
    return [
        ["\n".join(insert.format(store, writer.text(MEMORY // 2)) for store in ("semantic", "episodic"))]
        for _ in range(turns)
    ]
