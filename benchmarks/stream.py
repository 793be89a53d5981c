"""Measures whether anything but the memory grows with the position in one very long stream, read by a small model.

python benchmarks/stream.py --checkpoint runs/NAME [--tokens N] [--items N]     # a run of tiny_memalpha
python benchmarks/stream.py --config tiny_memalpha --evaluation.temperature 1   # its initial policy

A rollout of one trajectory by the engine that training uses. The stream is stories of 130 chunks one after the other,
in which people recur. Prints a table: tokens of a context, processor time of a chunk and resident memory by the
position in the stream, what is held at the end, how long the index of the memory takes, and what is answered right.
"""

from __future__ import annotations

import gc
import itertools
import resource
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from memsearcher_jax.agent.memalpha.memory import ITEM_STORES, Memory
from memsearcher_jax.agent.memalpha.search import BM25Index
from memsearcher_jax.agent.memalpha.view import EvidenceRetriever
from memsearcher_jax.agent.memalpha.workflow import memalpha
from memsearcher_jax.agent.registry import WORKFLOWS
from memsearcher_jax.config import RunConfig
from memsearcher_jax.data.synthetic.streams import SOURCE, Story, SyntheticStreamConfig, make_stories, select_statements
from memsearcher_jax.launch import cli, outputs
from memsearcher_jax.types import Problem, StopReason, Stream, TokenCounter, Trajectory, Workflow

STORY_CHUNKS = 130
FIRST_SEED = 10_000_000  # of the stories; no policy has seen them
WARM_UP = 20  # chunks whose time and memory are not looked at


@dataclass(frozen=True)
class Read(cli.Command):
    """Read one long stream and report its cost by position."""

    tokens: int = 420_000
    """Tokens of the stream, at least; it ends with a whole story."""
    items: int = 0
    """Items of other statements that the memory holds at the beginning, which shows what its size costs."""

    def with_settings(self) -> Read:
        """One slot, which is enough for one trajectory."""
        run = self.run
        if not WORKFLOWS[run.agent.workflow].reads_streams:
            raise ValueError(
                "this benchmark reads streams: give --config tiny_memalpha, or a run of it as --checkpoint"
            )
        return replace(self, run=replace(run, sampling=replace(run.sampling, slots=1, decode_batch_sizes=())))


@dataclass(frozen=True)
class LongStream:
    """A stream, and by the text of each of its questions the sentence that answers it."""

    problem: Problem
    sentences: dict[str, str]


@dataclass(frozen=True)
class ChunkMeasurement:
    """What was seen when a chunk was about to be read."""

    began: float  # processor seconds of all threads: the reply to the chunk before is there
    host_seconds: float  # of the processor, to run its calls and to show the memory that they left
    resident: int  # bytes of the process


def main(argv: Sequence[str]) -> None:
    with cli.one_line_errors():
        flags = cli.parse(Read, argv)
        cli.require_checkpoint(flags)
    numbers = measure(flags.run, flags.tokens, flags.items)
    print("".join(f"| {name} | {value} |\n" for name, value in numbers.items()))
    outputs.write_json(flags.json, numbers)


def measure(config: RunConfig, tokens: int, items: int) -> dict[str, str]:
    """The table's lines."""
    # JAX takes seconds to import; --help and errors do not need it.
    from memsearcher_jax.rl import init_state, setup
    from memsearcher_jax.rl.rng import named_key

    tokenizer = setup.open_tokenizer(config.model)
    long = long_stream(config.data.streams, tokens, tokenizer)
    with tempfile.TemporaryDirectory() as workspace:
        run = setup.prepare(config, Path(workspace), training=False, questions=[long.problem])
    driver, marks = setup.make_driver(run, evaluation=True), list[ChunkMeasurement]()
    settings = {"agent": config.agent, "config": config.memalpha, "prompts": run.prompts, "token_counter": tokenizer}
    start = partial(memalpha, **settings, initial=memory_of(items, config.memalpha.core_tokens, tokenizer))
    driver = replace(driver, make_workflow=lambda one: with_marks(start(one.stream), marks))
    params, key = setup.publish(run, init_state.initial_params(run)), named_key(config.seed, "evaluate", 0)
    driver.executor.engine.warm_up(params)
    trajectory = read(driver, long.problem, params, key)
    reward_fn = init_state.open_reward_fn(run, evaluation=True)
    retriever = EvidenceRetriever(long.problem.stream, trajectory.outcome.memory, config.memalpha, tokenizer)
    return (
        context_rows(trajectory)
        | time_rows(marks)
        | memory_rows(trajectory, marks)
        | index_rows(trajectory, retriever)
        | question_rows(long, retriever)
        | answer_rows(trajectory, lambda one: reward_fn([one], key, lambda line: None)[0].scores["accuracy"])
    )


def long_stream(settings: SyntheticStreamConfig, tokens: int, token_counter: TokenCounter) -> LongStream:
    """Stories joined until they have `tokens` tokens, without the questions that two sentences answer."""
    stories, held = list[Story](), 0
    while held < tokens:
        story_settings = replace(settings, seed=FIRST_SEED + len(stories), train_chunks=STORY_CHUNKS)
        stories += make_stories(story_settings, 1)
        held += sum(map(token_counter.count, stories[-1].stream.chunks))
    statements = [
        statement for story in stories for chunk in story.sentences_C for statement in select_statements(chunk)
    ]
    occurrences = Counter(statement.question.text for statement in statements)
    questions = [question for story in stories for question in story.questions if occurrences[question.text] == 1]
    chunks = [chunk for story in stories for chunk in story.stream.chunks]
    problem = Problem.of_stream("long", Stream(SOURCE, tuple(chunks), tuple(questions)))
    return LongStream(problem, {statement.question.text: statement.text for statement in statements})


def memory_of(items: int, core_tokens: int, token_counter: TokenCounter) -> Memory:
    """A memory with an empty core, and items in both stores."""
    memory = Memory(core_budget=core_tokens)
    for number in range(items):
        statement = f"On {1 + number % 28} May 2014, number {number} moved to Boston."
        memory, _ = memory.insert(ITEM_STORES[number % 2], statement, token_counter)
    return memory


def with_marks(workflow: Workflow, marks: list[ChunkMeasurement]) -> Workflow:
    """The same workflow; records time and resident memory before each of its contexts."""
    answer = None
    while True:
        began, busy = time.process_time(), time.thread_time()
        try:
            request = workflow.send(answer)
        except StopIteration as end:
            return end.value
        marks.append(ChunkMeasurement(began, time.thread_time() - busy, resident_bytes()))
        answer = yield request


def read(driver: Any, problem: Problem, params: Any, key: Any) -> Trajectory:
    """The trajectory of the stream. Raises RuntimeError if the stream is not read to its end."""
    from memsearcher_jax.rl.rollout import make_jobs

    ((_, trajectory),) = driver.run(make_jobs([problem], 1), params, key)
    if trajectory.outcome.stop is not StopReason.STREAM_READ:
        raise RuntimeError(f"the stream was not read to its end: {trajectory.outcome.stop.value}")
    return trajectory


def context_rows(trajectory: Trajectory) -> dict[str, str]:
    counts, lengths = trajectory.outcome.counts, [len(context.ids) for context in trajectory.contexts]
    return {
        "stream": f"{counts['stream_tokens']:,} tokens in {counts['chunks']:,} chunks",
        "memory at the end": f"{counts['memory_tokens']:,} tokens in {counts['memory_items']:,} items",
        "tokens of a context, mean of the first and of the last third": first_and_last_third(
            lengths, statistics.mean, "{:.1f}"
        ),
        "longest context": f"{max(lengths)} tokens",
    }


def time_rows(marks: Sequence[ChunkMeasurement]) -> dict[str, str]:
    whole = [(after.began - before.began) * 1e3 for before, after in itertools.pairwise(marks[WARM_UP:])]
    host = [mark.host_seconds * 1e3 for mark in marks[WARM_UP:]]
    return {
        "processor time of a chunk, median of the first and of the last third": first_and_last_third(
            whole, statistics.median, "{:.1f} ms"
        ),
        "host part of it, the workflow": first_and_last_third(host, statistics.median, "{:.2f} ms"),
    }


def memory_rows(trajectory: Trajectory, marks: Sequence[ChunkMeasurement]) -> dict[str, str]:
    """Growth of the process while it reads, and the sizes of the values that explain it."""
    outcome, seen = trajectory.outcome, set[int]()
    held_bytes(trajectory.problem, seen)  # was there before
    sizes = {
        "items and core": held_bytes(outcome.memory, seen),
        "calls and what became of them": held_bytes((outcome.calls_C, outcome.results_C), seen),
        "replies and what they were shown": held_bytes(outcome.turns, seen),
        "ids and log-probabilities of the contexts": held_bytes(trajectory.contexts, seen),
    }
    fifths = [marks[place].resident for place in np.linspace(WARM_UP, len(marks) - 1, 6).astype(int)]
    read_part = (len(marks) - WARM_UP) / len(marks)
    held = sum(sizes.values()) * read_part
    growth = ", ".join(f"{(after - before) / 1e6:.1f}" for before, after in itertools.pairwise(fifths))
    return {
        "resident memory after the first chunks and at the end": f"{fifths[0] / 1e6:,.0f}, {fifths[-1] / 1e6:,.0f} MB",
        "growth in each fifth of the stream": f"{growth} MB",
        "part of this growth that the trajectory's objects account for": f"{held / 1e6:.1f} MB",
        **{f"- {name}": f"{size / 1e6:.1f} MB" for name, size in sizes.items()},
    }


def index_rows(trajectory: Trajectory, retriever: EvidenceRetriever) -> dict[str, str]:
    memory = trajectory.outcome.memory
    texts = [item.text for item in (*memory.semantic, *memory.episodic)]
    questions = retriever.stream.questions
    retriever.retrieve(questions[0].text)  # builds its indices
    retrieval = [milliseconds(partial(retriever.retrieve, question.text)) for question in questions]
    return {
        "index of all items": f"{milliseconds(lambda: BM25Index.build(texts)):.1f} ms",
        "retrieval for one question": f"{statistics.median(retrieval):.1f} ms",
    }


def question_rows(long: LongStream, retriever: EvidenceRetriever) -> dict[str, str]:
    """Fractions of questions whose answering sentence is in the memory, and is retrieved."""
    stored = {item.text for store in ITEM_STORES for item in retriever.memory.items(store)}

    def shares(is_found: Callable[[str], bool]) -> str:
        by_third = thirds([is_found(question.text) for question in retriever.stream.questions])
        return ", ".join(f"{statistics.fmean(found):.2f}" for found in by_third)

    about = f"of {len(retriever.stream.questions)} questions, by thirds of the stream:"
    return {
        f"{about} the answering sentence is in the memory word for word": shares(
            lambda text: long.sentences[text] in stored
        ),
        "and is retrieved": shares(lambda text: long.sentences[text] in retriever.retrieve(text)),
    }


def answer_rows(trajectory: Trajectory, grade: Callable[[Trajectory], float]) -> dict[str, str]:
    """Questions are in the order of what they ask about."""
    stream = trajectory.problem.stream
    asked = [replace(stream, questions=part) for part in thirds(stream.questions)]
    scores = [grade(replace(trajectory, problem=Problem.of_stream("long", one))) for one in asked]
    return {"and is answered correctly": ", ".join(f"{score:.2f}" for score in scores)}


def thirds(values: Sequence[Any]) -> list[Any]:
    """Three parts of nearly the same length."""
    cuts = [len(values) * part // 3 for part in range(4)]
    return [values[begin:end] for begin, end in itertools.pairwise(cuts)]


def first_and_last_third(values: Sequence[float], mean: Callable[[Sequence[float]], float], template: str) -> str:
    """The mean of the first third and of the last."""
    first, _, last = thirds(values)
    return f"{template.format(mean(first))}, {template.format(mean(last))}"


def milliseconds(do: Callable[[], object]) -> float:
    """Processor time of a call."""
    began = time.process_time()
    do()
    return (time.process_time() - began) * 1e3


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def held_bytes(value: object, seen: set[int]) -> int:
    """Bytes of a value and of everything that it references and that is not in `seen`."""
    total, waiting = 0, [value]
    while waiting:
        one = waiting.pop()
        if id(one) not in seen and not isinstance(one, type):
            seen.add(id(one))
            total += sys.getsizeof(one)
            waiting += gc.get_referents(one)
    return total


if __name__ == "__main__":
    cli.run(main)
