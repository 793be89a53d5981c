"""Questions from files or from the embedded world, and the endless stream of them that training takes from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from memsearcher_jax.agent.types import Problem, Stream
from memsearcher_jax.data.sources import resolve
from memsearcher_jax.data.stream_world import StreamConfig, make_streams
from memsearcher_jax.data.world import WorldConfig, make_world


@dataclass(frozen=True)
class DataConfig:
    """Where the questions come from. With neither train nor test files, they are made from a seed."""

    train: tuple[str, ...] = ()
    """Training questions: names of benchmarks in data.root (the paper: nq hotpotqa), or files in FlashRAG's layout
    (JSONL with id, question, golden_answers, plain or .gz) or Search-R1's (.parquet)."""
    test: tuple[str, ...] = ()
    """Test questions, likewise; a name means the split that numbers are reported on, name:split another."""
    root: str = ""
    """Folder of the benchmarks as FlashRAG publishes them: nq/train.jsonl and so on."""
    malformed: Literal["refuse", "skip"] = "refuse"
    """A row that cannot be used ends the command (refuse), or is left out and counted (skip)."""
    made: Literal["world", "streams"] = "world"
    """Without files: questions about the embedded world, or streams of chunks for agent.workflow memalpha."""
    world: WorldConfig = field(default_factory=WorldConfig)
    """The embedded world: its seed and its size."""
    streams: StreamConfig = field(default_factory=StreamConfig)
    """The streams: their seed, number and lengths."""

    @property
    def embedded(self) -> bool:
        return not (self.train or self.test)


@dataclass(frozen=True)
class Problems:
    """What a run trains and is tested on."""

    train: Sequence[Problem]
    test: Sequence[Problem]
    skipped: tuple[str, ...] = ()  # one line for each row that was left out, of the first thousand of a file
    skipped_count: int = 0


def load(config: DataConfig, directory: Path) -> Problems:
    """Read and check every row, and open the questions from a dataset under `directory`, written if it is not there.

    Raises:
      FileNotFoundError, ValueError: one line that names the file, and the line where there is one.
    """
    # Imported here: it takes most of a second, and a config must read quickly.
    from memsearcher_jax.data.builder import Mixture, store, store_file

    if config.embedded:
        if config.made == "streams":
            splits = make_streams(config.streams)
        else:
            world = make_world(config.world)
            splits = {"train": world.train, "test": world.test}
        stored = store(splits, directory)
        return Problems(stored.get("train", ()), stored.get("test", ()))
    sources = {
        split: [resolve(entry, split, config.root) for entry in entries]
        for split, entries in (("train", config.train), ("test", config.test))
    }
    skip = config.malformed == "skip"
    files = {split: [store_file(one, directory, skip=skip) for one in several] for split, several in sources.items()}
    both = (*files["train"], *files["test"])
    return Problems(
        Mixture(tuple(file.problems for file in files["train"])),
        Mixture(tuple(file.problems for file in files["test"])),
        tuple(line for file in both for line in file.skipped),
        sum(file.skipped_count for file in both),
    )


def check_streams(problems: Iterable[Problem], count_tokens: Callable[[str], int], chunk: int, question: int) -> None:
    """Raise ValueError that names the first problem that is no stream, or has a chunk or a question over its budget.

    `chunk` and `question` are those budgets, in tokens.
    """
    for problem in problems:
        stream = Stream.of(problem)
        texts = {"chunk": (stream.chunks, chunk), "question": ([one.text for one in stream.questions], question)}
        for name, (held, limit) in texts.items():
            longest = max(map(count_tokens, held))
            if longest > limit:
                setting = "memalpha.chunk_tokens" if name == "chunk" else "agent.question_tokens"
                raise ValueError(
                    f'stream "{problem.id}" has a {name} of {longest} tokens and the budget is {limit}: raise '
                    f"{setting} (and what holds it, such as sampling.context_tokens) or leave the stream out"
                )


def check_questions(problems: Iterable[Problem], count_tokens: Callable[[str], int], limit: int) -> None:
    """Raise ValueError that names the first question of more than `limit` tokens, and says how many there are."""
    counts = ((problem.id, count_tokens(problem.question)) for problem in problems)
    too_long = [(identity, tokens) for identity, tokens in counts if tokens > limit]
    if too_long:
        identity, tokens = too_long[0]
        such = f" ({len(too_long)} such questions)" if len(too_long) > 1 else ""
        raise ValueError(
            f'question "{identity}" has {tokens} tokens and the budget is {limit}{such}: '
            "raise agent.question_tokens, shorten it or leave it out"
        )


@dataclass(frozen=True)
class ProblemStream:
    """Problems without end: each epoch holds every one once, in an order that (seed, epoch) decides.

    There is no cursor inside. Whoever takes knows the position, and a resumed run goes on from the number it saved.
    """

    problems: Sequence[Problem]
    seed: int

    def __post_init__(self) -> None:
        if not self.problems:
            raise ValueError("there are no problems to draw from: set data.train to a file of questions")

    def take(self, position: int, count: int) -> list[Problem]:
        """The `count` problems from `position` on, counted from the start of the first epoch."""
        return self.share(position, count, host=0, hosts=1)

    def share(self, position: int, count: int, *, host: int, hosts: int) -> list[Problem]:
        """What one of several hosts gets of `take(position, count)`; the hosts' shares in order are the whole.

        Positions count the problems of all hosts together: a run goes on from the same one on any number of hosts.
        """
        if not 0 <= host < hosts:
            raise ValueError(f"host {host} is not one of {hosts} hosts")
        start, stop = (position + count * one // hosts for one in (host, host + 1))
        size = len(self.problems)
        taken: list[Problem] = []
        while (at := start + len(taken)) < stop:
            epoch, first = divmod(at, size)
            order = np.random.default_rng((self.seed, epoch)).permutation(size)
            taken += [self.problems[int(row)] for row in order[first : first + stop - at]]
        return taken
