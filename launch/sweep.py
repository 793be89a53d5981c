"""Trains or evaluates once for each value of a setting. After a stop, the same command continues.

python launch/sweep.py --setting rl.credit=all_contexts,last_context --out runs/credit -- --config tiny
python launch/sweep.py --evaluate --setting agent.memory_tokens=8,12,16 --out runs/memory -- --checkpoint runs/tiny

OUT/sweep.json, sweep.png         the results of every value; accuracy against tokens
OUT/rl.credit=last_context/        one training run; with --evaluate, one evaluation
OUT/rl.credit=last_context/test/   the evaluation of a training run on its test questions
"""

from __future__ import annotations

if __name__ == "__main__":
    import memsearcher_jax.launch.__main__  # noqa: F401  (runs `main` below)

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from memsearcher_jax.config import RunConfig, differences
from memsearcher_jax.hosts.preemption import signals_watched
from memsearcher_jax.launch import cli, command_words, evaluate, outputs, tpu_train
from memsearcher_jax.logs.run_facts import has_ended, read_results
from memsearcher_jax.report.sweep import plot_sweep, show_sweep, sweep_row
from memsearcher_jax.runs.inputs import changed_inputs, own_code, require_same_code
from memsearcher_jax.runs.run_dir import is_run, read_run_config


@dataclass(frozen=True)
class Sweep:
    """Train or evaluate once for each value of a setting. The flags of these runs follow after --."""

    setting: str
    """A setting, or a flag of the program that is run, and its values: rl.credit=all_contexts,last_context."""
    out: Path
    """Directory for one run per value, the table and the plot."""
    evaluate: bool = False
    """Evaluate the checkpoint that the flags name, instead of training each value and evaluating the result."""


def main(argv: Sequence[str]) -> None:
    sweep_words, run_words = command_words.split_passthrough(argv)
    environment = {**os.environ}  # the check of the flags sets variables for JAX
    with cli.one_line_errors():
        flags = cli.parse_flags(Sweep, sweep_words)
        name, values = setting_values(flags.setting)
        if any(word.partition("=")[0] == "--out" for word in run_words):
            raise ValueError("--out cannot follow --: every value has a folder in the --out before it")
        points = [make_point(flags, name, value, run_words) for value in values]
        if not all(point.config.data.is_synthetic or point.config.data.test for point in points):
            raise ValueError("every value is evaluated: set data.test to files of questions")
        for point in points:
            # An evaluation finds out itself whether the weights are still those that it has.
            require_same_inputs(point, weights=not flags.evaluate)
        # The program of an evaluation always runs.
        trained = set() if flags.evaluate else {point.value for point in points if is_done(point)}
    rows = []
    for point in points:
        print(f"{name}={point.value}: {point.folder}", file=sys.stderr, flush=True)
        if flags.evaluate:
            evaluation = point.folder
            start(evaluate.__file__, evaluation, point.words, environment)
        else:
            evaluation = point.folder / "test"
            if point.value not in trained:
                start(tpu_train.__file__, point.folder, point.words, environment)
            if not (point.value in trained and is_evaluated(evaluation)):
                weights = ["--checkpoint", str(point.folder), *code_words(point.config)]
                start(evaluate.__file__, evaluation, weights, environment)
        rows.append(sweep_row(point.value, read_results(evaluation)))
    outputs.write_json(flags.out / "sweep.json", {"setting": name, "table": rows})
    plot_sweep(flags.out / "sweep.png", name, rows)
    show_sweep(name, rows, Console(highlight=False))
    print(f"{flags.out}: {len(rows)} evaluations; plotted in {flags.out / 'sweep.png'}")


@dataclass(frozen=True)
class Point:
    """One value of the setting, and the run for it."""

    value: str
    words: list[str]  # the flags of its program
    folder: Path
    config: RunConfig


def setting_values(setting: str) -> tuple[str, list[str]]:
    """The name and the values in --setting. Raises ValueError."""
    name, _, listed = setting.partition("=")
    values = [value.strip() for value in listed.split(",")]
    if not all(values) or len(set(values)) < len(values):
        raise ValueError(f"--setting {setting}: write NAME=A,B,... with different values")
    return name, values


def make_point(flags: Sweep, name: str, value: str, run_words: Sequence[str]) -> Point:
    """The run for one value, with its flags checked. Raises ValueError or OSError in one line."""
    words = [*run_words, f"--{name}", value]
    folder = flags.out / f"{name}={value}".replace("/", "_")
    command = evaluate.Evaluate if flags.evaluate else tpu_train.Train
    return Point(value, words, folder, cli.parse(command, words).run)


def is_evaluated(folder: Path) -> bool:
    """Whether an evaluation has ended there and lost no question."""
    return has_ended(folder) and read_results(folder)["lost"] == 0


def is_done(point: Point) -> bool:
    """Whether the training run of a value has ended.

    Raises ValueError for a run of other settings or of other code of the user's, which would pass for this one; a
    longer run goes on.
    """
    folder = point.folder
    if not is_run(folder):
        return False
    stored = read_run_config(folder)
    changed = differences(stored, point.config)
    for setting, then, now in changed:
        if setting not in ("rl.steps", "rl.epochs"):
            raise ValueError(f"{setting} is {then!r} in {folder} and {now!r} here: choose another --out")
    require_same_code(folder, stored, point.config, point.words)
    return has_ended(folder) and not changed


def require_same_inputs(point: Point, *, weights: bool) -> None:
    """Raises ValueError if a file has changed since the run of the point began, which would go on with its own copy."""
    folder = point.folder
    changed = changed_inputs(folder, point.config, weights=weights) if is_run(folder) else []
    own_files = {str(file.absolute()) for code in own_code(point.config) for file in code.files}
    for name in changed:
        if name not in own_files:  # `require_same_code` tells more about these
            raise ValueError(f"{name} has changed since {folder} was made: restore it, or choose another --out")


def code_words(config: RunConfig) -> list[str]:
    """The flags that name the user's code of a run, as a command that opens it needs them."""
    words: dict[str, list[str]] = {}
    for code in own_code(config):
        words.setdefault(f"--{code.setting}", []).append(code.value)
    return [word for flag, values in words.items() for word in (flag, *values)]


def start(program: str, folder: Path, words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Runs or resumes a program in `folder`. Exits with its status if it fails, and after a signal."""
    resume = ["--resume"] if is_run(folder) else []
    signals_seen: list[int] = []
    process: subprocess.Popen | None = None

    def on_signal(number: int, frame: object) -> None:
        signals_seen.append(number)
        if process and number == signal.SIGTERM:  # Ctrl-C reaches it from the terminal
            process.terminate()

    with signals_watched(lambda number: None, on_signal):  # the program saves for as long as it needs
        process = subprocess.Popen([sys.executable, program, *words, *resume, "--out", str(folder)], env=environment)
        if signal.SIGTERM in signals_seen:  # before it ran
            process.terminate()
        status = process.wait()
    if status:
        raise SystemExit(status)
    if signals_seen:  # when the program had ended
        raise KeyboardInterrupt
