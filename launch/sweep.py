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
from memsearcher_jax.launch import cli, evaluate, outputs, tpu_train
from memsearcher_jax.logs.run_facts import has_ended, read_results
from memsearcher_jax.report.sweep import plot_sweep, show_sweep, sweep_row
from memsearcher_jax.runs.inputs import own_code
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
    before, words = cli.split_passthrough(argv)
    environment = {**os.environ}  # the check of the flags sets variables for JAX
    with cli.one_line_errors():
        flags = cli.parse_flags(Sweep, before)
        name, _, listed = flags.setting.partition("=")
        values = [value.strip() for value in listed.split(",")]
        if not all(values) or len(set(values)) < len(values):
            raise ValueError(f"--setting {flags.setting}: write NAME=A,B,... with different values")
        if any(word.partition("=")[0] == "--out" for word in words):
            raise ValueError("--out cannot follow --: every value has a folder in the --out before it")
        command = evaluate.Evaluate if flags.evaluate else tpu_train.Train
        configs = {value: cli.parse(command, [*words, f"--{name}", value]).run for value in values}
        if not all(config.data.is_synthetic or config.data.test for config in configs.values()):
            raise ValueError("every value is evaluated: set data.test to files of questions")
        folders = {value: flags.out / f"{name}={value}".replace("/", "_") for value in values}
        # An evaluation finds out whether the weights are still those that it has: its program always runs.
        trained = {one for one, config in configs.items() if not flags.evaluate and is_done(folders[one], config)}
    rows = []
    for value, config in configs.items():
        folder, own, done = folders[value], [*words, f"--{name}", value], value in trained
        print(f"{name}={value}: {folder}", file=sys.stderr, flush=True)
        if not flags.evaluate:
            if not done:
                start(tpu_train.__file__, folder, own, environment)
            own = ["--checkpoint", str(folder), *code_words(config)]
            folder = folder / "test"
            done = done and has_ended(folder)
        if not (done and read_results(folder)["lost"] == 0):
            start(evaluate.__file__, folder, own, environment)
        rows.append(sweep_row(value, read_results(folder)))
    outputs.write_json(flags.out / "sweep.json", {"setting": name, "table": rows})
    plot_sweep(flags.out / "sweep.png", name, rows)
    show_sweep(name, rows, Console(highlight=False))
    print(f"{flags.out}: {len(rows)} evaluations; plotted in {flags.out / 'sweep.png'}")


def is_done(folder: Path, config: RunConfig) -> bool:
    """Whether a training run has ended there. Raises ValueError for a run of other settings, which would pass for one
    of these; a longer one goes on."""
    changed = differences(read_run_config(folder), config) if is_run(folder) else []
    for setting, then, now in changed:
        if setting not in ("rl.steps", "rl.epochs"):
            raise ValueError(f"{setting} is {then!r} in {folder} and {now!r} here: choose another --out")
    return is_run(folder) and has_ended(folder) and not changed


def code_words(config: RunConfig) -> list[str]:
    """The flags that name the user's code of a run, as a command that opens it needs them."""
    words: dict[str, list[str]] = {}
    for name, value in own_code(config):
        words.setdefault(f"--{name}", []).append(value)
    return [word for name, values in words.items() for word in (name, *values)]


def start(program: str, folder: Path, words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Runs or resumes a program in `folder`. Exits with its status if it fails, and after a signal."""
    words, came = [*words, *["--resume"] * is_run(folder), "--out", str(folder)], list[int]()
    process: subprocess.Popen | None = None

    def on_signal(number: int, frame: object) -> None:
        came.append(number)
        if process and number == signal.SIGTERM:  # Ctrl-C reaches it from the terminal
            process.terminate()

    with signals_watched(lambda number: None, on_signal):  # the program saves for as long as it needs
        process = subprocess.Popen([sys.executable, program, *words], env=environment)
        if signal.SIGTERM in came:  # before it ran
            process.terminate()
        status = process.wait()
    if status:
        raise SystemExit(status)
    if came:  # when the program had ended
        raise KeyboardInterrupt
