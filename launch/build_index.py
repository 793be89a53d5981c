"""Builds the index of a corpus of any size. Killed at any moment, the same command goes on where it was.

python launch/build_index.py --retrieval.corpus FILE --retrieval.encoder DIR --out DIR
python launch/build_index.py ... --embeddings e5_Flat.index     # vectors that are published need no embedding
python launch/build_index.py ... --part 3/8                     # one of eight hosts on a shared disk; 0/8 finishes
python launch/build_index.py --plan --retrieval.encoder DIR     # what 21 million passages would need
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import cli
import tyro

from memsearcher_jax.report.names import Name
from memsearcher_jax.report.progress import Progress
from memsearcher_jax.retrieval import approximate, plan
from memsearcher_jax.retrieval.build import Part, build, prepare_corpus
from memsearcher_jax.retrieval.config import HASHING, RetrievalConfig
from memsearcher_jax.retrieval.corpus import Corpus
from memsearcher_jax.retrieval.encode import fit_hashing
from memsearcher_jax.retrieval.index import MANIFEST, IndexConfig
from memsearcher_jax.retrieval.search import TextEncoder
from memsearcher_jax.retrieval.vectors import read_published
from memsearcher_jax.retrieval.workplace import refuse_existing, working_folder

WIKI_18 = 21_015_324  # passages of the 2018 Wikipedia as the paper's retriever has it
PLANNED_TOKENS = 160  # of a passage of 100 words with its title
SHOW_EVERY = {True: 0.5, False: 15.0}  # seconds between two signs of life, on a terminal and elsewhere


@dataclass(frozen=True)
class BuildIndex(cli.Command):
    """Build the index of a corpus of any size."""

    embeddings: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Vectors that were made by the encoder already, in the order of the corpus: .npy, or a flat FAISS index."""
    shard_rows: int = 16_384
    """Passages whose vectors are one file; a kill costs the work on one of them at most."""
    part: str = "0/1"
    """Which of how many processes this is, counted from 0; they share --out, and the first one finishes the index."""
    plan: bool = False
    """Build nothing: measure this machine for a minute, and print memory, disk and time with the arithmetic."""
    passages: int = WIKI_18
    """Passages to plan for."""


class Shown:
    """Shows each step of a build as a bar with passages/s and the time left; a `build.Report`."""

    def __init__(self) -> None:
        self._step, self._progress, self._done, self._started, self._looked = "", None, 0, (0.0, 0), 0.0

    def __call__(self, step: str, done: int, total: int) -> None:
        now = time.monotonic()
        if step != self._step:
            self.close()
            self._step, self._done, self._started, self._looked = step, done, (now, done), 0.0
            if total:
                self._progress = Progress(step, total, done=done).__enter__()
            else:
                print(f"{step} ...", file=sys.stderr, flush=True)
        if now - self._looked < SHOW_EVERY[sys.stderr.isatty()] and done != total:
            return
        self._looked = now
        rate = (done - self._started[1]) / max(now - self._started[0], 1e-9)
        if self._progress and done > self._done:
            self._progress.advance({Name.PASSAGES_PER_SECOND: rate}, by=done - self._done)
            self._done = done
        elif not total and done:
            print(f"{step}: {done:,}  {rate:,.0f} passages/s", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._progress:
            self._progress.__exit__()
            self._progress = None


def main(argv: Sequence[str]) -> None:
    with cli.one_line_errors():
        if "--resume" in argv:
            raise ValueError("--resume: leave it out, the same command goes on by itself where it was")
        flags = cli.parse(BuildIndex, argv)
        part = check(flags)
        result = planned(flags, part.of) if flags.plan else built(flags, part)
        cli.write_json(flags.json, result)


def check(flags: BuildIndex) -> Part:
    """Raises ValueError or OSError for what is known to fail before long work starts."""
    config = flags.run.retrieval
    if config.kind == "scann":
        approximate.check_installed()
    if flags.shard_rows < 1 or flags.passages < 1:
        raise ValueError("--shard_rows and --passages must be at least 1")
    number, slash, of = flags.part.partition("/")
    if not (slash and number.isdecimal() and of.isdecimal()):
        raise ValueError(f"--part {flags.part}: write it as 3/8, the fourth of eight")
    if not flags.plan:
        if not config.corpus:
            raise ValueError("--retrieval.corpus is missing: name a JSONL file of passages")
        if flags.out is None:
            raise ValueError("--out is missing: name the folder to write")
        refuse_existing(flags.out)
    return Part(int(number), int(of))


def built(flags: BuildIndex, part: Part) -> dict:
    """Builds the folder, or this part of it, and says what it is."""
    out, config = flags.out, flags.run.retrieval
    published = read_published(flags.embeddings) if flags.embeddings else None
    model = load_encoder(config)  # before the corpus, which takes longer to be found good
    shown = Shown()
    try:
        corpus = prepare_corpus(Path(config.corpus), out, shown)
        encoder, state = (model, {}) if model else fitted(corpus, config.encoder_size)
        settings = IndexConfig(
            encoder.name, config.kind, config.embedding_dtype, config.recall, config.batch_limit, flags.shard_rows
        )
        build(
            corpus,
            encoder.passages,
            out,
            settings,
            state,
            queries=encoder.queries,
            published=published,
            part=part,
            report=shown,
        )
    finally:
        shown.close()
    if part.number:
        print(f"{working_folder(out)}: part {part.number} of {part.of} is done; part 0 finishes the index")
        return {"part": asdict(part)}
    manifest = json.loads((out / MANIFEST).read_text())
    measured = f"recall {manifest['recall']:.3f} on {manifest['measured_on']} queries" if manifest["tree"] else "exact"
    print(
        f"{out}: {len(corpus):,} passages of {manifest['dimensions']} dimensions by {encoder.name}, {measured}; "
        f"search it with --retrieval.index {out} --retrieval.encoder {config.encoder}"
    )
    return manifest


def load_encoder(config: RetrievalConfig) -> TextEncoder | None:
    """The encoder whose folder the settings name, if they name one."""
    if config.encoder == HASHING:
        return None
    # JAX takes seconds to load; --help, a wrong flag and hashing do without it.
    from memsearcher_jax.rl import embedder

    return embedder.load(config, config.encoder)


def fitted(corpus: Corpus, size: int) -> tuple[TextEncoder, dict]:
    """The hashing encoder of this corpus, and the array that it was fitted with."""
    hashing = fit_hashing((corpus.contents[row] for row in range(len(corpus))), size)
    return TextEncoder(hashing.name, hashing, hashing), {"idf": hashing.idf_F}


def planned(flags: BuildIndex, hosts: int) -> dict:
    """Measures this machine and prints the plan."""
    from memsearcher_jax.rl import embedder

    config, model = flags.run.retrieval, load_encoder(flags.run.retrieval)
    name = config.encoder if model else "an encoder of the shape of e5-base-v2"
    encode = model.passages if model else embedder.stand_in(PLANNED_TOKENS)
    size = encode(["one passage"]).shape[1]
    print("measuring this machine ...", file=sys.stderr, flush=True)
    rates = plan.measure(encode, size)
    lines = plan.plan(flags.passages, size, config.embedding_dtype, rates, hosts)
    print(f"{flags.passages:,} passages of {size} dimensions by {name}, on machines like this one:")
    for line in lines:
        print(line)
    return {"rates": asdict(rates), "plan": [asdict(line) for line in lines]}


if __name__ == "__main__":
    cli.run(main)
