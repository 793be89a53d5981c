"""Builds the index of a corpus of any size. After a kill, the same command continues the build.

python launch/build_index.py --retrieval.corpus FILE --retrieval.encoder DIR --out DIR
python launch/build_index.py ... --embeddings e5_Flat.index     # published vectors, nothing is embedded
python launch/build_index.py ... --shard 3/8                    # one of eight hosts on a shared disk; 0/8 finishes
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from memsearcher_jax.launch import cli, outputs
from memsearcher_jax.logs.metric_names import MetricName
from memsearcher_jax.logs.progress import Progress
from memsearcher_jax.ranges import Count
from memsearcher_jax.retrieval import scann_index
from memsearcher_jax.retrieval.builder.build_dir import MANIFEST, check_absent, staging_dir
from memsearcher_jax.retrieval.builder.index_builder import BuildShard, prepare_corpus
from memsearcher_jax.retrieval.config import HASHING, RetrievalConfig
from memsearcher_jax.retrieval.hashing_encoder import TextEncoder
from memsearcher_jax.retrieval.index import verify_index
from memsearcher_jax.retrieval.search import build_dense_index
from memsearcher_jax.retrieval.vector_files import read_embeddings
from memsearcher_jax.runtime import hub

TERMINAL_SECONDS, LOG_SECONDS = 0.5, 15.0  # between progress updates, on a terminal and in a log


@dataclass(frozen=True)
class BuildIndex(cli.Command):
    """Build the index of a corpus of any size."""

    out: cli.Directory = None
    """Directory to write; the same command continues an interrupted build."""
    embeddings: cli.File = None
    """Vectors made by the same encoder, in the order of the corpus: .npy, or a flat FAISS index."""
    shard_rows: Count = 16_384
    """Passages in one file of vectors; a kill loses the work on one file at most."""
    shard: Annotated[str, tyro.conf.arg(metavar="K/N")] = "0/1"
    """Build shard K of N, counted from 0. All shards share --out; shard 0 finishes the index."""
    verify: bool = False
    """Build nothing: compare the files of the index in --out with their checksums."""


class BuildProgress:
    """Shows each stage of a build as a progress bar with passages/s and the time left."""

    def __init__(self) -> None:
        self._stage, self._bar, self._done, self._start, self._updated = "", None, 0, (0.0, 0), 0.0
        self._interval = TERMINAL_SECONDS if sys.stderr.isatty() else LOG_SECONDS

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage != self._stage:
            self.close()
            self._stage, self._done, self._start, self._updated = stage, done, (now, done), 0.0
            if total:
                self._bar = Progress(stage, total, done=done).__enter__()
            else:
                print(f"{stage} ...", file=sys.stderr, flush=True)
        if now - self._updated < self._interval and done != total:
            return
        self._updated = now
        rate = (done - self._start[1]) / max(now - self._start[0], 1e-9)
        if self._bar and done > self._done:
            self._bar.advance({MetricName.PASSAGES_PER_SECOND: rate}, by=done - self._done)
            self._done = done
        elif not total and done:
            print(f"{stage}: {done:,}  {rate:,.0f} passages/s", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar:
            self._bar.__exit__()
            self._bar = None


def main(argv: Sequence[str]) -> None:
    with cli.one_line_errors():
        flags = cli.parse(BuildIndex, argv)
        shard = parse_shard(flags.shard)
        check(flags)
        outputs.write_json(flags.json, verify(flags) if flags.verify else build_shard(flags, shard))


def parse_shard(text: str) -> BuildShard:
    """The shard that --shard K/N names. Raises ValueError."""
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise ValueError(f"--shard {text}: write K/N with K from 0 to N - 1, such as 0/4 for the first of four")
    return BuildShard(int(index), int(count))


def check(flags: BuildIndex) -> None:
    """Raises ValueError or OSError for errors that can be found before long work starts."""
    config = flags.run.retrieval
    if config.index_type == "scann":
        scann_index.check_installed()
    if not flags.verify:
        if not config.corpus:
            raise ValueError("--retrieval.corpus is missing: give a JSONL file of passages")
        if flags.out is None:
            raise ValueError("--out is missing: give the directory to write")
        check_absent(flags.out)


def build_shard(flags: BuildIndex, shard: BuildShard) -> dict[str, Any]:
    """Builds this shard of the index, and the index itself in shard 0. Returns its manifest."""
    out, config = flags.out, hub.local(flags.run).retrieval
    assert out is not None  # by `check`
    precomputed = read_embeddings(flags.embeddings) if flags.embeddings else None
    model = load_encoder(config)  # before the corpus, which takes longer to validate
    progress = BuildProgress()
    try:
        corpus = prepare_corpus(Path(config.corpus), out, progress)
        encoder = build_dense_index(
            config,
            corpus,
            out,
            model,
            flags.shard_rows,
            precomputed=precomputed,
            shard=shard,
            on_progress=progress,
        )
    finally:
        progress.close()
    if shard.index:
        print(
            f"{staging_dir(out)}: shard {shard.index}/{shard.count} is done; shard 0/{shard.count} finishes the index"
        )
        return {"shard": asdict(shard)}
    manifest = json.loads((out / MANIFEST).read_text())
    quality = (
        f"recall {manifest['recall']:.3f} on {manifest['measured_on']} held-out probes" if manifest["tree"] else "exact"
    )
    print(
        f"{out}: {len(corpus):,} passages of {manifest['dimensions']} dimensions by {encoder}, {quality}; "
        f"search it with {search_flags(flags.run.retrieval, out)}"
    )
    return manifest


def search_flags(config: RetrievalConfig, index: Path) -> str:
    """The settings of a run that searches the index, quoted for a shell. Settings with default values are omitted."""
    same = ("encoder_size", "encoder_prompts", "encoder_dtype", "index_type", "max_query_tokens")
    values = {"index": index, "encoder": config.encoder}
    values |= {name: getattr(config, name) for name in same if getattr(config, name) != getattr(RetrievalConfig, name)}
    return " ".join(f"--retrieval.{name} {shlex.quote(str(value))}" for name, value in values.items())


def verify(flags: BuildIndex) -> dict[str, Any]:
    """Reads all files of the index."""
    if flags.out is None:
        raise ValueError("--out is missing: give the index to verify")
    size = verify_index(flags.out)
    print(f"{flags.out}: all checksums agree ({size / 1e9:,.3g} GB)")
    return {"verified_bytes": size}


def load_encoder(config: RetrievalConfig) -> TextEncoder | None:
    """The encoder model that the settings name; None for the hashing encoder."""
    if config.encoder == HASHING:
        return None
    # JAX takes seconds to import; --help, errors and the hashing encoder do not need it.
    from memsearcher_jax.runtime import text_encoder

    return text_encoder.load(config)


if __name__ == "__main__":
    cli.run(main)
