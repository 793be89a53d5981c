"""The paper's benchmarks and others by name, in the folder layout of FlashRAG, and where their files come from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Benchmark:
    """A set of questions.

    Its licence is the one that its authors' public repository states; of BrowseComp-Plus, LoCoMo and WebQuestions that
    of code that uses it.
    """

    splits: tuple[str, ...]  # that have answers; results are reported on the last one
    licence: str
    source: str = "RUC-NLPIR/FlashRAG_datasets on the Hub"  # where its files come from
    files: tuple[str, ...] = ("{}.jsonl", "{}.jsonl.gz", "{}.parquet")  # of a split, the preferred one first
    in_paper: bool = False  # whether MemSearcher's paper reports it


BENCHMARKS = {
    "nq": Benchmark(("train", "dev", "test"), "CC BY-SA 3.0", in_paper=True),
    "triviaqa": Benchmark(("train", "dev", "test"), "Apache-2.0", in_paper=True),
    "popqa": Benchmark(("test",), "MIT", in_paper=True),
    "hotpotqa": Benchmark(("train", "dev"), "CC BY-SA 4.0", in_paper=True),
    "2wikimultihopqa": Benchmark(("train", "dev"), "Apache-2.0", in_paper=True),
    "musique": Benchmark(("train", "dev"), "CC BY 4.0", in_paper=True),
    "bamboogle": Benchmark(("test",), "MIT", in_paper=True),
    "web_questions": Benchmark(("train", "test"), "CC BY 4.0"),
    "browsecomp_plus": Benchmark(
        ("test",),
        "MIT; not to be published in plain text",
        "python -m examples.browsecomp_plus, from Tevatron/browsecomp-plus on the Hub",
    ),
    "memalpha": Benchmark(("train", "test"), "Apache-2.0", "YuWangX/Memalpha on the Hub"),
    "memoryagentbench": Benchmark(("train", "test"), "MIT", "YuWangX/Memalpha-Memoryagentbench on the Hub"),
    "longmemeval": Benchmark(
        ("oracle", "m", "s"),
        "MIT",
        "xiaowu0162/longmemeval-cleaned on the Hub",
        ("longmemeval_{}_cleaned.json", "longmemeval_{}.json"),
    ),
    "locomo": Benchmark(
        ("10",), "CC BY-NC 4.0: not for commercial use", "data/ of github.com/snap-research/locomo", ("locomo{}.json",)
    ),
}


def resolve(entry: str, split: str, root: str) -> tuple[Path, str]:
    """(path, benchmark or "") of the entry of the setting `data.<split>`, where `split` is "train" or "test".

    "nq" is that split of the benchmark; if the test split has no answers, "test" means the last split that has them.
    "nq:dev" names a split. The files are in `<root>/<benchmark>/`. Any other entry is the path of a file.

    Raises FileNotFoundError or ValueError, in one line that names the entry.
    """
    name, _, chosen = entry.partition(":")
    if name not in BENCHMARKS:
        return Path(entry), ""
    benchmark = BENCHMARKS[name]
    splits = benchmark.splits
    chosen = chosen or (splits[-1] if split == "test" else split)
    if chosen not in splits:
        raise ValueError(f"data.{split} {entry}: {name} has no split {chosen} with answers, only {', '.join(splits)}")
    names = [template.format(chosen) for template in benchmark.files]
    if not root:
        raise ValueError(f"data.{split} {entry}: set data.root to the folder that holds {name}/{names[0]}")
    for file in names:
        if (path := Path(root, name, file)).is_file():
            return path, name
    missing = f"{Path(root, name, names[0])}: no such file" + (f" (nor {' or '.join(names[1:])})" if names[1:] else "")
    origin = f"It comes from {benchmark.source}; licence: {benchmark.licence}"
    raise FileNotFoundError(f"{missing}: check data.root. {origin}")
