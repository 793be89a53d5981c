"""Recorded trajectories as training examples: the ids and the loss masks are those of the files, unchanged."""

from __future__ import annotations

import hashlib
import math
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from memsearcher_jax.logs.trajectories import read_trajectories
from memsearcher_jax.rl.rng import named_rng
from memsearcher_jax.runs.run_dir import is_run
from memsearcher_jax.sft.config import SFTConfig
from memsearcher_jax.tokenizer import ChatTokenizer
from memsearcher_jax.training.packing import TrainingExample
from memsearcher_jax.types import Context

OTHER_MODEL = "train the model that these trajectories were recorded with"


@dataclass(frozen=True)
class Recorded:
    """What one trajectory trains."""

    problem: tuple[str, str]  # id and question: datasets reuse each other's ids
    source: str  # name of the dataset; held-out trajectories are measured by it
    reward: float  # NaN: none
    file: Path
    examples: tuple[TrainingExample, ...]  # of its contexts that fit a row


@dataclass(frozen=True)
class RecordedData:
    """The trajectories of a run: those to train on, and those that are held out."""

    config: SFTConfig
    seed: int
    train: tuple[Recorded, ...]
    held_out: tuple[Recorded, ...]
    left_out: Counter[str]  # trajectories and contexts that are not trained, by the reason
    checksum: str  # of all files, hexadecimal

    @property
    def steps(self) -> int:
        return self.config.epochs * len(self._epoch(0))

    def step(self, number: int) -> list[Recorded]:
        """The trajectories of a step."""
        epoch, place = divmod(number, len(self._epoch(0)))
        return self._epoch(epoch)[place]

    def _epoch(self, epoch: int) -> list[list[Recorded]]:
        if not (size := self.config.trajectories_per_step):
            return [list(group) for _, group in groupby(self.train, lambda one: one.file)]
        order = named_rng(self.seed, "trajectories", epoch).permutation(len(self.train))
        return [[self.train[row] for row in order[start : start + size]] for start in range(0, len(order), size)]


def load(config: SFTConfig, seed: int, tokenizer: ChatTokenizer, vocab_size: int, seq_len: int) -> RecordedData:
    """Reads all files into memory. Contexts without sampled tokens, or of more than `seq_len` tokens, are left out.

    `vocab_size`: of the model, which may sample ids that the tokenizer does not have. Raises FileNotFoundError or
    ValueError, in one line, for a file that is missing, damaged or recorded with another tokenizer, or if nothing is
    left to train on.
    """
    left_out = Counter[str]()
    files, held_out_files = trajectory_files(config.trajectories), trajectory_files(config.held_out)
    if both := {file.resolve() for file in files} & {file.resolve() for file in held_out_files}:
        raise ValueError(f"{min(both)} is in sft.trajectories and in sft.held_out: leave it out of one of them")
    limits = vocab_size, seq_len
    train = [one for file in files for one in _read(file, tokenizer, *limits, left_out)]
    held_out = [one for file in held_out_files for one in _read(file, tokenizer, *limits, left_out)]
    rewarded = [one for one in train if one.reward >= config.min_reward]
    left_out["trajectories without a reward"] = sum(math.isnan(one.reward) for one in train)
    left_out["trajectories below sft.min_reward"] = sum(one.reward < config.min_reward for one in train)
    if not held_out_files:
        held_out = [one for one in rewarded if _share(seed, one.problem[0]) < config.held_out_share]
        rewarded = [one for one in rewarded if _share(seed, one.problem[0]) >= config.held_out_share]
    best: dict[tuple[str, str], float] = {}
    for one in rewarded:
        best[one.problem] = max(one.reward, best.get(one.problem, one.reward))
    kept = [one for one in rewarded if config.keep == "all" or one.reward == best[one.problem]]
    left_out["trajectories that are not the best of their problem"] = len(rewarded) - len(kept)
    kept = [one for one in kept if one.examples]
    if not kept:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in (+left_out).items())
        raise ValueError(
            f"sft.trajectories leave nothing to train on ({reasons or 'all held out'}): lower sft.min_reward or "
            "sft.held_out_share, raise training.seq_len, or give other files"
        )
    checksums = [hashlib.sha256(file.read_bytes()).digest() for file in (*files, *held_out_files)]
    checksum = hashlib.sha256(b"".join(checksums)).hexdigest()
    return RecordedData(config, seed, tuple(kept), tuple(held_out), +left_out, checksum)


def trajectory_files(entries: Sequence[str]) -> list[Path]:
    """The files that the entries of a setting name, each once; those of a folder in the order of their names."""
    files = []
    for entry in map(Path, entries):
        folder = entry / "trajectories" if is_run(entry) or (entry / "trajectories").is_dir() else entry
        found = sorted([*folder.glob("*.jsonl.gz"), *folder.glob("*.jsonl")]) if entry.is_dir() else [entry]
        if not found:
            raise FileNotFoundError(f"{folder} holds no trajectories: there is no .jsonl.gz or .jsonl file in it")
        files += found
    return list({file.resolve(): file for file in files}.values())


def _read(
    file: Path, tokenizer: ChatTokenizer, vocab_size: int, seq_len: int, left_out: Counter[str]
) -> list[Recorded]:
    recorded = []
    for row, scored in enumerate(read_trajectories(file), start=1):
        trajectory, where = scored.trajectory, f"{file}:{row}"
        examples = [_example(where, context, tokenizer, vocab_size) for context in trajectory.contexts]
        if examples and tokenizer.transcript(trajectory.contexts[-1].ids) != trajectory.transcript:
            raise ValueError(
                f"{where}: {OTHER_MODEL}: the tokenizer in {tokenizer.folder} does not read the recorded text in the "
                "recorded ids"
            )
        short = [example for example in examples if len(example.ids) <= seq_len]
        left_out["contexts longer than training.seq_len"] += len(examples) - len(short)
        trained = tuple(example for example in short if np.any(example.sampled))
        left_out["contexts without a sampled token"] += len(short) - len(trained)
        problem = trajectory.problem
        source = str(problem.metadata.get("source", ""))
        recorded.append(Recorded((problem.id, problem.question), source, scored.reward, file, trained))
    return recorded


def _example(where: str, context: Context, tokenizer: ChatTokenizer, vocab_size: int) -> TrainingExample:
    ids = np.asarray(context.ids)
    if not len(ids) or context.sampled[0]:
        raise ValueError(f"{where}: a context must hold token ids, the first of which was not sampled")
    if (unknown := ids[(ids < 0) | (ids >= vocab_size)]).size:
        raise ValueError(f"{where}: {OTHER_MODEL}: model.vocab_size {vocab_size} has no token {unknown[0]}")
    logprobs, sampled = np.array(context.logprobs, np.float32), np.array(context.sampled, bool)
    return TrainingExample(ids.astype(np.int32), logprobs, sampled, 1.0, version=context.version)


def _share(seed: int, problem: str) -> float:
    """A number in [0, 1) that the seed and the problem decide."""
    return zlib.crc32(f"{seed} {problem}".encode()) / 2**32
