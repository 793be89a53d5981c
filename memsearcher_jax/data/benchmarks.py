"""The paper's benchmarks and others by name, in the folder layout of FlashRAG, and where their files come from."""

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
    "memalpha": ("train", "test"),
    "memoryagentbench": ("train", "test"),
    "longmemeval": ("oracle", "m", "s"),
    "locomo": ("10",),
}
"""The splits of each benchmark that have answers. Results are reported on the last one."""

BENCHMARKS = tuple(SPLITS)

HELD_OUT = ("web_questions", "browsecomp_plus", "memalpha", "memoryagentbench", "longmemeval", "locomo")
"""Benchmarks that MemSearcher's paper does not report, so that no choice was made by them."""

FLASHRAG = "RUC-NLPIR/FlashRAG_datasets on the Hub"
SOURCES = {
    "nq": (FLASHRAG, "CC BY-SA 3.0"),
    "triviaqa": (FLASHRAG, "Apache-2.0"),
    "popqa": (FLASHRAG, "MIT"),
    "hotpotqa": (FLASHRAG, "CC BY-SA 4.0"),
    "2wikimultihopqa": (FLASHRAG, "Apache-2.0"),
    "musique": (FLASHRAG, "CC BY 4.0"),
    "bamboogle": (FLASHRAG, "MIT"),
    "web_questions": (FLASHRAG, "CC BY 4.0"),
    "browsecomp_plus": (
        "python -m examples.browsecomp_plus, from Tevatron/browsecomp-plus on the Hub",
        "MIT; not to be published in plain text",
    ),
    "memalpha": ("YuWangX/Memalpha on the Hub", "Apache-2.0"),
    "memoryagentbench": ("YuWangX/Memalpha-Memoryagentbench on the Hub", "MIT"),
    "longmemeval": ("xiaowu0162/longmemeval-cleaned on the Hub", "MIT"),
    "locomo": ("data/ of github.com/snap-research/locomo", "CC BY-NC 4.0: not for commercial use"),
}
"""Where the files of each benchmark come from, and its licence, as its authors' public repository states it or, for
BrowseComp-Plus, LoCoMo and WebQuestions, public code that uses it."""

FILES = {
    "longmemeval": ("longmemeval_{}_cleaned.json", "longmemeval_{}.json"),
    "locomo": ("locomo{}.json",),
}
"""The names of a split's file as it is published, the preferred one first, where they are not FLASHRAG_FILES."""
FLASHRAG_FILES = ("{}.jsonl", "{}.jsonl.gz", "{}.parquet")


def resolve(entry: str, split: str, root: str) -> tuple[Path, str]:
    """(path, benchmark or "") of the entry of the setting `data.<split>`, where `split` is "train" or "test".

    "nq" is that split of the benchmark; if the test split has no answers, "test" means the last split that has them.
    "nq:dev" names a split. The files are in `<root>/<benchmark>/`. Any other entry is the path of a file.

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
    names = [template.format(chosen) for template in FILES.get(name, FLASHRAG_FILES)]
    if not root:
        raise ValueError(f"data.{split} {entry}: set data.root to the folder that holds {name}/{names[0]}")
    for file in names:
        if (path := Path(root, name, file)).is_file():
            return path, name
    missing = f"{Path(root, name, names[0])}: no such file" + (f" (nor {' or '.join(names[1:])})" if names[1:] else "")
    source, licence = SOURCES[name]
    raise FileNotFoundError(f"{missing}: check data.root. It comes from {source}; licence: {licence}")
