"""Measures whether anything but the memory grows with the position in one very long stream, read by a small model.

python benchmarks/stream.py --checkpoint runs/NAME [--tokens N]                 # a run of tiny_memalpha
python benchmarks/stream.py --config tiny_memalpha --evaluation.temperature 1   # its initial policy

A rollout of one trajectory by the engine that training uses. The stream is stories of 130 chunks one after the other,
in which people recur. Prints a table: tokens of a context, processor time of a chunk and resident memory by the
position in the stream, the memory at the end, and what is answered right.
"""

from __future__ import annotations

import itertools
import resource
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from memsearcher_jax.config import RunConfig
from memsearcher_jax.data.synthetic.streams import SOURCE, Story, SyntheticStreamConfig, make_stories, select_statements
from memsearcher_jax.launch import cli, outputs, preconditions
from memsearcher_jax.types import Problem, StopReason, Stream, TokenCounter, Workflow

STORY_CHUNKS = 130
FIRST_SEED = 10_000_000  # of the stories; no policy has seen them
WARM_UP = 20  # chunks whose time and memory are not looked at


@dataclass(frozen=True)
class Read(cli.Command):
    """Read one long stream and report its cost by position."""

    tokens: int = 420_000
    """Tokens of the stream, at least; it ends with a whole story."""


def main(argv: Sequence[str]) -> None:
    with cli.one_line_errors():
        flags = cli.parse(Read, argv)
        preconditions.require_checkpoint(flags.run)
        if flags.run.data.synthetic != "streams":
            raise ValueError(
                "this benchmark reads streams: give --config tiny_memalpha, or a run of it as --checkpoint"
            )
    one_slot = replace(flags.run.sampling, slots=1, decode_batch_sizes=())
    numbers = measure(replace(flags.run, sampling=one_slot), flags.tokens)
    print("".join(f"| {name} | {value} |\n" for name, value in numbers.items()))
    outputs.write_json(flags.json, numbers)


def measure(config: RunConfig, tokens: int) -> dict[str, str]:
    """The table's lines."""
    # JAX takes seconds to import; --help and errors do not need it.
    from memsearcher_jax.rl import setup, state
    from memsearcher_jax.rl.rng import named_key
    from memsearcher_jax.rl.rollout import make_jobs

    problem = long_stream(config.data.streams, tokens, setup.open_tokenizer(config.model))
    with tempfile.TemporaryDirectory() as workspace:
        run = setup.prepare(config, Path(workspace), training=False, questions=[problem])
    driver, marks = setup.make_driver(run, evaluation=True), list[tuple[float, float]]()
    start = driver.start
    driver = replace(driver, start=lambda one: with_marks(start(one), marks))
    params, key = setup.publish(run, state.initial_params(run)), named_key(config.seed, "evaluate", 0)
    driver.engine.warm_up(params)
    (trajectory,), _ = driver.trajectories(make_jobs([problem], 1), params, key, lambda line: None)
    if trajectory.outcome.stop is not StopReason.STREAM_READ:
        raise RuntimeError(f"the stream was not read to its end: {trajectory.outcome.stop.value}")
    reward_fn = state.open_reward_fn(run, evaluation=True)
    counts, lengths = trajectory.outcome.counts, [len(context.ids) for context in trajectory.contexts]
    seconds = [(after - before) * 1e3 for (before, _), (after, _) in itertools.pairwise(marks[WARM_UP:])]
    resident = [f"{marks[place][1]:,.0f}" for place in np.linspace(WARM_UP, len(marks) - 1, 6).astype(int)]
    asked = [replace(problem.stream, questions=part) for part in thirds(problem.stream.questions)]
    parts = [replace(trajectory, problem=Problem.of_stream("long", part)) for part in asked]
    correct = [reward_fn([part], key, lambda line: None)[0].scores["accuracy"] for part in parts]
    return {
        "stream": f"{counts['stream_tokens']:,} tokens in {counts['chunks']:,} chunks",
        "memory at the end": f"{counts['memory_tokens']:,} tokens in {counts['memory_items']:,} items",
        "longest context": f"{max(lengths)} tokens",
        "tokens of a context, mean by thirds": by_thirds(lengths, statistics.mean),
        "processor ms of a chunk, median by thirds": by_thirds(seconds, statistics.median),
        "resident MB after the first chunks and each fifth": ", ".join(resident),
        f"{len(problem.stream.questions)} questions, answered right by thirds": ", ".join(f"{x:.2f}" for x in correct),
    }


def long_stream(settings: SyntheticStreamConfig, tokens: int, token_counter: TokenCounter) -> Problem:
    """Stories joined until they have `tokens` tokens, without the questions that two sentences answer."""
    stories, held = list[Story](), 0
    while held < tokens:
        story_settings = replace(settings, seed=FIRST_SEED + len(stories), train_chunks=STORY_CHUNKS)
        stories += make_stories(story_settings, 1)
        held += sum(map(token_counter.count, stories[-1].stream.chunks))
    sentences = [chunk for story in stories for chunk in story.sentences_C]
    occurrences = Counter(one.question.text for chunk in sentences for one in select_statements(chunk))
    questions = [question for story in stories for question in story.questions if occurrences[question.text] == 1]
    chunks = [chunk for story in stories for chunk in story.stream.chunks]
    return Problem.of_stream("long", Stream(SOURCE, tuple(chunks), tuple(questions)))


def with_marks(workflow: Workflow, marks: list[tuple[float, float]]) -> Workflow:
    """The same workflow; records processor seconds and resident megabytes before each of its contexts."""
    answer = None
    while True:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        marks.append((time.process_time(), resident / 1e6))
        try:
            request = workflow.send(answer)
        except StopIteration as end:
            return end.value
        answer = yield request


def thirds(values: Sequence[Any]) -> list[Any]:
    """Three parts of nearly the same length."""
    cuts = [len(values) * part // 3 for part in range(4)]
    return [values[begin:end] for begin, end in itertools.pairwise(cuts)]


def by_thirds(values: Sequence[float], mean: Callable[[Sequence[float]], float]) -> str:
    return ", ".join(f"{mean(part):.1f}" for part in thirds(values))


if __name__ == "__main__":
    cli.run(main)
