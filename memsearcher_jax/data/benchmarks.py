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
    "browsecomp_plus": ("test",),
    "longmemeval": ("oracle", "m", "s"),
    "locomo": ("10",),
}
"""The splits of each benchmark that have answers. Results are reported on the last one."""

BENCHMARKS = tuple(SPLITS)

HELD_OUT = ("web_questions", "browsecomp_plus", "longmemeval", "locomo")
"""Benchmarks that the paper does not report, so that no choice was made by them."""

SOURCES = {
    "browsecomp_plus": "python -m examples.browsecomp_plus makes it from Tevatron/browsecomp-plus, which must not be "
    "published in plain text",
    "longmemeval": "longmemeval_s.json is in xiaowu0162/longmemeval on the Hub, under MIT",
    "locomo": "locomo10.json is in data/ of github.com/snap-research/locomo, whose licence applies",
}
FLASHRAG = "RUC-NLPIR/FlashRAG_datasets on the Hub has it, under the licence of the benchmark"

EXTENSIONS = (".jsonl", ".jsonl.gz", ".parquet", ".json")


def resolve(entry: str, split: str, root: str) -> tuple[Path, str]:
    """(path, benchmark or "") of the entry of the setting `data.<split>`, where `split` is "train" or "test".

    "nq" is that split of the benchmark; if the test split has no answers, "test" means the last split that has them.
    "nq:dev" names a split. These are files `<root>/<benchmark>/<split>.jsonl`, as FlashRAG publishes them, or carry the
    benchmark's name too, as `longmemeval/longmemeval_s.json` and `locomo/locomo10.json`. Any other entry is the path of
    a file.

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
    stems = (chosen, f"{name}_{chosen}", f"{name}{chosen}")
    candidates = [Path(root, name, stem + extension) for stem in stems for extension in EXTENSIONS]
    for path in candidates:
        if path.is_file():
            return path, name
    source = SOURCES.get(name, FLASHRAG)
    raise FileNotFoundError(f"{candidates[0]}: no such file (nor .jsonl.gz or .parquet): check data.root; {source}")
