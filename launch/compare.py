"""Compares two evaluations of the same questions: paired differences, and the questions won and lost.

python launch/compare.py runs/A runs/B                 # B against A: positive differences are B's gain
python launch/compare.py runs/A runs/B --json FILE
"""

from __future__ import annotations

if __name__ == "__main__":
    import memsearcher_jax.launch.__main__  # noqa: F401  (runs `main` below)

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from memsearcher_jax.launch import cli, outputs
from memsearcher_jax.logs.progress import announced
from memsearcher_jax.report.comparison import compare_evaluations, read_evaluation, show_comparison


@dataclass(frozen=True)
class Compare:
    """Compare two evaluations of the same questions, and the settings of the two."""

    first: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN_A")]
    """Directory that launch/evaluate.py wrote."""
    second: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN_B")]
    """Another one; positive differences are its gain."""
    json: cli.File = None
    """Also write the result to this file, as JSON."""


def main(argv: Sequence[str]) -> None:
    with cli.one_line_errors():
        flags = cli.parse_flags(Compare, argv)
        with announced("reading the evaluations"):
            first = read_evaluation(flags.first)
            second = read_evaluation(flags.second)
            comparison = compare_evaluations(first, second)
        outputs.write_json(flags.json, comparison)
    show_comparison(comparison, Console(highlight=False))
