"""What a run is, for those who report on it: its settings and inputs, its results, and whether it has ended.

RUN/run.json        the settings
RUN/inputs.json     hashes of the data, the weights and other inputs
RUN/results.json    of an evaluation, its results; of training, the number of steps; written at the end
RUN/weights.json    of an evaluation, the checkpoint: a run that trains on has a newer one later
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memsearcher_jax.jsonl import parse_object
from memsearcher_jax.logs.metrics import METRICS_FILE, read_metrics

RUN_FILE = "run.json"
INPUTS_FILE = "inputs.json"
RESULTS_FILE = "results.json"
WEIGHTS_FILE = "weights.json"
PAGE = "report.html"


@dataclass(frozen=True)
class RunFacts:
    training: bool  # or an evaluation
    settings: dict[str, Any]  # with the hashes of the "inputs", and versions of the "program"; empty without a run.json
    results: dict[str, Any]  # empty until the run has ended


def read_facts(folder: Path) -> RunFacts:
    """The facts of the run in `folder`. Raises ValueError for a damaged file."""
    settings = _read(folder / RUN_FILE)
    inputs = _read(folder / INPUTS_FILE)
    if hashes := inputs.get("hashes"):
        settings["inputs"] = hashes
    if program := inputs.get("program"):
        settings["program"] = program
    return RunFacts((folder / METRICS_FILE).is_file(), settings, _read(folder / RESULTS_FILE))


def read_results(folder: Path) -> dict[str, Any]:
    """The results of the finished evaluation in `folder`. Raises FileNotFoundError or ValueError in one line."""
    if not (folder / RESULTS_FILE).is_file():
        raise FileNotFoundError(f"{folder} is no finished evaluation: run launch/evaluate.py --resume --out {folder}")
    return _read(folder / RESULTS_FILE)


def has_ended(folder: Path) -> bool:
    """Whether the run has written its results, and, if it trains, has not trained on since."""
    facts = read_facts(folder)
    steps = facts.results.get("steps")
    return steps == len(read_metrics(folder / METRICS_FILE)) if facts.training else bool(facts.results)


def _read(path: Path) -> dict[str, Any]:
    return parse_object(str(path), path.read_bytes()) if path.is_file() else {}
