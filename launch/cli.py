"""The command line that all programs share: presets, overrides, and errors in one line.

--config NAME            a preset in configs/, or the path of a file like those there
--section.field value    any setting of the preset
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import importlib.util
import io
import itertools
import json
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import tyro

from memsearcher_jax.agent import protocol, reward
from memsearcher_jax.config import RunConfig, check, differences, from_dict, settings, to_dict
from memsearcher_jax.data.problems import Problems
from memsearcher_jax.report.memory_quality import Rules
from memsearcher_jax.rl.run_folder import INDEX, is_run, is_vacant, read_run_config

PRESETS = Path(__file__).resolve().parents[1] / "configs"
CHANGEABLE = ("model.attention", "model.remat")  # of the model's settings, what a run may change when it is resumed
RULES = Rules(reward.normalize, protocol.memory)  # by which reports measure memories
INTERRUPTED = 130  # exit status, as shells report Ctrl-C
_Folder = Annotated[Path | None, tyro.conf.arg(metavar="DIR")]
_File = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]


class Parser(argparse.ArgumentParser):
    """For programs without a preset: says what is wrong in one line, as the others do."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (--help explains every flag)")


@dataclass(frozen=True)
class Command:
    """Flags that every program has."""

    config: Annotated[str, tyro.conf.arg(metavar="NAME")] = "nano"
    """Preset: a name in configs/, or a file like those there. A run's folder brings its own settings instead."""
    out: _Folder = None
    """Folder to write; it must be new, unless a run is resumed. Without it: a dated one under runs/."""
    resume: bool = False
    """Go on with what stands in --out, under the settings stored there and those given now."""
    checkpoint: _Folder = None
    """Weights to start from: a run's folder (its newest checkpoint) or a Hugging Face folder."""
    compile_cache: Annotated[str, tyro.conf.arg(metavar="DIR")] = ""
    """Keep compiled programs in this folder (gs:// too) and load them from there. They are code: share it with nobody
    whom you would not let run programs as you."""
    json: _File = None
    """Also write the result to this file, as JSON."""
    run: Annotated[RunConfig, tyro.conf.arg(name=""), tyro.conf.FlagConversionOff] = field(default_factory=RunConfig)

    def adjusted(self) -> Command:
        """The same with `run` changed as the program's own flags say."""
        return self


Flags = TypeVar("Flags", bound=Command)


def run(main: Callable[[Sequence[str]], None]) -> None:
    """Runs a program: quiet about what its libraries warn of, and short when it is stopped by Ctrl-C."""
    logging.getLogger("absl").setLevel(logging.ERROR)
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:  # whoever read our output, `head` for instance, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parse(kind: type[Flags], argv: Sequence[str]) -> Flags:
    """The flags of one program, with `run` made of preset or stored config, checkpoint and overrides, and checked.

    Loads no JAX, so that --help and an error answer at once. Raises ValueError or OSError in one line; --help prints
    and exits.
    """
    chosen = _first_look(argv)
    flags = _resumed(kind, chosen, argv) if chosen.resume else _fresh(kind, chosen, argv)
    check(flags.run)
    _keep_compiled(flags.compile_cache)
    if flags.json:
        _check_can_write(flags.json)
    return flags


def is_address(name: str) -> bool:
    """Whether this names a place that is no path of this machine, such as gs://BUCKET/FOLDER."""
    return re.match(r"[a-z][a-z0-9+.-]*:/", name) is not None


def load_preset(name: str) -> RunConfig:
    """The config that the preset `name` returns. Raises ValueError if there is none, or if it cannot be used."""
    file = Path(name) if name.endswith(".py") else PRESETS / f"{name}.py"
    if not file.is_file():
        known = ", ".join(sorted(path.stem for path in PRESETS.glob("*.py")))
        raise ValueError(f"no preset {name!r}: choose one of {known}, or give the path of a preset file")
    spec = importlib.util.spec_from_file_location(f"preset_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        preset = getattr(module, file.stem)()
    except Exception as error:  # a user's file may raise anything
        raise ValueError(f"{file}: the preset function {file.stem}() fails with {_named(error)}") from error
    if not isinstance(preset, RunConfig):
        raise ValueError(f"{file}: {file.stem}() must return a RunConfig, it returned {type(preset).__name__}")
    return from_dict(to_dict(preset))


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turns what a user can put right into one line on stderr and exit status 2. Wrap what comes before long work."""
    try:
        yield
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        line = " ".join(str(error).split())
        print(f"error: {line}", file=sys.stderr)
        raise SystemExit(2) from None


@contextlib.contextmanager
def new_folder(out: Path | None, kind: str) -> Iterator[Path]:
    """The folder to write: `out`, or a dated one under runs/. If the block raises, the folder is as it was.

    Raises OSError if something else is in it.
    """
    folder = out or Path("runs") / f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"--out {folder} is a file: name a folder")
    if not is_vacant(folder):
        hint = "continue the run there with --resume, or choose another" if is_run(folder) else "choose another --out"
        raise FileExistsError(f"--out {folder} is not empty: {hint}")
    existed = folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"--out {folder} cannot be made ({error.strerror}): choose another folder") from error
    before = set(folder.iterdir())
    try:
        yield folder
    except BaseException:
        for made in set(folder.iterdir()) - before:
            shutil.rmtree(made) if made.is_dir() else made.unlink()
        if not existed:
            folder.rmdir()
        raise


def standing_index(config: RunConfig) -> Path | None:
    """The index in the folder of the run that the weights are from, if it was built for what is searched now."""
    folder = Path(config.model.path)
    if not config.model.path or not is_run(folder) or not (folder / INDEX).exists():
        return None
    changed = [name for name, _, _ in differences(read_run_config(folder), config)]
    return None if any(name.startswith(("retrieval.", "data.world.")) for name in changed) else folder / INDEX


def need_weights(flags: Command, otherwise: str = "") -> None:
    """For programs that do nothing with random weights."""
    if not flags.run.model.path:
        raise ValueError(f"--checkpoint is missing: name a run's folder or a Hugging Face folder{otherwise}")


def cut(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """What stands before the first --, and what after it."""
    words = list(argv)
    place = words.index("--") if "--" in words else len(words)
    return words[:place], words[place + 1 :]


def refuse_resume(flags: Command, what: str) -> None:
    """For programs that do one short thing."""
    if flags.resume:
        raise ValueError(f"--resume: {what} has nothing to go on with; leave the flag out")


def refuse_changes(out: Path, config: RunConfig, what: str) -> None:
    """Raises ValueError if the settings are not those that are stored in `out`, where `what` goes on."""
    for name, then, now in differences(read_run_config(out), config):
        raise ValueError(f"{name} was {then!r} when {out} was started and cannot become {now!r}: start another {what}")


def tell_skipped(problems: Problems) -> None:
    """Says on stderr how many rows of the question files were left out, and why the first was."""
    if problems.skipped_count:
        print(
            f"{problems.skipped_count} malformed rows are left out; the first: {problems.skipped[0]}", file=sys.stderr
        )


def write_json(file: Path | None, result: dict[str, Any]) -> None:
    """Writes the result where --json says, beside and then renamed."""
    if file is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(file.name + ".partial")
    beside.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    beside.rename(file)


def no_such_setting(unknown: str, kind: type[Flags]) -> str:
    """One line on a flag that there is not, with the one that may have been meant."""
    if not unknown.startswith("--"):
        return f"{unknown!r} belongs to no setting: settings are written --section.field value"
    name = unknown.split("=")[0]
    flags = [one.name for one in dataclasses.fields(kind) if one.name != "run"]
    known = [f"--{known}" for known in (*flags, *settings(RunConfig()))]
    close = difflib.get_close_matches(name.replace("-", "_").replace("__", "--", 1), known, n=1)
    return f"no setting {name!r}: " + (f"did you mean {close[0]}?" if close else "--help lists all settings")


def _keep_compiled(folder: str) -> None:
    """JAX reads the variable when it is loaded, which no program has done yet when its flags are parsed."""
    if not folder:
        return
    if not is_address(folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
        folder = str(Path(folder).absolute())
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    if "jax" in sys.modules:
        sys.modules["jax"].config.update("jax_compilation_cache_dir", folder)


def _check_can_write(file: Path) -> None:
    """Raises OSError where the result could not be written after the work."""
    if file.is_dir():
        raise IsADirectoryError(f"--json {file} is a folder: name a file")
    folder = next(folder for folder in file.absolute().parents if folder.exists())
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise OSError(f"--json {file} cannot be written: {folder} is no folder that you may write to")


def _first_look(argv: Sequence[str]) -> argparse.Namespace:
    """The flags that decide where the settings come from, before the others can be read."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--checkpoint", type=Path)
    try:
        chosen = parser.parse_known_args(list(argv))[0]
    except argparse.ArgumentError as error:
        raise ValueError(f"{error} (--help explains every setting)") from error
    for flag, folder in (("--out", chosen.out), ("--checkpoint", chosen.checkpoint)):
        if is_address(str(folder)):
            address = str(folder).replace(":/", "://", 1)  # a path has lost a stroke of it
            raise ValueError(
                f"{flag} {address}: only --out of launch/tpu_train.py may be in a bucket: "
                f"copy it here, gcloud storage cp --recursive {address} FOLDER"
            )
    return chosen


def _fresh(kind: type[Flags], chosen: argparse.Namespace, argv: Sequence[str]) -> Flags:
    """Settings of a preset, or of the run in --checkpoint, with the weights in --checkpoint and the overrides."""
    from_run = chosen.config is None and chosen.checkpoint is not None and is_run(chosen.checkpoint)
    base = read_run_config(chosen.checkpoint) if from_run else load_preset(chosen.config or Command.config)
    flags = _with_overrides(kind, base, argv)
    if flags.checkpoint is None:
        return flags
    if not flags.checkpoint.is_dir():
        raise FileNotFoundError(f"--checkpoint {flags.checkpoint}: no such folder")
    # A run's weights belong to the tokenizer in its folder, wherever that one came from.
    tokenizer = "" if is_run(flags.checkpoint) else flags.run.model.tokenizer
    model = replace(flags.run.model, path=str(flags.checkpoint), tokenizer=tokenizer)
    return replace(flags, run=replace(flags.run, model=model))


def _resumed(kind: type[Flags], chosen: argparse.Namespace, argv: Sequence[str]) -> Flags:
    """Settings of the run in --out, with the overrides. --config and --checkpoint may only repeat what is stored."""
    if chosen.out is None:
        raise ValueError("--resume needs --out, the folder of the run to go on with")
    stored = read_run_config(chosen.out)
    flags = _with_overrides(kind, stored, argv)
    for name, then, now in differences(stored, flags.run):
        if name.startswith("model.") and name not in CHANGEABLE:
            raise ValueError(
                f"{name} was {then!r} when {chosen.out} was started and cannot become {now!r}: leave it out"
            )
    if chosen.config or chosen.checkpoint:
        for name, then, now in differences(flags.run, _fresh(kind, chosen, argv).run):
            raise ValueError(
                f"{chosen.out} goes on with {name} {then!r}, but --config and --checkpoint mean {now!r}: leave them out"
            )
    return flags


def _with_overrides(kind: type[Flags], base: RunConfig, argv: Sequence[str]) -> Flags:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            flags, unknown = tyro.cli(
                kind,
                default=replace(kind(), run=base),
                args=list(argv),
                return_unknown_args=True,
                use_underscores=True,
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ValueError(_in_plain_words(said.getvalue())) from None
    if unknown:
        raise ValueError(no_such_setting(unknown[0], kind))
    return flags.adjusted()


def _in_plain_words(box: str) -> str:
    """The first paragraph below the title of tyro's message, in one line and without Python's jargon.

    Terminals without UTF-8 get the message between lines of dashes and not in a box.
    """
    lines = [line.strip("│ ") for line in box.splitlines()]
    body = lines[1:] if lines[0].startswith("╭") else lines[2:]
    words = itertools.takewhile(lambda line: not set(line) <= set("─-╰╯"), body)
    sentence = re.sub(r"invalid literal for int\(\) with base 10: (.*)", r"\1 is no whole number", " ".join(words))
    sentence = re.sub(r"could not convert string to float: (.*)", r"\1 is no number", sentence)
    return f"{sentence} (--help explains every setting)"


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
