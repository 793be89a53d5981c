"""Draws a training set for Mem-alpha from files of streams: at most N of each source, none longer than a limit.

python launch/subset_streams.py train.parquet --out subset.jsonl --tokenizer DIR
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from memsearcher_jax.data.readers import read_problems
from memsearcher_jax.data.subset import stratified_subset, stream_row
from memsearcher_jax.jsonl import encode_line
from memsearcher_jax.launch import cli, outputs
from memsearcher_jax.logs.atomic_write import atomic_write
from memsearcher_jax.ranges import Count, CountOrZero, Seed
from memsearcher_jax.report.console import make_table, safe_text


@dataclass(frozen=True)
class SubsetStreams:
    """Draw a stratified subset of streams. The defaults are Mem-alpha's: 562 streams of its 4,139."""

    files: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="FILE...")]
    """Files of streams: .parquet, or .jsonl with the same fields."""
    tokenizer: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Directory with the tokenizer.json that counts the tokens: that of the model to train."""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("streams.jsonl")
    """File to write; it must be new. --data.train reads it."""
    per_source: Count = 100
    """Maximum number of streams of each source."""
    max_tokens: CountOrZero = 30_000
    """Streams with more tokens are left out; 0: none is."""
    seed: Seed = 42
    """Seed of the draw."""
    json: cli.File = None
    """Also write the counts to this file, as JSON."""


def main(argv: Sequence[str]) -> None:
    with cli.one_line_errors():
        flags = cli.parse_flags(SubsetStreams, argv)
        if not flags.files:
            raise ValueError("FILE is missing: give at least one file of streams")
        outputs.require_new_file(flags.out)

        from memsearcher_jax.rl.tokenizer import ChatTokenizer

        tokenizer = ChatTokenizer.load(flags.tokenizer)
        problems = [problem for file in flags.files for problem in read_problems(file)]
        subset, counts = stratified_subset(problems, flags.per_source, flags.seed, flags.max_tokens, tokenizer.count)
        if len({problem.id for problem in subset}) < len(subset):
            raise ValueError("two of the files have a stream with the same id: give each file once")
        if not subset:
            raise ValueError(f"no stream has at most {flags.max_tokens} tokens: raise --max_tokens")
        atomic_write(flags.out, "".join(encode_line(stream_row(problem)) for problem in subset).encode())
        outputs.write_json(flags.json, {source: asdict(count) for source, count in counts.items()})
    table = make_table("source", "streams", "short enough", "kept")
    for source, count in counts.items():
        table.add_row(safe_text(source), f"{count.read:,}", f"{count.short:,}", f"{count.kept:,}")
    Console(highlight=False).print(table)
    print(f"{flags.out}: {len(subset):,} of {len(problems):,} streams")


if __name__ == "__main__":
    cli.run(main)
