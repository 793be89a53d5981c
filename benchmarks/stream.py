"""One very long stream, read by the small model: does anything grow with the position but the memory itself?

python benchmarks/stream.py --checkpoint runs/NAME [--tokens N]                 # a run of tiny_memalpha
python benchmarks/stream.py --config tiny_memalpha --evaluation.temperature 1   # its start, which stores a part

A rollout of one trajectory by the engine that training uses. The stream is stories of 130 chunks one after the other,
in which people recur. Prints a table: tokens of a context, time of a chunk and resident memory by the position in the
stream, what is held at the end, how long the index of the memory takes, and what is answered right.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "launch"))

import cli

from memsearcher_jax.agent.memalpha_search import index
from memsearcher_jax.agent.memalpha_view import LISTS, Reader
from memsearcher_jax.agent.types import Problem, Ruler, Stop, Stream, Trajectory, Workflow
from memsearcher_jax.config import RunConfig
from memsearcher_jax.data.stream_world import SOURCE, Story, StreamConfig, make_stories

STORY_CHUNKS = 130
FIRST_SEED = 10_000_000  # of the stories; no policy has seen them
ITEMS = 4  # that an index has to follow, as many as a chunk adds
WARM_UP = 20  # chunks whose time and memory are not looked at
PAGE = 4_096


@dataclass(frozen=True)
class Read(cli.Command):
    """Read one long stream and tell what that takes, by the position in it."""

    tokens: int = 420_000
    """Tokens of the stream, at least; it ends with a whole story."""

    def adjusted(self) -> Read:
        """One slot, which is enough for one trajectory."""
        run = self.run
        if run.agent.workflow != "memalpha":
            raise ValueError("this reads a stream: give --config tiny_memalpha, or --checkpoint with a run of it")
        return replace(self, run=replace(run, sampling=replace(run.sampling, slots=1, rows_per_call=1, decode_rows=())))


@dataclass(frozen=True)
class Long:
    """A stream, and by the text of each of its questions the sentence that answers it."""

    problem: Problem
    sentences: dict[str, str]


@dataclass(frozen=True)
class Mark:
    """What was seen when a chunk was about to be read."""

    began: float  # on the wall clock: the reply to the chunk before is there
    host_seconds: float  # of the processor, to run its calls and to show the memory that they left
    resident: int  # bytes of the process


def main(argv: Sequence[str]) -> None:
    with cli.one_line_errors():
        flags = cli.parse(Read, argv)
        cli.refuse_resume(flags, "a reading")
        cli.need_weights(flags)
    numbers = measure(flags.run, flags.tokens)
    print("".join(f"| {name} | {value} |\n" for name, value in numbers.items()))
    cli.write_json(flags.json, numbers)


def measure(config: RunConfig, tokens: int) -> dict[str, str]:
    """The table's lines."""
    # JAX takes seconds to load; --help and a wrong flag are answered without it.
    from memsearcher_jax.rl import build, start
    from memsearcher_jax.rl.keys import key_for

    tokenizer = build.open_tokenizer(config.model)
    long = long_stream(config.data.streams, tokens, tokenizer)
    with tempfile.TemporaryDirectory() as workspace:
        run = build.prepare(config, Path(workspace), training=False, asked=[long.problem])
    driver, marks = build.make_driver(run, evaluation=True), list[Mark]()
    make = driver.make_workflow
    driver = replace(driver, make_workflow=lambda one: watched(make(one), marks))
    params, key = build.sampler_params(run, start.starting_params(run)), key_for(config.seed, "evaluate", 0)
    driver.engine.warm_up(params)
    trajectory = read(driver, long.problem, params, key)
    exam = start.open_exam(run, evaluation=True)
    reader = Reader(Stream.of(long.problem), trajectory.outcome.memory, config.memalpha, tokenizer)
    return (
        of_contexts(trajectory)
        | of_chunks(marks)
        | of_memory(trajectory, marks)
        | of_index(trajectory, reader)
        | of_questions(long, reader)
        | of_answers(trajectory, lambda one: exam.grade([one], key, lambda _: None)[0].scores["accuracy"])
    )


def long_stream(settings: StreamConfig, tokens: int, ruler: Ruler) -> Long:
    """Stories, joined until there are so many tokens. What can be asked of two sentences is not asked."""
    stories, held = list[Story](), 0
    while held < tokens:
        story_settings = replace(settings, seed=FIRST_SEED + len(stories), train_chunks=STORY_CHUNKS)
        stories += make_stories(story_settings, 1)
        held += sum(map(ruler.count, stories[-1].stream.chunks))
    told = [one for story in stories for chunk in story.sentences_C for one in chunk if one.question]
    times = Counter(one.question.text for one in told)
    questions = [one for story in stories for one in story.questions if times[one.text] == 1]
    chunks = [chunk for story in stories for chunk in story.stream.chunks]
    problem = Stream(SOURCE, tuple(chunks), tuple(questions)).problem("long")
    return Long(problem, {one.question.text: one.text for one in told})


def watched(workflow: Workflow, marks: list[Mark]) -> Workflow:
    """The same workflow; before each of its contexts a look at the clocks and at the memory of the process."""
    answer = None
    while True:
        began, busy = time.perf_counter(), time.thread_time()
        try:
            request = workflow.send(answer)
        except StopIteration as end:
            return end.value
        marks.append(Mark(began, time.thread_time() - busy, resident_bytes()))
        answer = yield request


def read(driver: Any, problem: Problem, params: Any, key: Any) -> Trajectory:
    """The trajectory of the whole stream. Raises RuntimeError if it ends before."""
    from memsearcher_jax.rl.rollout import jobs_for

    ((_, trajectory),) = driver.run(jobs_for([problem], 1), params, key)
    if trajectory.outcome.stop is not Stop.REMEMBERED:
        raise RuntimeError(f"the stream was not read to its end: {trajectory.outcome.stop.value}")
    return trajectory


def of_contexts(trajectory: Trajectory) -> dict[str, str]:
    counts, lengths = trajectory.outcome.counts, [len(context.ids) for context in trajectory.contexts]
    return {
        "stream": f"{counts['stream_tokens']:,} tokens in {counts['chunks']:,} chunks",
        "memory at the end": f"{counts['memory_tokens']:,} tokens in {counts['memory_items']:,} items",
        "tokens of a context, mean of the first and of the last third": told(lengths, statistics.mean, "{:.1f}"),
        "longest context": f"{max(lengths)} tokens",
    }


def of_chunks(marks: Sequence[Mark]) -> dict[str, str]:
    whole = [(after.began - before.began) * 1e3 for before, after in itertools.pairwise(marks[WARM_UP:])]
    host = [mark.host_seconds * 1e3 for mark in marks[WARM_UP:]]
    return {
        "time of a chunk, median of the first and of the last third": told(whole, statistics.median, "{:.1f} ms"),
        "of it the workflow on the host": told(host, statistics.median, "{:.2f} ms"),
    }


def of_memory(trajectory: Trajectory, marks: Sequence[Mark]) -> dict[str, str]:
    """What the process grew by while it read, beside the sizes of what it holds of that."""
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
    growth = ", ".join(f"{(after - before) / 1e6:.1f}" for before, after in itertools.pairwise(fifths))
    return {
        "resident memory after the first chunks and at the end": f"{fifths[0] / 1e6:,.0f}, {fifths[-1] / 1e6:,.0f} MB",
        "by which it grew in each fifth of the stream": f"{growth} MB",
        "what the trajectory holds of that": f"{sum(sizes.values()) * read_part / 1e6:.1f} MB",
        **{f"- {name}": f"{size / 1e6:.1f} MB" for name, size in sizes.items()},
    }


def of_index(trajectory: Trajectory, reader: Reader) -> dict[str, str]:
    memory = trajectory.outcome.memory
    texts = [item.text for item in (*memory.semantic, *memory.episodic)]
    followed = index(texts[:-ITEMS])
    questions = reader.stream.questions
    reader.about(questions[0].text)  # builds its indices
    return {
        "the index of all items anew": f"{milliseconds(lambda: index(texts)):.1f} ms",
        f"{ITEMS} items more in it": f"{milliseconds(lambda: index(texts, followed)):.1f} ms",
        "retrieval for one question": f"{statistics.median(asked_in(reader, questions)):.1f} ms",
    }


def asked_in(reader: Reader, questions: Sequence[Any]) -> list[float]:
    return [milliseconds(lambda text=question.text: reader.about(text)) for question in questions]


def of_questions(long: Long, reader: Reader) -> dict[str, str]:
    """Of how many questions the sentence that answers them is in the memory, and of how many it is found."""
    stored = {item.text for store in LISTS for item in reader.memory.items(store)}
    parts = thirds(reader.stream.questions)
    sentences = [[long.sentences[question.text] for question in part] for part in parts]
    found = [
        [sentence in reader.about(question.text) for question, sentence in zip(part, some, strict=True)]
        for part, some in zip(parts, sentences, strict=True)
    ]
    about = f"of {len(reader.stream.questions)} questions, about each third of the stream,"
    return {
        f"{about} what answers them is in the memory word for word": shares(
            [[sentence in stored for sentence in some] for some in sentences]
        ),
        "and is found": shares(found),
    }


def of_answers(trajectory: Trajectory, grade: Callable[[Trajectory], float]) -> dict[str, str]:
    """Questions are in the order of what they ask about."""
    stream = Stream.of(trajectory.problem)
    asked = [replace(stream, questions=part) for part in thirds(stream.questions)]
    scores = [grade(replace(trajectory, problem=one.problem("long"))) for one in asked]
    return {"and is answered": ", ".join(f"{score:.2f}" for score in scores)}


def thirds(values: Sequence[Any]) -> list[Any]:
    """Three parts of nearly the same length."""
    cuts = [len(values) * part // 3 for part in range(4)]
    return [values[begin:end] for begin, end in itertools.pairwise(cuts)]


def shares(several: Sequence[Sequence[bool]]) -> str:
    return ", ".join(f"{statistics.fmean(some):.2f}" for some in several)


def told(values: Sequence[float], mean: Callable[[Sequence[float]], float], form: str) -> str:
    """A mean of the first third and one of the last."""
    first, _, last = thirds(values)
    return f"{form.format(mean(first))}, {form.format(mean(last))}"


def milliseconds(do: Callable[[], object]) -> float:
    """Of the processor."""
    began = time.process_time()
    do()
    return (time.process_time() - began) * 1e3


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def held_bytes(value: object, seen: set[int]) -> int:
    """Bytes of a value and of all that it reaches and was not `seen` before."""
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
