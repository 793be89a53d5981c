"""The --sweep of launch/evaluate.py: one evaluation for each value of a setting, a table and a page.

OUT/run.json                          the settings that all of them share
OUT/sweep.json                        the setting, its values and, at the end, the table
OUT/sweep.html                        the table, and accuracy against tokens
OUT/agent.memory_tokens=512/          an evaluation like any other
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cli
from rich.console import Console

from memsearcher_jax.agent.prompts import with_workflow
from memsearcher_jax.config import RunConfig, check, from_dict, settings, to_dict
from memsearcher_jax.jsonl import parse_object
from memsearcher_jax.report.sweep import Point, show_sweep, sweep_json, write_sweep_page
from memsearcher_jax.rl.run_folder import is_run, write_run_config

SWEEP_FILE, PAGE = "sweep.json", "sweep.html"
OWN_FILES = ("data.", "retrieval.")  # settings that decide what data and index hold


@dataclass(frozen=True)
class Sweep:
    setting: str
    values: tuple[str, ...]

    @classmethod
    def parse(cls, text: str, kind: type[cli.Command]) -> Sweep:
        """Of SETTING=A,B,... Raises ValueError."""
        setting, equals, listed = text.partition("=")
        values = tuple(value.strip() for value in listed.split(","))
        if not equals or not all(values):
            raise ValueError(f"--sweep {text}: write SETTING=A,B,..., such as agent.memory_tokens=512,1024")
        if setting not in settings(RunConfig()):
            raise ValueError(f"--sweep: {cli.no_such_setting(f'--{setting}', kind)}")
        if twice := [value for value in values if values.count(value) > 1]:
            raise ValueError(f"--sweep {text}: {twice[0]} stands there twice")
        return cls(setting, values)

    @classmethod
    def read(cls, folder: Path) -> Sweep:
        file = folder / SWEEP_FILE
        stored = parse_object(str(file), file.read_bytes())
        try:
            return cls(stored["setting"], tuple(stored["values"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"{file} is damaged ({error}): start another sweep") from error

    def folder(self, value: str) -> str:
        return f"{self.setting}={value}".replace("/", "_")


def is_sweep(folder: Path) -> bool:
    return (folder / SWEEP_FILE).is_file()


def run(flags: Any, evaluate: Callable[..., Any], console: Console) -> None:
    """All of it; `flags` and `evaluate` are those of evaluate.py."""
    with cli.one_line_errors(), contextlib.ExitStack() as starting:
        sweep = Sweep.parse(flags.sweep, type(flags)) if flags.sweep else Sweep.read(flags.out)
        configs = {value: with_value(flags.run, sweep.setting, value) for value in sweep.values}
        if flags.resume:
            refuse_another(flags.out, sweep)
            cli.refuse_changes(flags.out, flags.run, "sweep")
            out = flags.out
        else:
            out = starting.enter_context(cli.new_folder(flags.out, "sweep"))
            cli.write_json(out / SWEEP_FILE, {"setting": sweep.setting, "values": sweep.values})
            write_run_config(out, flags.run)
    workspace = None if sweep.setting.startswith(OWN_FILES) else out
    points = []
    for value, config in configs.items():
        console.rule(f"{sweep.setting} {value}", align="left")
        folder = out / sweep.folder(value)
        done = evaluate(config, folder, resume=is_run(folder), workspace=workspace)
        points.append(Point.of(value, done.numbers))
    console.rule(sweep.setting, align="left")
    show_sweep(sweep.setting, points, console)
    result = {"setting": sweep.setting, "values": sweep.values, "table": sweep_json(points)}
    cli.write_json(out / SWEEP_FILE, result)
    cli.write_json(flags.json, result)
    write_sweep_page(out / PAGE, sweep.setting, points, f"Evaluations of {flags.run.model.path}.")
    print(f"{out}: {len(points)} evaluations; table and plot in {out / PAGE}")


def with_value(config: RunConfig, setting: str, text: str) -> RunConfig:
    """The config with one setting changed, and checked; raises ValueError that names the setting.

    Another agent.workflow brings the packaged prompts for it, as --workflow does.
    """
    *sections, name = setting.split(".")
    values = to_dict(config)
    section = values
    for one in sections:
        section = section[one]
    section[name] = text if isinstance(section[name], str) else _plain(text)
    changed = from_dict(values)
    if setting == "agent.workflow":
        changed = replace(changed, agent=with_workflow(config.agent, text))
    return check(changed)


def _plain(text: str) -> Any:
    """A number, true, false; or the text itself, of which the setting's type then says what is wrong with it."""
    try:
        return json.loads(text.lower())
    except ValueError:
        return text


def refuse_another(out: Path, sweep: Sweep) -> None:
    if not is_sweep(out):
        raise FileNotFoundError(f"{out} holds no sweep: there is no {SWEEP_FILE} in it")
    stored = Sweep.read(out)
    if stored != sweep:
        raise ValueError(
            f"{out} sweeps {stored.setting}={','.join(stored.values)}: leave --sweep out, or start another sweep"
        )
