"""The table of docs/tpu.md: what 0.5B, 3B and 7B need of a slice of each TPU generation, planned without a TPU.

python benchmarks/tpu.py --out plans                       # all of them, an hour or two on two cores
python benchmarks/tpu.py --out plans --sizes qwen7b --slices v6e:4x8
python benchmarks/tpu.py --out plans --only-print

Each plan is one call of launch/plan_tpu.py, whose JSON is kept in --out: what stands there is not planned again. Needs
the extra `tpu`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

PLAN = Path(__file__).resolve().parents[1] / "launch" / "plan_tpu.py"
GB = 1e9
COLUMNS = (
    *("preset", "slice", "state", "update", "whole", "of", "sent", "update s", "step s", "bound by", "tokens/s"),
    "chip-hours",
)


@dataclass(frozen=True)
class Flags:
    """Which plans."""

    out: Path
    """Folder of the plans."""
    sizes: tuple[str, ...] = ("qwen05b", "qwen3b", "qwen7b")
    """Presets."""
    slices: tuple[str, ...] = ("v5e:4x8", "v5p:2x2x4", "v6e:4x8", "tpu7x:2x2x2")
    """Slices, one of each generation."""
    rows: int = 1
    """Rows of a micro-batch for each device."""
    only_print: bool = False
    """Plan nothing more."""


def main(flags: Flags) -> None:
    flags.out.mkdir(parents=True, exist_ok=True)
    print("| " + " | ".join(COLUMNS) + " |")
    print("|" + " --- |" * len(COLUMNS))
    for size in flags.sizes:
        for name in flags.slices:
            file = flags.out / f"{size}-{name.replace(':', '-')}.json"
            if not file.exists() and not flags.only_print:
                plan(size, name, flags.rows, file)
            if file.exists():
                cells = row(size, name, json.loads(file.read_text(encoding="utf-8")))
                print("| " + " | ".join(cells) + " |", flush=True)


def plan(size: str, name: str, rows: int, file: Path) -> None:
    """One plan, into its file. Raises SystemExit with what it said if it neither fits nor says why not."""
    command = [sys.executable, str(PLAN), "--config", size, "--topology", name, "--rows", str(rows)]
    done = subprocess.run([*command, "--json", str(file)], capture_output=True, text=True)
    if not file.exists():
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def row(size: str, name: str, found: dict) -> list[str]:
    """The cells of one plan; of one that does not fit, the reason."""
    programs = {program["name"]: program for program in found["programs"]}
    state = f"{found['resident']['state'] / GB:.2f}"
    if not found["fits"]:
        return [size, name, state, *[""] * 4, found["reason"], *[""] * 4]
    update, most = programs["update"], max(program["whole"] for program in found["programs"])
    phases = found["roofline"]["phases"]
    longest = max(phases, key=lambda phase: phase["seconds"])
    seconds = {phase["name"]: phase["seconds"] for phase in phases}
    return [
        size,
        name,
        state,
        f"{update['peak'] / GB:.2f}",
        f"{most / GB:.2f}",
        f"{found['hbm_bytes'] / GB:.2f}",
        f"{update['sent'] / GB:.1f}",
        f"{seconds['update']:.1f}",
        f"{sum(seconds.values()):.1f}",
        f"{longest['name']}, {longest['bound']}",
        f"{found['roofline']['tokens_per_second']:,.0f}",
        f"{found['roofline']['chip_hours']:,.0f}",
    ]


if __name__ == "__main__":
    main(tyro.cli(Flags))
