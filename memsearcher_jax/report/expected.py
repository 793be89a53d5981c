"""Bands in which the results of another run of a published experiment are expected.

The published values are those of several seeds. The band is the 95% prediction interval of one more seed under a normal
distribution (Geisser, 1993, section 2.1), within [0, 1]: about 19 of 20 repetitions are in it.
"""

from __future__ import annotations

import math
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from memsearcher_jax.report.console import make_table, safe_text

_T_975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365}
"""97.5% quantiles of Student's t distribution by degrees of freedom."""


@dataclass(frozen=True)
class Band:
    metric: str
    published: tuple[float, ...]  # one value per seed, in [0, 1]
    low: float
    high: float


@dataclass(frozen=True)
class CheckedMetric:
    band: Band
    value: float

    @property
    def inside(self) -> bool:
        return self.band.low <= self.value <= self.band.high


@dataclass(frozen=True)
class Experiment:
    """Published results of a preset with some of its settings changed."""

    preset: str
    settings: Mapping[str, Any]
    bands: tuple[Band, ...]


def make_band(metric: str, values: Sequence[float]) -> Band:
    """Raises ValueError for fewer than two values, which have no spread, or more than eight."""
    if len(values) - 1 not in _T_975:
        raise ValueError(f"{metric}: a band needs the values of two to eight seeds, not {len(values)}")
    half = _T_975[len(values) - 1] * statistics.stdev(values) * math.sqrt(1 + 1 / len(values))
    center = statistics.fmean(values)
    return Band(metric, tuple(values), max(0.0, center - half), min(1.0, center + half))


def read_experiments(file: Path) -> list[Experiment]:
    """The experiments of a TOML file."""
    return [
        Experiment(
            table["preset"],
            table["settings"],
            tuple(make_band(metric, values) for metric, values in table["metrics"].items()),
        )
        for table in tomllib.loads(file.read_text(encoding="utf-8"))["experiment"]
    ]


def find_experiment(experiments: Sequence[Experiment], preset: str, settings: Mapping[str, Any]) -> Experiment:
    """The most specific experiment of the preset whose settings the run has. Raises ValueError if there is none."""
    of_preset = [one for one in experiments if one.preset == preset]
    if not of_preset:
        known = ", ".join(sorted({one.preset for one in experiments}))
        raise ValueError(f"no results with several seeds are published for preset {preset!r}: choose from {known}")
    fitting = [one for one in of_preset if all(settings.get(name) == value for name, value in one.settings.items())]
    if not fitting:
        listed = "; ".join(", ".join(f"{name} {value}" for name, value in one.settings.items()) for one in of_preset)
        raise ValueError(f"results of {preset} are published for {listed}: evaluate with one of these settings")
    return max(fitting, key=lambda one: len(one.settings))


def check_metrics(experiment: Experiment, metrics: Mapping[str, float]) -> list[CheckedMetric]:
    """Raises ValueError if the run lacks a metric of the experiment."""
    for band in experiment.bands:
        if metrics.get(band.metric) is None:
            raise ValueError(f"the results have no {band.metric}: evaluate the test questions of the preset")
    return [CheckedMetric(band, metrics[band.metric]) for band in experiment.bands]


def show_checked(checked: Sequence[CheckedMetric], console: Console) -> None:
    """Print a table with a row per metric."""
    table = make_table("metric", "value", "expected", "published", "")
    for one in checked:
        band = one.band
        published = " ".join(f"{value:.2f}" for value in band.published)
        table.add_row(
            safe_text(band.metric.replace("_", " ")),
            f"{one.value:.3f}",
            f"{band.low:.3f} to {band.high:.3f}",
            published,
            "inside" if one.inside else "OUTSIDE",
        )
    console.print(table)
