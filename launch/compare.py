"""Compares two evaluations of the same questions: paired differences, and the questions won and lost.

python launch/compare.py runs/A runs/B                 # B against A: positive differences are B's gain
python launch/compare.py runs/A runs/B --by f1 --json FILE
python launch/compare.py flashrag/intermediate_data.json runs/B
python launch/compare.py runs/A runs/B --card         # what differs between the reproduction cards of two runs
python launch/compare.py runs/tiny-test --expected tiny     # against the published results of a preset
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from memsearcher_jax.agent.reward import answer_scores
from memsearcher_jax.config import differences, settings
from memsearcher_jax.launch import cli, outputs
from memsearcher_jax.logs.metric_names import MetricName
from memsearcher_jax.ranges import CountOrZero, Seed
from memsearcher_jax.report.comparison import compare_evaluations, read_evaluations, show_comparison
from memsearcher_jax.report.console import make_table, safe_text
from memsearcher_jax.report.evaluation import read_results
from memsearcher_jax.report.expected import (
    CheckedMetric,
    check_metrics,
    find_experiment,
    read_experiments,
    show_checked,
)
from memsearcher_jax.runtime.card import card_differences, read_card
from memsearcher_jax.runtime.run_dir import read_run_config

PUBLISHED = "published.toml"  # in the directory of the presets
IGNORED_SETTINGS = ("seed", "model.path", "evaluation.", "mesh.")  # may differ from the preset without a remark


@dataclass(frozen=True)
class Compare:
    """Compare two evaluations of the same questions, the cards of two runs, or an evaluation with published results."""

    first: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN_A")]
    """Directory that launch/evaluate.py wrote, or another program's results: FlashRAG's intermediate_data.json or its
    directory, or a validation file of Search-R1 (.jsonl)."""
    second: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="RUN_B")] = None
    """Another one; positive differences are its gain."""
    card: bool = False
    """List what differs between the reproduction cards of two runs, of training or evaluation."""
    expected: Annotated[str, tyro.conf.arg(metavar="PRESET")] = ""
    """Check an evaluation against the published results of this preset; the exit status is 1 if one is outside."""
    by: Annotated[str, tyro.conf.arg(metavar="METRIC")] = str(MetricName.EXACT_MATCH)
    """Metric that decides which questions are won and lost."""
    show: Annotated[CountOrZero, tyro.conf.arg(metavar="N")] = 10
    """Maximum number of won and of lost questions to print."""
    seed: Seed = 0
    """Seed of the resampling."""
    json: cli.File = None
    """Also write the result to this file, as JSON."""

    def __post_init__(self) -> None:
        if self.expected and (self.second or self.card):
            raise ValueError("--expected checks one evaluation: omit the second run, and --card")
        if not self.expected and self.second is None:
            raise ValueError("RUN_B is missing: give two runs, or --expected PRESET")


def main(argv: Sequence[str]) -> None:
    console = Console(highlight=False)
    with cli.one_line_errors():
        flags = cli.parse_flags(Compare, argv)
        if flags.expected:
            checked = check_expected(flags.first, flags.expected, console)
            outputs.write_json(flags.json, {"metrics": [asdict(one) | {"inside": one.inside} for one in checked]})
            if not all(one.inside for one in checked):
                raise SystemExit(1)
            return
        assert flags.second, "the flags are checked"
        if flags.card:
            different = card_differences(read_card(flags.first), read_card(flags.second))
            outputs.write_json(
                flags.json, {"differences": [{"name": name, "a": a, "b": b} for name, a, b in different]}
            )
            show_card_differences(different, console)
            return
        first, second = read_evaluations(flags.first, flags.second, cli.MEMORY_RULES, answer_scores)
        comparison = compare_evaluations(first, second, by=flags.by, seed=flags.seed)
        outputs.write_json(flags.json, comparison.to_json() | {"seed": flags.seed})
    show_comparison(comparison, console, max_questions=flags.show)


def check_expected(folder: Path, preset: str, console: Console) -> list[CheckedMetric]:
    """Compares an evaluation with the published results of a preset, and prints the table.

    Raises ValueError or OSError for a folder without results, or with settings for which nothing is published.
    """
    config, results = read_run_config(folder), read_results(folder)
    streams = {name: group["accuracy"] for name, group in results.get("streams", {}).items()}
    experiment = find_experiment(read_experiments(cli.PRESETS / PUBLISHED), preset, settings(config))
    checked = check_metrics(experiment, results["metrics"] | streams)
    show_checked(checked, console)
    changed = [name for name, *_ in differences(cli.load_preset(preset), config)]
    if other := [name for name in changed if not name.startswith(IGNORED_SETTINGS) and name not in experiment.settings]:
        console.print(f"settings that differ from {preset}: {', '.join(other)}")
    return checked


def show_card_differences(different: Sequence[tuple[str, Any, Any]], console: Console) -> None:
    table = make_table("", "A", "B", left=("A", "B"))
    for name, *values in different:
        table.add_row(safe_text(name), *(safe_text("" if value is None else str(value)) for value in values))
    console.print(table if different else "the cards are equal")


if __name__ == "__main__":
    cli.run(main)
