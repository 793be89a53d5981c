"""Writes the report of a run as one HTML page: numbers, plots, and every trajectory to read, without a network.

python launch/report.py runs/NAME                               # of a training run or an evaluation
python launch/report.py runs/MEMSEARCHER --compare runs/REACT   # both in the tables and plots
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import cli

from memsearcher_jax.report.page import MOST, write_page

PAGE = "report.html"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = cli.Parser(prog="report.py", description="Write the report of a run as one HTML page.", allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of a training run or of an evaluation")
    parser.add_argument("--compare", metavar="RUN", type=Path, help="another run, to stand beside it")
    parser.add_argument("--out", metavar="FILE", type=Path, help=f"file to write; without it RUN/{PAGE}")
    parser.add_argument(
        "--most", metavar="N", type=int, default=MOST, help="most trajectories that the page holds (%(default)s)"
    )
    return parser.parse_args(argv)


def check_can_write(out: Path) -> None:
    """Raises ValueError or OSError, before the run is read, where the page could not be written or would cost data."""
    if out.is_dir():
        raise IsADirectoryError(f"--out {out} is a folder: name a file")
    if out.suffix != ".html":
        raise ValueError(f"--out {out}: name a file that ends in .html, so that no file of a run is replaced")
    folder = next(folder for folder in out.absolute().parents if folder.exists())
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise OSError(f"--out {out} cannot be written: {folder} is no folder that you may write to")


def main(argv: Sequence[str]) -> None:
    with cli.one_line_errors():
        flags = parse(argv)
        out = flags.out or flags.run / PAGE
        check_can_write(out)
        counts = write_page(flags.run, out, cli.RULES, compare=flags.compare, most=flags.most)
    size = out.stat().st_size / 1e6
    print(f"{out}: {counts['shown']:,} of {counts['read']:,} trajectories, {size:.1f} MB; open it in a browser")


if __name__ == "__main__":
    cli.run(main)
