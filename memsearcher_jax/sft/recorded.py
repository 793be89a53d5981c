"""Recorded trajectories as training examples: the ids and the loss masks are those of the files, unchanged."""

from __future__ import annotations

import hashlib
import math
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import numpy as np

from memsearcher_jax.logs.trajectories import read_trajectories
from memsearcher_jax.rl.rng import named_rng
from memsearcher_jax.runs.run_dir import is_run
from memsearcher_jax.sft.config import SFTConfig
from memsearcher_jax.tokenizer import ChatTokenizer
from memsearcher_jax.training.packing import TrainingExample
from memsearcher_jax.types import Context, ScoredTrajectory

OTHER_MODEL = "train the model that these trajectories were recorded with"


@dataclass(frozen=True)
class Recorded:
    """What one trajectory trains."""

    problem: tuple[str, str]  # id and question: datasets reuse each other's ids
    source: str  # name of the dataset; held-out trajectories are measured by it
    reward: float  # NaN: none
    file: Path
    line: int  # of the file, from 1
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
    schedule: str  # checksum of what each step trains, of whatever number of epochs, and of what is held out

    @property
    def steps(self) -> int:
        return self.config.epochs * len(self._epoch(0))

    def step(self, number: int) -> list[Recorded]:
        """The trajectories of a step."""
        epoch, place = divmod(number, len(self._epoch(0)))
        return self._epoch(epoch)[place]

    def _epoch(self, epoch: int) -> list[list[Recorded]]:
        size = self.config.trajectories_per_step
        if not size:
            return [list(of_file) for _, of_file in groupby(self.train, attrgetter("file"))]
        order = named_rng(self.seed, "trajectories", epoch).permutation(len(self.train))
        shuffled = [self.train[row] for row in order]
        return [shuffled[start : start + size] for start in range(0, len(shuffled), size)]


def load(config: SFTConfig, seed: int, tokenizer: ChatTokenizer, vocab_size: int, seq_len: int) -> RecordedData:
    """Reads all files into memory. Contexts without sampled tokens, or of more than `seq_len` tokens, are left out.

    `vocab_size`: of the model, which may sample ids that the tokenizer does not have. Raises FileNotFoundError or
    ValueError, in one line, for a file that is missing, damaged or recorded with another tokenizer, or if nothing is
    left to train on.
    """
    files = trajectory_files(config.trajectories)
    held_out_files = trajectory_files(config.held_out)
    if in_both := {file.resolve() for file in files} & {file.resolve() for file in held_out_files}:
        raise ValueError(f"{min(in_both)} is in sft.trajectories and in sft.held_out: leave it out of one of them")
    left_out = Counter[str]()
    reader = _Reader(tokenizer, vocab_size, seq_len, left_out)
    read = reader.read_files(files)
    rewarded = [recorded for recorded in read if recorded.reward >= config.min_reward]
    left_out["trajectories without a reward"] = sum(math.isnan(recorded.reward) for recorded in read)
    left_out["trajectories below sft.min_reward"] = sum(recorded.reward < config.min_reward for recorded in read)
    if held_out_files:
        held_out = reader.read_files(held_out_files)
        candidates = rewarded
    else:
        held_out, candidates = _split_by_problem(rewarded, config.held_out_share, seed)
    kept = _best_of_each_problem(candidates) if config.keep == "best" else candidates
    left_out["trajectories that are not the best of their problem"] = len(candidates) - len(kept)
    train = [recorded for recorded in kept if recorded.examples]
    if not train:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in (+left_out).items())
        raise ValueError(
            f"sft.trajectories leave nothing to train on ({reasons or 'all held out'}): lower sft.min_reward or "
            "sft.held_out_share, raise training.seq_len, or give other files"
        )
    file_checksums = {file: hashlib.sha256(file.read_bytes()) for file in (*files, *held_out_files)}
    checksum = hashlib.sha256(b"".join(file_checksum.digest() for file_checksum in file_checksums.values())).hexdigest()
    schedule = hashlib.sha256(f"{seed} {config.trajectories_per_step}".encode())
    for part in (train, held_out):
        schedule.update(f"\n{len(part)}".encode())
        for recorded in part:
            lengths = [len(example.ids) for example in recorded.examples]
            schedule.update(f"{file_checksums[recorded.file].hexdigest()} {recorded.line} {lengths}".encode())
    return RecordedData(config, seed, tuple(train), tuple(held_out), +left_out, checksum, schedule.hexdigest())


def _split_by_problem(
    recorded: Sequence[Recorded], held_out_share: float, seed: int
) -> tuple[list[Recorded], list[Recorded]]:
    """(held out, to train on): all trajectories of a problem are on one side."""
    held_out = []
    others = []
    for trajectory in recorded:
        is_held_out = _share(seed, trajectory.problem[0]) < held_out_share
        (held_out if is_held_out else others).append(trajectory)
    return held_out, others


def _best_of_each_problem(recorded: Sequence[Recorded]) -> list[Recorded]:
    """The trajectories that have the highest reward of their problem."""
    best_rewards: dict[tuple[str, str], float] = {}
    for trajectory in recorded:
        best_so_far = best_rewards.get(trajectory.problem, -math.inf)
        best_rewards[trajectory.problem] = max(trajectory.reward, best_so_far)
    return [trajectory for trajectory in recorded if trajectory.reward == best_rewards[trajectory.problem]]


def trajectory_files(entries: Sequence[str]) -> list[Path]:
    """The files that the entries of a setting name, each once; those of a folder in the order of their names."""
    files: dict[Path, Path] = {}  # by the resolved path
    for entry in map(Path, entries):
        for file in _files_of(entry):
            files[file.resolve()] = file
    return list(files.values())


def _files_of(entry: Path) -> list[Path]:
    if not entry.is_dir():
        return [entry]
    has_subfolder = is_run(entry) or (entry / "trajectories").is_dir()
    folder = entry / "trajectories" if has_subfolder else entry
    files = sorted([*folder.glob("*.jsonl.gz"), *folder.glob("*.jsonl")])
    if not files:
        raise FileNotFoundError(f"{folder} holds no trajectories: there is no .jsonl.gz or .jsonl file in it")
    return files


@dataclass(frozen=True)
class _Reader:
    """Reads trajectory files for one model."""

    tokenizer: ChatTokenizer
    vocab_size: int
    seq_len: int
    left_out: Counter[str]  # contexts that are not trained are counted here, by the reason

    def read_files(self, files: Sequence[Path]) -> list[Recorded]:
        recorded = []
        for file in files:
            for line, scored in enumerate(read_trajectories(file), start=1):
                recorded.append(self._recorded(file, line, scored))
        return recorded

    def _recorded(self, file: Path, line: int, scored: ScoredTrajectory) -> Recorded:
        where = f"{file}:{line}"
        trajectory = scored.trajectory
        examples = [_example(where, context, self.tokenizer, self.vocab_size) for context in trajectory.contexts]
        if examples and self.tokenizer.transcript(trajectory.contexts[-1].ids) != trajectory.transcript:
            raise ValueError(
                f"{where}: {OTHER_MODEL}: the tokenizer in {self.tokenizer.folder} does not read the recorded text in "
                "the recorded ids"
            )
        short = [example for example in examples if len(example.ids) <= self.seq_len]
        self.left_out["contexts longer than training.seq_len"] += len(examples) - len(short)
        trained = [example for example in short if np.any(example.sampled)]
        self.left_out["contexts without a sampled token"] += len(short) - len(trained)
        problem = trajectory.problem
        source = str(problem.metadata.get("source", ""))
        return Recorded((problem.id, problem.question), source, scored.reward, file, line, tuple(trained))


def _example(where: str, context: Context, tokenizer: ChatTokenizer, vocab_size: int) -> TrainingExample:
    ids = np.asarray(context.ids)
    if not len(ids) or context.sampled[0]:
        raise ValueError(f"{where}: a context must hold token ids, the first of which was not sampled")
    unknown = ids[(ids < 0) | (ids >= vocab_size)]
    if unknown.size:
        raise ValueError(f"{where}: {OTHER_MODEL}: model.vocab_size {vocab_size} has no token {unknown[0]}")
    return TrainingExample(
        ids.astype(np.int32),
        np.array(context.logprobs, np.float32),
        np.array(context.sampled, bool),
        advantage=1.0,
        version=context.version,
    )


def _share(seed: int, problem: str) -> float:
    """A number in [0, 1) that the seed and the problem decide."""
    return zlib.crc32(f"{seed} {problem}".encode()) / 2**32
