"""Writes the report of a run as one HTML page: numbers, plots, and trajectories to read, without a network.

python launch/report.py runs/NAME                               # of a training run or an evaluation
python launch/report.py runs/NAME --follow                      # of a job that is running; the page reloads itself
python launch/report.py runs/MEMSEARCHER --compare runs/REACT   # both in the tables and plots
"""

from __future__ import annotations

if __name__ == "__main__":
    import memsearcher_jax.launch.__main__  # noqa: F401  (runs `main` below)

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from memsearcher_jax.launch import cli, outputs
from memsearcher_jax.logs.metrics import METRICS_FILE
from memsearcher_jax.logs.progress import announced
from memsearcher_jax.logs.run_facts import PAGE, has_ended
from memsearcher_jax.ranges import Count
from memsearcher_jax.report.page.html import MAX_TRAJECTORIES, write_page

RELOAD_SECONDS = 30
FOLLOW_SECONDS = 5  # between looks at the run


@dataclass(frozen=True)
class Report:
    """Write the report of a run as one HTML page."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Directory of a training run or of an evaluation."""
    compare: cli.Directory = None
    """Another run, for comparison; differences are its values minus those of RUN."""
    out: cli.File = None
    """File to write. Default: RUN/report.html."""
    max_trajectories: Count = MAX_TRAJECTORIES
    """Maximum number of trajectories on the page."""
    follow: bool = False
    """Write the page again whenever the run has advanced, until it has ended. The page reloads itself meanwhile."""


def main(argv: Sequence[str]) -> None:
    with cli.one_line_errors():
        flags = cli.parse_flags(Report, argv)
        if not flags.run.is_dir():
            raise FileNotFoundError(f"{flags.run}: no such folder")
        out = flags.out or flags.run / PAGE
        outputs.require_writable(out, "--out")
        if out.suffix != ".html":
            raise ValueError(f"--out {out}: choose a name that ends in .html, so that no file of a run is replaced")
        write = partial(write_page, flags.run, out, compare=flags.compare, max_trajectories=flags.max_trajectories)
        written: dict[Path, int] = {}
        while flags.follow and not has_ended(flags.run):
            shown_files = [flags.run / METRICS_FILE, *(flags.run / "trajectories").glob("*.jsonl.gz")]
            sizes = {file: file.stat().st_size for file in shown_files if file.exists()}
            if sizes != written:
                write(reload_seconds=RELOAD_SECONDS)
                print(f"{out}: written; Ctrl-C ends", file=sys.stderr, flush=True)
            written = sizes
            time.sleep(FOLLOW_SECONDS)
        with announced("reading the trajectories and writing the page"):
            counts = write()
    size = out.stat().st_size / 1e6
    print(f"{out}: {counts['shown']:,} of {counts['read']:,} trajectories, {size:.1f} MB; open it in a browser")
