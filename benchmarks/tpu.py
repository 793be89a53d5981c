"""Prints the table of docs/tpu.md: plans of 0.5B, 3B and 7B on a slice of each TPU generation, made without a TPU.

python benchmarks/tpu.py --out plans                       # one to two hours on two cores
python benchmarks/tpu.py --out plans --sizes qwen7b --slices v6e:4x8
python benchmarks/tpu.py --out plans --only-print

Each plan is a call of launch/plan_tpu.py. Its JSON is kept in --out, and plans that exist there are not made again.
Needs the extra `tpu`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import common
import tyro

GB = 1e9
COLUMNS = (
    *("preset", "slice", "state GB", "update GB", "total GB", "of GB", "sent GB", "update s", "step s", "bound by"),
    *("tokens/s", "chip-hours"),
)


@dataclass(frozen=True)
class Flags:
    """The plans to make."""

    out: Path
    """Folder of the plans."""
    sizes: tuple[str, ...] = ("qwen05b", "qwen3b", "qwen7b")
    """Presets."""
    slices: tuple[str, ...] = ("v5e:4x8", "v5p:2x2x4", "v6e:4x8", "tpu7x:2x2x2")
    """Slices, one of each generation."""
    rows: int = 1
    """Rows of a micro-batch per device."""
    only_print: bool = False
    """Print existing plans and make none."""


def main(flags: Flags) -> None:
    flags.out.mkdir(parents=True, exist_ok=True)
    print("| " + " | ".join(COLUMNS) + " |")
    print("|" + " --- |" * len(COLUMNS))
    for size in flags.sizes:
        for name in flags.slices:
            file = flags.out / f"{size}-{name.replace(':', '-')}.json"
            if not file.exists() and not flags.only_print:
                arguments = ("--config", size, "--topology", name, "--rows", flags.rows, "--json", file)
                common.run_child(common.REPOSITORY / "launch" / "plan_tpu.py", *arguments, accept=file.exists)
            if file.exists():
                cells = table_row(size, name, json.loads(file.read_text(encoding="utf-8")))
                print("| " + " | ".join(cells) + " |", flush=True)


def table_row(size: str, name: str, plan: dict) -> list[str]:
    """The cells of a plan; only the reason if it does not fit."""
    programs = {program["name"]: program for program in plan["programs"]}
    state = f"{plan['resident']['state'] / GB:.2f}"
    if not plan["fits"]:
        return [size, name, state, *[""] * 4, plan["reason"], *[""] * 4]
    update, total = programs["update"], max(program["total_bytes"] for program in plan["programs"])
    phases = plan["roofline"]["phases"]
    longest = max(phases, key=lambda phase: phase["seconds"])
    seconds = {phase["name"]: phase["seconds"] for phase in phases}
    return [
        size,
        name,
        state,
        f"{update['peak_bytes'] / GB:.2f}",
        f"{total / GB:.2f}",
        f"{plan['hbm_bytes'] / GB:.2f}",
        f"{update['sent_bytes'] / GB:.1f}",
        f"{seconds['update']:.1f}",
        f"{sum(seconds.values()):.1f}",
        f"{longest['name']}, {longest['bound']}",
        f"{plan['roofline']['tokens_per_second']:,.0f}",
        f"{plan['roofline']['chip_hours']:,.0f}",
    ]


if __name__ == "__main__":
    main(tyro.cli(Flags))
