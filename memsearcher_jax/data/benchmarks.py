"""The paper's benchmarks and a held-out one by name, in FlashRAG's folder layout."""

from __future__ import annotations

from pathlib import Path

SPLITS = {
    "nq": ("train", "dev", "test"),
    "triviaqa": ("train", "dev", "test"),
    "popqa": ("test",),
    "hotpotqa": ("train", "dev"),
    "2wikimultihopqa": ("train", "dev"),
    "musique": ("train", "dev"),
    "bamboogle": ("test",),
    "web_questions": ("train", "test"),
}
"""The splits of each benchmark that have answers. Results are reported on the last one."""

BENCHMARKS = tuple(SPLITS)

HELD_OUT = ("web_questions",)
"""Benchmarks that the paper does not report, so that no choice was made by them."""

EXTENSIONS = (".jsonl", ".jsonl.gz", ".parquet")


def resolve(entry: str, split: str, root: str) -> tuple[Path, str]:
    """(path, benchmark or "") of the entry of the setting `data.<split>`, where `split` is "train" or "test".

    "nq" is that split of the benchmark; if the test split has no answers, "test" means the last split that has them.
    "nq:dev" names a split. These are files `<root>/<benchmark>/<split>.jsonl`, as FlashRAG publishes them. Any other
    entry is the path of a file.

    Raises:
      FileNotFoundError, ValueError: a one-line message that names the entry.
    """
    name, _, chosen = entry.partition(":")
    if name not in SPLITS:
        return Path(entry), ""
    splits = SPLITS[name]
    chosen = chosen or (splits[-1] if split == "test" else split)
    if chosen not in splits:
        raise ValueError(f"data.{split} {entry}: {name} has no split {chosen} with answers, only {', '.join(splits)}")
    if not root:
        raise ValueError(f"data.{split} {entry}: set data.root to the folder that holds {name}/{chosen}.jsonl")
    candidates = [Path(root, name, chosen + extension) for extension in EXTENSIONS]
    for path in candidates:
        if path.is_file():
            return path, name
    raise FileNotFoundError(f"{candidates[0]}: no such file (nor .jsonl.gz or .parquet): check data.root")
