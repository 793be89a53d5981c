"""The command line that all programs share: presets, overrides, and errors in one line.

--config NAME            a preset in configs/, or the path of a file like those there
--section.field value    any field of the preset
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import importlib.util
import io
import json
import sys
import time
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from memsearcher_jax.config import RunConfig, check
from memsearcher_jax.rl.source import is_run, read_run_config

PRESETS = Path(__file__).resolve().parents[1] / "configs"
Flags = TypeVar("Flags", bound="Command")


@dataclass(frozen=True)
class Command:
    """Flags that every program has."""

    config: str = "tiny"
    """Preset: a name in configs/, or the path of a file like those there."""
    out: Path | None = None
    """Folder that this command writes; it must be new, unless a run is resumed."""
    resume: bool = False
    """Go on with what stands in --out from its newest complete checkpoint."""
    checkpoint: Path | None = None
    """Weights to start from: a run folder, or a Hugging Face folder."""
    json: Path | None = None
    """Also write the result to this file, as JSON."""
    run: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)


def parse(flags: type[Flags], argv: Sequence[str]) -> Flags:
    """The flags of one program, with `run` made of preset (or stored config) and overrides, and checked.

    A resumed run takes the config that it stored; so does a program that is pointed at a run folder by --checkpoint.
    Raises ValueError in one line; --help prints and exits.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--config")
    first.add_argument("--resume", action="store_true")
    first.add_argument("--out", type=Path)
    first.add_argument("--checkpoint", type=Path)
    try:
        chosen, _ = first.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from error
    base = _base_config(chosen)
    default = replace(flags(), run=base)
    parsed, unknown = _tyro(flags, default, argv)
    if unknown:
        raise ValueError(_no_such_setting(unknown[0], flags))
    check(parsed.run)
    return parsed


def load_preset(name: str) -> RunConfig:
    """The config that the preset `name` returns. Raises ValueError if there is none."""
    file = Path(name) if name.endswith(".py") else PRESETS / f"{name}.py"
    if not file.is_file():
        known = ", ".join(sorted(path.stem for path in PRESETS.glob("*.py")))
        raise ValueError(f"no preset {name!r}: choose one of {known}, or give the path of a preset file")
    spec = importlib.util.spec_from_file_location(f"preset_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, file.stem):
        raise ValueError(f"{file} has no function {file.stem}() that returns the preset")
    return getattr(module, file.stem)()


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turns what a user can put right into one line on stderr and exit status 2. Wrap what comes before long work."""
    try:
        yield
    except (ValueError, OSError) as error:
        line = " ".join(str(error).split())
        print(f"error: {line}", file=sys.stderr)
        raise SystemExit(2) from None


def new_folder(out: Path | None, kind: str) -> Path:
    """The folder to write: `out`, or a dated one under runs/. Raises FileExistsError if something is in it."""
    folder = out or Path("runs") / f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is not empty: choose another --out, or continue a run there with --resume")
    return folder


def at_checkpoint(flags: Command, *, needed: bool = False) -> RunConfig:
    """The config with its weights, and for a run of ours its tokenizer, taken from --checkpoint if there is one."""
    model = flags.run.model
    if flags.checkpoint is None:
        if needed and not model.path:
            raise ValueError("--checkpoint is missing: name a run's folder, or a Hugging Face folder")
        return flags.run
    if not flags.checkpoint.is_dir():
        raise FileNotFoundError(f"--checkpoint {flags.checkpoint}: no such folder")
    tokenizer = "" if is_run(flags.checkpoint) else model.tokenizer
    return replace(flags.run, model=replace(model, path=str(flags.checkpoint), tokenizer=tokenizer))


def workspace(flags: Command, config: RunConfig, otherwise: Path) -> Path:
    """Where the index and the data are: in the run's folder if it was built for the same, else `otherwise`."""
    if flags.checkpoint and is_run(flags.checkpoint):
        stored = read_run_config(flags.checkpoint)
        if (stored.retrieval, stored.data) == (config.retrieval, config.data):
            return flags.checkpoint
    return otherwise


def refuse_resume(flags: Command, what: str) -> None:
    """For programs that do one short thing."""
    if flags.resume:
        raise ValueError(f"--resume: {what} has nothing to go on with; leave the flag out")


def write_json(file: Path | None, result: dict[str, Any]) -> None:
    """Writes the result where --json says, beside and then renamed."""
    if file is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(file.name + ".partial")
    beside.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    beside.rename(file)


def _base_config(chosen: argparse.Namespace) -> RunConfig:
    if chosen.resume:
        if chosen.out is None:
            raise ValueError("--resume needs --out, the folder of the run to go on with")
        return read_run_config(chosen.out)
    if chosen.config is None and chosen.checkpoint is not None and is_run(chosen.checkpoint):
        return read_run_config(chosen.checkpoint)
    return load_preset(chosen.config or Command.config)


def _tyro(flags: type[Flags], default: Flags, argv: Sequence[str]) -> tuple[Flags, list[str]]:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(
                flags,
                default=default,
                args=list(argv),
                return_unknown_args=True,
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ValueError(_first_sentence(said.getvalue())) from None


def _first_sentence(box: str) -> str:
    """What tyro says inside its box, up to the first rule, in one line."""
    words = []
    for line in box.splitlines():
        inside = line.strip().strip("│").strip()
        if line.startswith("╭") or not inside:
            continue
        if set(inside) == {"─"} or line.startswith("╰"):
            break
        words.append(inside)
    return " ".join(words) + " (--help explains every setting)"


def _no_such_setting(unknown: str, flags: type[Flags]) -> str:
    name = unknown.split("=")[0]
    close = difflib.get_close_matches(name, _all_flags(flags), n=1)
    hint = f"did you mean {close[0]}?" if close else "--help lists all settings"
    return f"no setting {name!r}: {hint}"


def _all_flags(kind: type, prefix: str = "--") -> list[str]:
    """The name of every flag of a dataclass, sections included; the fields of `run` have no prefix of their own."""
    names = []
    hints = typing.get_type_hints(kind)
    for name in (one.name for one in dataclasses.fields(kind)):
        if name == "run":
            names += _all_flags(RunConfig)
        elif dataclasses.is_dataclass(hints[name]):
            names += _all_flags(hints[name], f"{prefix}{name}.")
        else:
            names.append(prefix + name)
    return names
