"""Builds the index of a corpus of any size. After a kill, the same command continues the build.

python launch/build_index.py --retrieval.corpus FILE --retrieval.encoder DIR --out DIR
python launch/build_index.py ... --embeddings e5_Flat.index     # published vectors, nothing is embedded
python launch/build_index.py ... --shard 3/8                    # one of eight hosts on a shared disk; 0/8 finishes
python launch/build_index.py --audit nq hotpotqa --data.root DIR --retrieval.index DIR --out DIR    # answers in it?
"""

from __future__ import annotations

if __name__ == "__main__":
    import memsearcher_jax.launch.__main__  # noqa: F401  (runs `main` below)

import contextlib
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from memsearcher_jax.launch import cli, outputs, preconditions
from memsearcher_jax.logs.metric_names import MetricName
from memsearcher_jax.logs.progress import Progress
from memsearcher_jax.retrieval import scann_index
from memsearcher_jax.retrieval.builder.build_dir import MANIFEST, staging_dir
from memsearcher_jax.retrieval.builder.index_builder import BuildShard, build_index
from memsearcher_jax.retrieval.config import HASHING, RetrievalConfig
from memsearcher_jax.retrieval.vector_files import read_embeddings
from memsearcher_jax.runs import hub


@dataclass(frozen=True)
class BuildIndex(cli.Command):
    """Build the index of a corpus of any size."""

    out: cli.Directory = None
    """Directory to write; the same command continues an interrupted build. An index of an earlier state of the corpus
    is replaced, and only what is new is embedded."""
    embeddings: cli.File = None
    """Vectors made by the same encoder, in the order of the corpus: .npy, or a flat FAISS index. They are scaled to
    length 1."""
    shard: Annotated[str, tyro.conf.arg(metavar="K/N")] = "0/1"
    """Build shard K of N, counted from 0. All shards share --out; shard 0 finishes the index."""
    audit: Annotated[tuple[str, ...], tyro.conf.arg(metavar="QUESTIONS"), cli.IS_PATH] = ()
    """Search for the answers of these questions with the settings of a run, and write hopeless.jsonl to --out: the
    questions that the passages cannot answer. Entries as in data.test; train or test: those of the settings."""

    @property
    def use(self) -> str:
        return "AuditCorpus" if self.audit else super().use


class BuildProgress(contextlib.ExitStack):
    """Shows each stage of a build: on a terminal as a bar if the total is known, otherwise in a line now and then."""

    _stage = ""

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage:
            self.close()
            self._stage = stage
            self._began = time.monotonic()
            self._first = done
            self._done = done
            self._is_live = bool(total) and sys.stderr.isatty()
            self._bar = self.enter_context(Progress(stage, total if self._is_live else 0, done=done))
        rate = (done - self._first) / max(time.monotonic() - self._began, 1e-9)
        line = f"{done:,}" if done else ""
        if total:
            line = f"{done:,}/{total:,}  {rate:,.0f} passages/s"
        if self._is_live:
            self._bar.advance({MetricName.PASSAGES_PER_SECOND: rate}, by=done - self._done)
            self._done = done
        elif total and done == total:
            self._bar.note(line)
        else:
            self._bar.activity(line)


def main(argv: Sequence[str]) -> None:
    with cli.one_line_errors():
        flags = cli.parse(BuildIndex, argv)
        shard = parse_shard(flags.shard)
        config = flags.run.retrieval
        if config.index_type == "scann":
            scann_index.check_installed()
        if flags.out is None:
            raise ValueError("--out is missing: give the directory to write")
        if flags.audit:
            from memsearcher_jax.launch.corpus_audit import audit_questions

            outputs.require_writable(flags.out / "hopeless.jsonl", "--out")
            with BuildProgress() as progress:
                result: dict[str, Any] = audit_questions(hub.local(flags.run), flags.audit, flags.out, progress)
        else:
            if not config.corpus:
                raise ValueError("--retrieval.corpus is missing: give a JSONL file of passages")
            if flags.embeddings and config.method == "bm25":
                raise ValueError("--embeddings are vectors, which retrieval.method bm25 does not search: omit them")
            result = build_shard(flags, flags.out.resolve(), shard)
        outputs.write_json(flags.json, result)


def parse_shard(text: str) -> BuildShard:
    """The shard that --shard K/N names. Raises ValueError."""
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise ValueError(f"--shard {text}: write K/N with K from 0 to N - 1, such as 0/4 for the first of four")
    return BuildShard(int(index), int(count))


def build_shard(flags: BuildIndex, out: Path, shard: BuildShard) -> dict[str, Any]:
    """Builds this shard of the index, and the index itself in shard 0. Returns its manifest."""
    config = hub.local(flags.run).retrieval
    if config.encoder == HASHING or config.method == "bm25":
        # bm25s imports JAX, which would otherwise claim this host's accelerators.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    precomputed = read_embeddings(flags.embeddings) if flags.embeddings else None
    model = None
    if config.encoder != HASHING and config.method != "bm25":
        model = preconditions.load_encoder(config)  # before the corpus, which takes longer to validate
    with BuildProgress() as progress:
        options = {"precomputed": precomputed, "shard": shard, "on_progress": progress}
        kept = build_index(config, Path(config.corpus), out, model, **options)
    if shard.index:
        done = f"shard {shard.index}/{shard.count} is done; shard 0/{shard.count} finishes the index"
        print(f"{staging_dir(out)}: {done}")
        return {"shard": asdict(shard)}
    manifest = json.loads((out / MANIFEST).read_text())
    about = "for words alone"
    if vectors := manifest["vectors"]:
        quality = "exact"
        if manifest["tree"]:
            quality = f"recall {manifest['recall']:.3f} on {manifest['measured_on']} held-out probes"
        about = f"of {vectors['size']} dimensions by {vectors['encoder']}, {quality}"
    if kept:
        copied = f"{kept.vectors:,} vectors were copied"
        print(f"{kept.passages:,} passages are as before, {kept.new:,} are new, {kept.removed:,} are gone; {copied}")
        manifest["kept"] = asdict(kept)
    print(f"{out}: {manifest['passages']:,} passages {about}; search it with {search_flags(flags.run.retrieval, out)}")
    return manifest


def search_flags(config: RetrievalConfig, index: Path) -> str:
    """The settings of a run that searches the index, quoted for a shell. Settings with default values are omitted."""
    same = ("method", "encoder_prompts", "index_type", "max_query_tokens", "max_passage_tokens")
    values = {"index": index, "encoder": config.encoder}
    values |= {name: getattr(config, name) for name in same if getattr(config, name) != getattr(RetrievalConfig, name)}
    return " ".join(f"--retrieval.{name} {shlex.quote(str(value))}" for name, value in values.items())
