"""Where questions come from: the benchmarks by name, in FlashRAG's folders, or any file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SPLITS = {
    "nq": ("train", "dev", "test"),
    "triviaqa": ("train", "dev", "test"),
    "popqa": ("test",),
    "hotpotqa": ("train", "dev"),
    "2wikimultihopqa": ("train", "dev"),
    "musique": ("train", "dev"),
    "bamboogle": ("test",),
}
"""The paper's benchmarks and their splits with answers. The last is the one that numbers are reported on."""

BENCHMARKS = tuple(SPLITS)

ENDINGS = (".jsonl", ".jsonl.gz", ".parquet")


@dataclass(frozen=True)
class Source:
    """One file of questions. `name` is its benchmark's, or empty."""

    path: Path
    name: str = ""


def resolve(entry: str, split: str, root: str) -> Source:
    """What an entry of `data.train` or `data.test` means, the split being "train" or "test".

    "nq" is that split of the benchmark, or the one that is reported on in place of a missing test split; "nq:dev" is
    another of its splits. They are files `<root>/<name>/<split>.jsonl`, as FlashRAG publishes them. Everything else
    is the path of a file.

    Raises:
      FileNotFoundError, ValueError: one line that names the entry, and the way out.
    """
    name, _, chosen = entry.partition(":")
    if name not in SPLITS:
        return Source(Path(entry))
    splits = SPLITS[name]
    chosen = chosen or (splits[-1] if split == "test" else split)
    if chosen not in splits:
        raise ValueError(f"data.{split} {entry}: {name} has no questions for {chosen}, only for {', '.join(splits)}")
    if not root:
        raise ValueError(f"data.{split} {entry}: set data.root to the folder that holds {name}/{chosen}.jsonl")
    candidates = [Path(root, name, chosen + ending) for ending in ENDINGS]
    for path in candidates:
        if path.is_file():
            return Source(path, name)
    raise FileNotFoundError(f"{candidates[0]}: no such file (nor .jsonl.gz or .parquet): see data.root")
