"""The --sweep of launch/evaluate.py and launch/tpu_train.py: one run for each value of a setting, a table and a page.

OUT/run.json                          the settings that all runs share
OUT/sweep.json                        the setting, its values and, at the end, the table
OUT/sweep.html                        the table, accuracy against tokens and, of training, the learning curves
OUT/agent.memory_tokens=512/          one evaluation, or one training run
OUT/agent.memory_tokens=512/test/     the evaluation of a training run
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from memsearcher_jax.agent.prompts import with_workflow
from memsearcher_jax.config import RunConfig, check, from_dict, settings, to_dict
from memsearcher_jax.jsonl import parse_object
from memsearcher_jax.launch import cli, outputs
from memsearcher_jax.logs.metric_names import MetricName
from memsearcher_jax.logs.metrics import METRICS_FILE, read_metrics
from memsearcher_jax.report.plots import running_mean
from memsearcher_jax.report.sweep import SweepPoint, show_sweep, write_sweep_page
from memsearcher_jax.runtime.run_dir import is_run, write_run_config

if TYPE_CHECKING:
    from memsearcher_jax.launch.evaluate import Evaluate, Evaluated
    from memsearcher_jax.launch.tpu_train import Train
    from memsearcher_jax.logs.progress import Progress

SWEEP_FILE, PAGE = "sweep.json", "sweep.html"
TEST = "test"  # the directory of the evaluation in that of a training run
CURVE_WINDOW = 8  # steps
DATA_SETTINGS = ("data.", "retrieval.")  # settings that change what data and index contain


@dataclass(frozen=True)
class Sweep:
    setting: str
    values: tuple[str, ...]

    @classmethod
    def parse(cls, text: str, command: type[cli.Command]) -> Sweep:
        """Of SETTING=A,B,... Raises ValueError."""
        setting, equals, values_text = text.partition("=")
        values = tuple(value.strip() for value in values_text.split(","))
        if not equals or not all(values):
            raise ValueError(f"--sweep {text}: write SETTING=A,B,..., such as agent.memory_tokens=512,1024")
        if setting not in settings(RunConfig()):
            raise ValueError(f"--sweep: {cli.unknown_flag(f'--{setting}', command)}")
        if duplicates := [value for value in values if values.count(value) > 1]:
            raise ValueError(f"--sweep {text}: duplicate value {duplicates[0]}")
        return cls(setting, values)

    @classmethod
    def read(cls, folder: Path) -> Sweep:
        """Raises ValueError or OSError."""
        file = folder / SWEEP_FILE
        stored = parse_object(str(file), file.read_bytes())
        try:
            return cls(stored["setting"], tuple(stored["values"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"{file} is damaged ({error}): start another sweep") from error

    def folder(self, value: str) -> str:
        return f"{self.setting}={value}".replace("/", "_")


def is_sweep(folder: Path | None) -> bool:
    return folder is not None and (folder / SWEEP_FILE).is_file()


def run(flags: Evaluate, console: Console, locks: contextlib.ExitStack) -> None:
    """Evaluates every value, then writes and prints the table. --out is locked until `locks` closes."""
    from memsearcher_jax.launch.evaluate import evaluate

    sweep, configs, out = open_sweep(flags, locks)
    workspace = None if sweep.setting.startswith(DATA_SETTINGS) else out
    tokens = configs[sweep.values[0]].sampling.context_tokens
    if not sweep.setting.startswith("sampling.") and tokens > flags.run.sampling.context_tokens:
        console.print(f"sampling.context_tokens is {tokens} here: the longest context of these values")
    points = []
    for value, config in configs.items():
        console.rule(f"{sweep.setting} {value}", align="left")
        folder = out / sweep.folder(value)
        evaluated = evaluate(config, folder, resume=is_run(folder), locks=locks, workspace=workspace)
        evaluated.show()
        points.append(sweep_point(value, evaluated, config.seed))
    write_sweep(flags, sweep, out, points, f"Evaluations of {flags.run.model.path}.", console)


def train(flags: Train, progress_type: type[Progress], console: Console, locks: contextlib.ExitStack) -> None:
    """As `run`, but trains every value, too. Finished values are not repeated."""
    from memsearcher_jax.launch import tpu_train
    from memsearcher_jax.launch.evaluate import evaluate

    with cli.one_line_errors():
        data = flags.run.data
        if not (data.is_synthetic or data.test):
            raise ValueError("--sweep evaluates every value: set data.test to files of questions")
        if flags.run.rl.method == "sft":
            raise ValueError("--sweep compares rewards: it needs rl.method grpo")
    sweep, configs, out = open_sweep(flags, locks)
    points = []
    for value, config in configs.items():
        console.rule(f"{sweep.setting} {value}", align="left")
        folder = out / sweep.folder(value)
        one = replace(flags, run=config, out=folder, resume=is_run(folder), json=None)
        tpu_train.train(one, None, progress_type)
        trained = replace(config, model=replace(config.model, path=str(folder), tokenizer="", adapter=""))
        evaluated = evaluate(trained, folder / TEST, resume=is_run(folder / TEST), locks=locks)
        evaluated.show()
        points.append(replace(sweep_point(value, evaluated, config.seed), curve=learning_curve(folder)))
    about = f"Training runs from {flags.run.model.path or 'random weights'}, evaluated on the test questions."
    write_sweep(flags, sweep, out, points, about, console)


def open_sweep(flags: Evaluate | Train, locks: contextlib.ExitStack) -> tuple[Sweep, dict[str, RunConfig], Path]:
    """The sweep, the config of each value, and the locked directory, which is new or holds the same sweep."""
    with cli.one_line_errors(), contextlib.ExitStack() as startup:
        out = flags.out
        sweep = Sweep.parse(flags.sweep, type(flags)) if flags.sweep or out is None else Sweep.read(out)
        configs = with_values(flags.run, sweep)
        if flags.resume and out:
            require_same_sweep(out, sweep)
            cli.require_same_settings(out, flags.run, "sweep")
            locks.enter_context(outputs.output_lock(out))
        else:
            out = startup.enter_context(outputs.new_output_dir(out, "sweep", locks=locks))
            outputs.write_json(out / SWEEP_FILE, {"setting": sweep.setting, "values": sweep.values})
            write_run_config(out, flags.run)
    return sweep, configs, out


def sweep_point(value: str, evaluated: Evaluated, seed: int) -> SweepPoint:
    if evaluated.evaluation is None:
        return SweepPoint.from_streams(value, evaluated.summaries, seed)
    return SweepPoint.from_evaluation(value, evaluated.evaluation)


def learning_curve(folder: Path) -> tuple[float, ...]:
    """Exact match of a run's steps, or their reward, as a running mean."""
    steps = read_metrics(folder / METRICS_FILE)
    values = [step.get(MetricName.EXACT_MATCH, step[MetricName.REWARD]) for step in steps]
    return tuple(running_mean(np.array(values, float), CURVE_WINDOW).tolist())


def write_sweep(
    flags: Evaluate | Train, sweep: Sweep, out: Path, points: Sequence[SweepPoint], about: str, console: Console
) -> None:
    """Writes the table and the page, and prints the table."""
    result = {"setting": sweep.setting, "values": sweep.values, "table": [point.to_json() for point in points]}
    outputs.write_json(out / SWEEP_FILE, result)
    outputs.write_json(flags.json, result)
    write_sweep_page(out / PAGE, sweep.setting, points, about)
    console.rule(sweep.setting, align="left")
    show_sweep(sweep.setting, points, console)
    print(f"{out}: {len(points)} evaluations; table and plot in {out / PAGE}")


def with_values(config: RunConfig, sweep: Sweep) -> dict[str, RunConfig]:
    """The config of each value, all checked before the first evaluation starts.

    Where a value needs a longer context than `sampling.context_tokens`, all evaluations get it, so that they differ in
    the value alone. Raises ValueError that names the setting.
    """
    # JAX takes seconds to import; --help and errors of the flags do not need it.
    from memsearcher_jax.rl.setup import with_fitting_context

    configs = {value: with_value(config, sweep.setting, value) for value in sweep.values}
    if not sweep.setting.startswith("sampling."):
        widest = max(map(with_fitting_context, configs.values()), key=lambda one: one.sampling.context_tokens)
        configs = {value: with_context_of(widest, one) for value, one in configs.items()}
    for one in configs.values():
        check(one)
    return configs


def with_context_of(widest: RunConfig, config: RunConfig) -> RunConfig:
    """The config with the length of context of another."""
    return replace(
        config,
        sampling=replace(config.sampling, context_tokens=widest.sampling.context_tokens),
        training=replace(config.training, seq_len=widest.training.seq_len),
    )


def with_value(config: RunConfig, setting: str, text: str) -> RunConfig:
    """The config with one setting changed; raises ValueError that names the setting.

    Another agent.workflow selects its packaged prompts, as --workflow does.
    """
    *sections, name = setting.split(".")
    values = to_dict(config)
    section = values
    for key in sections:
        section = section[key]
    section[name] = text if isinstance(section[name], str) else _json_value(text)
    changed = from_dict(values)
    if setting == "agent.workflow":
        changed = replace(changed, agent=with_workflow(config.agent, text))
    return changed


def _json_value(text: str) -> Any:
    """A number or truth value; or the text itself, which the check of the setting's type then rejects."""
    try:
        return json.loads(text.lower())
    except ValueError:
        return text


def require_same_sweep(out: Path, sweep: Sweep) -> None:
    """Raises ValueError or OSError unless `out` holds this sweep."""
    if not is_sweep(out):
        raise FileNotFoundError(f"{out} holds no sweep: there is no {SWEEP_FILE} in it")
    stored = Sweep.read(out)
    if stored != sweep:
        raise ValueError(
            f"{out} sweeps {stored.setting}={','.join(stored.values)}: omit --sweep, or start another sweep"
        )
