"""The command line that all commands share: presets, overrides, help, and errors in one line.

--config NAME            a preset in configs/, or the path of a preset file
--section.field value    any setting of the preset
--help [SECTION]         the flags of the command, or the settings of a section

The flags that select settings (`SettingsSource`) are parsed first; these are then the defaults of the other flags.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import io
import logging
import os
import re
import sys
import traceback
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import tyro

from memsearcher_jax import python_files
from memsearcher_jax.agent.harness import open_harness
from memsearcher_jax.agent.tool_state import named_tools
from memsearcher_jax.checks import check, check_agent, check_ranges
from memsearcher_jax.config import RunConfig, agent_of, differences, from_dict, settings, to_dict
from memsearcher_jax.launch import command_words, compile_cache, help_pages, interrupts, outputs, preconditions
from memsearcher_jax.launch.unused_settings import given_settings, refuse_unused
from memsearcher_jax.retrieval.config import HASHING
from memsearcher_jax.runs import hub
from memsearcher_jax.runs.export_settings import find_export, read_export_config
from memsearcher_jax.runs.inputs import require_same_code, with_absolute_paths, with_own_inputs
from memsearcher_jax.runs.path_settings import expanded, with_expanded_paths, with_stored_paths
from memsearcher_jax.runs.run_dir import is_run, located, read_run_config

PRESETS = Path(__file__).resolve().parents[1] / "configs"
RESUMABLE_MODEL_SETTINGS = ("model.attention", "model.remat")  # the model settings that a resumed run may change
LOG_LEVELS = {
    "absl": logging.ERROR,
    "matplotlib": logging.ERROR,
    "gcsfs": logging.CRITICAL,  # it logs tracebacks of what it raises
}
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"  # begins the message of XLA about a device
MESSAGE_CHARACTERS = 300  # of XLA
IS_PATH = "the text of this flag is a path, or several that commas separate"  # in the Annotated type of a flag
Directory = Annotated[Path | None, tyro.conf.arg(metavar="DIR")]
File = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]
FlagsT = TypeVar("FlagsT")


@dataclass(frozen=True)
class SettingsSource:
    """Flags that select the settings that a command starts from."""

    config: Annotated[str, tyro.conf.arg(metavar="NAME"), IS_PATH] = ""
    """Preset: a name in configs/, or the path of a preset file. Default: the settings of the run in --checkpoint, or
    nano."""
    checkpoint: Directory = None
    """Weights to start from: a run directory (its newest checkpoint), a Hugging Face directory, or a repository of the
    Hub, OWNER/NAME or OWNER/NAME@REVISION."""


@dataclass(frozen=True)
class ResumableSource(SettingsSource):
    out: Directory = None
    """Directory to write. It must be new, unless --resume is given. Default: a dated directory under runs/."""
    resume: bool = False
    """Continue in --out with the settings stored there; settings given now override them."""


@dataclass(frozen=True)
class Command(SettingsSource):
    """Flags of every command that uses a preset."""

    needs_weights: ClassVar[bool] = True
    """Whether adapters need the weights that they belong to."""
    has_result: ClassVar[bool] = True
    """Whether there is something for --json."""

    compile_cache: Annotated[str, tyro.conf.arg(metavar="DIR"), IS_PATH] = ""
    """JAX's persistent compilation cache, a directory or gs:// address; off: none. Default: in ~/.cache, except for
    several CPU devices. It holds executable code: share it only with users who may run programs as you."""
    json: File = None
    """Also write the result to this file, as JSON."""
    smoke_test: bool = False
    """Let the preset of a published model run with random weights, synthetic data and hashed words, on any device."""
    run: Annotated[RunConfig, tyro.conf.arg(name=""), tyro.conf.FlagConversionOff] = field(default_factory=RunConfig)

    @property
    def use(self) -> str:
        """What the command is used for, by which `unused_settings` knows the settings that it does not read."""
        return type(self).__name__

    def with_settings(self) -> Command:
        """Applies the command's other flags to `run`."""
        return self

    def check(self) -> None:
        """Raises ValueError for settings that contradict each other, or what the command does with them."""
        check(self.run, needs_weights=self.needs_weights)


CommandT = TypeVar("CommandT", bound=Command)


def run(main: Callable[[Sequence[str]], None]) -> None:
    """Runs a command without library warnings. Status 130: Ctrl-C or SIGTERM; 141: nobody reads its output any more."""
    if sys.argv[1:] == ["--version"]:
        print(f"memsearcher_jax {importlib.metadata.version('memsearcher_jax')}")
        return
    for library, level in LOG_LEVELS.items():
        logging.getLogger(library).setLevel(level)
    may_have_tpu = preconditions.has_accelerator() or preconditions.has_tpu()
    if importlib.util.find_spec("libtpu") and not may_have_tpu:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # as JAX chooses, after errors that libtpu prints
    if preconditions.has_tpu() and (fault := preconditions.libtpu_fault()):
        print(outputs.printable(fault), file=sys.stderr)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    for stream in (sys.stdin, sys.stdout):  # for a reply that is not UTF-8, and a terminal without Unicode
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        with interrupts.one_line_end():
            main(sys.argv[1:])
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still buffered
        raise SystemExit(141) from None


def parse(command: type[CommandT], argv: Sequence[str]) -> CommandT:
    """The flags of a command, with `run` made from preset or stored settings, checkpoint and overrides, and checked.

    Does not import JAX, so that --help and errors are immediate. Raises ValueError or OSError in one line; tyro's
    errors and --help are printed and exit.
    """
    return parse_settings(command, *parse_source(command, argv))


def parse_source(command: type[Command], argv: Sequence[str]) -> tuple[Any, list[str]]:
    """The `SettingsSource` part of the command's flags, and the words that are left."""
    argv = command_words.with_joined_repeats(argv, _list_flags(command))
    source_class = next(
        base for base in command.__mro__ if issubclass(base, SettingsSource) and not issubclass(base, Command)
    )
    return _tyro(source_class, argv, add_help=False, return_unknown_args=True)


def parse_settings(command: type[CommandT], source: SettingsSource, words: Sequence[str]) -> CommandT:
    """The flags of a command, whose remaining `words` override the settings that `source` selects."""
    preconditions.require_32_bits()
    _require_local_paths(source)
    if isinstance(source, ResumableSource) and source.resume:
        flags = _resumed(command, source, words)
    else:
        flags = _new(command, source, words)
    if flags.json and not command.has_result:
        raise ValueError("--json writes the result of a command, and a service has none: omit it")
    flags.check()
    open_own_files(flags.run)
    left_out = refuse_unused(flags.use, given_settings(words), flags.run)
    if left_out:
        print(f"left out, because this command does not use it: --{', --'.join(left_out)}", file=sys.stderr)
    given_as = {"model.path": "--checkpoint"} if flags.checkpoint else {}
    flags = replace(flags, run=with_absolute_paths(hub.pinned(flags.run, flags=given_as)))
    compile_cache.choose(flags.compile_cache, flags.run.mesh.cpu_devices)
    return flags


def open_own_files(config: RunConfig) -> None:
    """Executes the files of the user's that the config names. Raises ValueError or OSError in one line for a mistake.

    Later calls get the same modules.
    """
    if config.has_own_agent:
        check_agent(config, agent_of(config))
    if config.agent.harness:
        preconditions.require_extra("serve", "fastapi", "uvicorn")
        open_harness(config.agent.harness)
    for file in config.agent.tools:
        if not file.startswith("mcp:"):
            named_tools(file)
    function = config.reward.function
    if function and not callable(python_files.load_named(function, "reward.function", "reward")):
        raise ValueError(f"reward.function {function}: is no function")


def parse_flags(kind: Callable[..., FlagsT], argv: Sequence[str], default: FlagsT | None = None) -> FlagsT:
    """The flags `kind` of a command without a preset, with the ranges of their fields and --json checked.

    Raises ValueError or OSError in one line; tyro's errors and --help are printed and exit.
    """
    words = command_words.with_joined_repeats(argv, _list_flags(kind))
    flags = _tyro(kind, words, default=tyro.MISSING_NONPROP if default is None else default)
    check_ranges(flags, "--")
    _require_local_paths(flags)
    if json_file := getattr(flags, "json", None):
        outputs.require_writable(json_file, "--json")
    return flags


def address_of(path: object) -> str:
    """The address, such as gs://BUCKET/DIR, that this is; "" for a local path. Path merges its two slashes."""
    match = re.match(r"([a-z][a-z0-9+.-]*):/+", str(path))
    return f"{match[1]}://{str(path)[match.end() :]}" if match else ""


def presets() -> dict[str, Path]:
    """The file in configs/ of each preset: a public function without arguments that returns a RunConfig."""
    header = re.compile(r"^def ([a-z]\w*)\(\) -> RunConfig:", re.MULTILINE)
    files = sorted(PRESETS.glob("*.py"))
    return {name: file for file in files for name in header.findall(file.read_text(encoding="utf-8"))}


def load_preset(name: str) -> RunConfig:
    """The config of a preset: a name in configs/, or the path of a file with a function of the file's name.

    Raises ValueError if it does not exist or is invalid.
    """
    packaged = presets()
    file = Path(name) if name.endswith(".py") else packaged.get(name, Path(name))
    if not file.is_file() or file.suffix != ".py":
        raise ValueError(f"no preset {name!r}: choose one of {', '.join(sorted(packaged))}, or give the path of a file")
    make_preset = python_files.load_named(file, "--config", *([name] if name in packaged else []))
    try:
        preset = make_preset()
    except Exception as error:  # a user's file may raise anything
        raise ValueError(f"--config {file.absolute()}: {python_files.described(error)}") from error
    if not isinstance(preset, RunConfig):
        raise ValueError(f"--config {file} must return a RunConfig, it returned {type(preset).__name__}")
    return from_dict(to_dict(preset))


@contextlib.contextmanager
def one_line_errors(way_on: str = "") -> Iterator[None]:
    """Prints an error that the user can mend in one line on stderr, and exits.

    Without `way_on`, around what precedes long work: prints ValueError, OSError, every error that a file of the user's
    raises and JAX's errors about missing devices; exits with status 2. With `way_on`, around long work: prints an
    OSError, or XLA's about the memory of a device, followed by `way_on`; exits with status 1. Other errors pass.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except Exception as error:
        line = _long_work_error(error) if way_on else _start_error(error)
        if line is None:
            raise
        ending = f"; {way_on}" if way_on else ""
        print(f"error: {outputs.printable(line)}{ending}", file=sys.stderr, flush=True)
        raise SystemExit(1 if way_on else 2) from None


def _long_work_error(error: Exception) -> str | None:
    """The line for an error of long work; None for a bug, which is raised."""
    if isinstance(error, OSError):
        return str(error)
    if isinstance(error, RuntimeError) and str(error).startswith(OUT_OF_MEMORY):
        first_line = str(error).splitlines()[0]  # the others list what is allocated
        return (
            f"the memory of a device does not suffice ({first_line[:MESSAGE_CHARACTERS]}): plan_tpu.py --suggest finds "
            "settings that fit, and tpu_train.py --suggest uses them"
        )
    return None


def _start_error(error: Exception) -> str | None:
    """The line for an error before long work; None for a bug, which is raised."""
    own_line = python_files.own_line(error)
    is_expected = isinstance(error, ValueError | OSError)
    # JAX reports a missing device by several types of error, among them AssertionError.
    frames = traceback.extract_tb(error.__traceback__)
    no_device = any(frame.filename.endswith("xla_bridge.py") for frame in frames)
    if not (is_expected or own_line or no_device):
        return None
    line = f"{error}{own_line}" if is_expected else python_files.described(error)
    if no_device:
        return f"JAX finds no device ({line}): install the plugin that JAX_PLATFORMS names, or unset it"
    return line


def _require_local_paths(flags: Any) -> None:
    for name, value in vars(flags).items():
        if isinstance(value, Path) and (address := address_of(value)):
            raise ValueError(
                f"--{name} {address}: only --out of training may be in a bucket: give a local path; "
                "`gcloud storage cp --recursive` copies from and to a bucket"
            )


def _new(command: type[CommandT], source: SettingsSource, words: Sequence[str]) -> CommandT:
    """Settings of a preset, or of the run in --checkpoint, with the weights in --checkpoint and the overrides."""
    checkpoint = source.checkpoint
    run_folder = None
    export = None
    if checkpoint is not None:
        run_folder = checkpoint if is_run(checkpoint) else None
        export = find_export(checkpoint, "--checkpoint")
    base = _base_settings(source, words, run_folder, export)
    has_settings = run_folder or export
    if has_settings:  # its weights contain the adapters that it started from
        base = replace(base, model=replace(base.model, adapter=""))
    flags = _with_overrides(command, source, base, words)
    if has_settings and not source.config:
        require_same_code(has_settings, base, flags.run, words)
    if checkpoint is None:
        return flags
    if not located(checkpoint).is_dir() and not hub.is_repository(str(checkpoint)):
        raise FileNotFoundError(f"--checkpoint {checkpoint}: no such directory")
    model = replace(flags.run.model, path=str(checkpoint))
    # A run directory has the tokenizer and the adapters of its weights; into other weights model.adapter is merged.
    model = replace(model, tokenizer="") if run_folder else replace(model, lora_rank=0)
    return replace(flags, run=replace(flags.run, model=model))


def _base_settings(
    source: SettingsSource, words: Sequence[str], run_folder: Path | None, export: Path | None
) -> RunConfig:
    """The settings before the overrides: of --config, of the run or export in --checkpoint, or of an adapter."""
    if source.config:
        return load_preset(source.config)
    if run_folder:
        return with_own_inputs(run_folder, read_run_config(run_folder))
    if export is None and (adapter := command_words.flag_value(words, "--model.adapter")):
        export = find_export(expanded(adapter), "--model.adapter")
    return read_export_config(export) if export else load_preset("nano")


def _resumed(command: type[CommandT], source: ResumableSource, words: Sequence[str]) -> CommandT:
    """Settings of the run in --out, with the overrides. --config and --checkpoint may only repeat what is stored."""
    out = source.out
    if out is None:
        raise ValueError("--resume needs --out, the directory of the run to continue")
    stored = read_run_config(out)
    flags = _with_overrides(command, source, stored, words)
    require_same_code(out, stored, flags.run, words)
    flags = replace(flags, run=_as_a_run_stores(flags.run, stored))
    for name, then, now in differences(stored, flags.run):
        if name.startswith("model.") and name not in RESUMABLE_MODEL_SETTINGS:
            raise ValueError(f"{name} is {then!r} in {out} and cannot change to {now!r}: omit it")
    if source.config or source.checkpoint:
        given = _as_a_run_stores(_new(command, source, words).run, stored)
        for name, then, now in differences(flags.run, given):
            raise ValueError(f"{name} is {then!r} in {out}, but --config and --checkpoint give {now!r}: omit both")
    return flags


def _as_a_run_stores(config: RunConfig, stored: RunConfig) -> RunConfig:
    """The config in the form in which a run stored it: with the same commits of the Hub and the same absolute paths."""
    return with_absolute_paths(hub.pinned(with_stored_paths(config, stored), stored))


def _with_overrides(command: type[CommandT], source: SettingsSource, base: RunConfig, words: Sequence[str]) -> CommandT:
    flags = command(**vars(source), run=base)
    help_pages.print_if_asked(flags, words)
    flags = parse_flags(command, words, default=flags).with_settings()
    if flags.smoke_test:
        retrieval = replace(flags.run.retrieval, encoder=flags.run.retrieval.encoder or HASHING)
        flags = replace(flags, run=replace(flags.run, published_model=False, retrieval=retrieval))
    return flags  # type: ignore[return-value]


def _tyro(kind: Any, argv: Sequence[str], **options: Any) -> Any:
    """What tyro parses. It prints its own errors, and exits with status 2."""
    for word in argv:
        if any("\ud800" <= letter <= "\udfff" for letter in word):
            raise ValueError(f"the argument {word!r} is not valid UTF-8")
    if empty := command_words.empty_flag(argv):
        raise ValueError(f"{empty} is empty: give a value, or omit it")
    parsed = tyro.cli(kind, args=list(argv), use_underscores=True, config=(tyro.conf.FlagCreatePairsOff,), **options)
    if options.get("return_unknown_args"):
        flags, unknown = parsed
        return _with_expanded_paths(flags), unknown
    return _with_expanded_paths(parsed)


def _with_expanded_paths(flags: Any) -> Any:
    """The flags with a home directory in place of ~ in every path: the one place for all commands and settings."""
    changes: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(type(flags), include_extras=True).items():
        value = getattr(flags, name)
        if isinstance(value, RunConfig):
            changes[name] = with_expanded_paths(value)
        elif isinstance(value, Path):
            changes[name] = Path(expanded(str(value)))
        elif IS_PATH in getattr(hint, "__metadata__", ()):
            changes[name] = tuple(map(_expanded_list, value)) if isinstance(value, tuple) else _expanded_list(value)
    return replace(flags, **changes)


def _expanded_list(paths: str) -> str:
    """Paths that commas separate, each expanded."""
    return ",".join(expanded(path) for path in paths.split(","))


def _list_flags(kind: Any) -> set[str]:
    """The flags of a command that take several values, settings among them."""
    found = set()
    for name, hint in typing.get_type_hints(kind).items():
        if hint is RunConfig:
            found |= {f"--{setting}" for setting, value in settings(RunConfig()).items() if isinstance(value, tuple)}
        elif typing.get_origin(hint) is tuple:
            found.add(f"--{name}")
    return found
