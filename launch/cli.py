"""The command line that all commands share: presets, overrides, and errors in one line.

--config NAME            a preset in configs/, or the path of a preset file
--section.field value    any setting of the preset

tyro parses each word once. The flags that select the settings to start from (`SettingsSource`) are parsed first; these
settings are then the defaults of the remaining flags.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib.util
import io
import itertools
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from memsearcher_jax.agent import protocol, reward
from memsearcher_jax.agent.registry import WORKFLOWS
from memsearcher_jax.config import RunConfig, check, check_ranges, differences, from_dict, settings, to_dict
from memsearcher_jax.data.problems import ProblemSplits
from memsearcher_jax.launch import outputs
from memsearcher_jax.report.memory_quality import MemoryRules
from memsearcher_jax.retrieval.config import HASHING
from memsearcher_jax.runtime import hub
from memsearcher_jax.runtime.health import RunAborted
from memsearcher_jax.runtime.run_dir import INDEX, is_run, read_run_config

PRESETS = Path(__file__).resolve().parents[1] / "configs"
RESUMABLE_MODEL_SETTINGS = ("model.attention", "model.remat")  # the model settings that a resumed run may change
MEMORY_RULES = MemoryRules(reward.normalize, protocol.memory)  # how reports measure memories
ACCELERATORS = ("accel*", "vfio/[0-9]*", "nvidia[0-9]*", "dxg", "kfd")  # devices of TPUs, of newer TPUs, and of GPUs
INTERRUPTED = 130  # exit status after Ctrl-C, as in a shell
Directory = Annotated[Path | None, tyro.conf.arg(metavar="DIR")]
File = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]
FlagsT = TypeVar("FlagsT")


@dataclass(frozen=True)
class SettingsSource:
    """Flags that select the settings that a command starts from."""

    config: Annotated[str, tyro.conf.arg(metavar="NAME")] = ""
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

    compile_cache: Annotated[str, tyro.conf.arg(metavar="DIR")] = ""
    """JAX's persistent compilation cache, a directory or gs:// address. It holds executable code: share it only with
    users who may run programs as you."""
    json: File = None
    """Also write the result to this file, as JSON."""
    smoke_test: bool = False
    """Let the preset of a published model run with random weights, synthetic data and hashed words, on any device."""
    run: Annotated[RunConfig, tyro.conf.arg(name=""), tyro.conf.FlagConversionOff] = field(default_factory=RunConfig)

    def with_settings(self) -> Command:
        """Applies the command's other flags to `run`."""
        return self


CommandT = TypeVar("CommandT", bound=Command)


def run(main: Callable[[Sequence[str]], None]) -> None:
    """Runs a command without library warnings; Ctrl-C, or a full disk behind stdout, ends it with one line."""
    logging.getLogger("absl").setLevel(logging.ERROR)
    on_tpu_vm = _has_accelerator() or {"TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES", "TPU_ACCELERATOR_TYPE"} & {*os.environ}
    if importlib.util.find_spec("libtpu") and not on_tpu_vm:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # as JAX chooses, after errors that libtpu prints
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for a terminal without Unicode
    try:
        main(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:  # the reader of the output, such as `head`, has exited
        _discard_stdout()
    except OSError as error:
        try:
            sys.stdout.write("\n")
            sys.stdout.flush()
        except OSError:  # stdout is what failed
            _discard_stdout()
            print(f"error: stdout cannot be written ({error.strerror}): send it elsewhere", file=sys.stderr)
            raise SystemExit(1) from None
        raise


def _discard_stdout() -> None:
    """The interpreter would report at its exit what is still buffered."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parse(command: type[CommandT], argv: Sequence[str]) -> CommandT:
    """The flags of a command, with `run` made from preset or stored settings, checkpoint and overrides, and checked.

    Does not import JAX, so that --help and errors are immediate. Raises ValueError or OSError in one line; --help
    prints and exits.
    """
    return parse_settings(command, *parse_source(command, argv))


def parse_source(command: type[Command], argv: Sequence[str]) -> tuple[Any, list[str]]:
    """The `SettingsSource` part of the command's flags, and the words that are left."""
    kinds = (base for base in command.__mro__ if issubclass(base, SettingsSource) and not issubclass(base, Command))
    return _tyro_parse(next(kinds), argv, add_help=False)


def parse_settings(command: type[CommandT], source: SettingsSource, words: Sequence[str]) -> CommandT:
    """The flags of a command, whose remaining `words` override the settings that `source` selects."""
    _require_local_paths(source)
    if isinstance(source, ResumableSource) and source.resume:
        flags = _resumed(command, source, words)
    else:
        flags = _new(command, source, words)
    _require_local_paths(flags)
    check(flags.run)
    flags = replace(flags, run=hub.pinned(flags.run))
    _set_compile_cache(flags.compile_cache)
    _set_cpu_devices(flags.run.mesh.cpu_devices)
    return flags


def parse_flags(kind: Callable[..., FlagsT], argv: Sequence[str], default: FlagsT | None = None) -> FlagsT:
    """The flags `kind` of a command without a preset, with the ranges of their fields and --json checked.

    Raises ValueError or OSError in one line; --help prints and exits.
    """
    flags, unknown = _tyro_parse(kind, argv, default=default)
    if unknown:
        raise ValueError(unknown_flag(unknown[0], kind))
    check_ranges(flags, "--")
    if json_file := getattr(flags, "json", None):
        outputs.require_writable(json_file, "--json")
    return flags


def parse_shard(text: str) -> tuple[int, int]:
    """Index, from 0, and number of shards of --shard, such as "0/4". Raises ValueError."""
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise ValueError(f"--shard {text}: write K/N with K from 0 to N - 1, such as 0/4 for the first of four")
    return int(index), int(count)


def is_address(path: object) -> bool:
    """Whether this is an address such as gs://BUCKET/DIR rather than a local path."""
    return re.match(r"[a-z][a-z0-9+.-]*:/", str(path)) is not None


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
    spec = importlib.util.spec_from_file_location(f"preset_{file.stem}", file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise ValueError(
            f"no preset {name!r}: choose one of {', '.join(sorted(packaged))}, or give the path of a preset file"
        )
    module, function = importlib.util.module_from_spec(spec), name if name in packaged else file.stem
    try:
        spec.loader.exec_module(module)
        preset = getattr(module, function)()
    except Exception as error:  # a user's file may raise anything
        raise ValueError(f"{file}: {function}() failed with {type(error).__name__}: {error}") from error
    if not isinstance(preset, RunConfig):
        raise ValueError(f"{file}: {function}() must return a RunConfig, it returned {type(preset).__name__}")
    return from_dict(to_dict(preset))


@contextlib.contextmanager
def _exit_on(errors: tuple[type[Exception], ...], status: int, hint: str = "") -> Iterator[None]:
    """Prints an error of the class `errors` as one line on stderr, with `hint`, and exits with this status."""
    try:
        yield
    except BrokenPipeError:
        raise
    except errors as error:
        print(f"error: {printable(error)}{hint}", file=sys.stderr, flush=True)
        raise SystemExit(status) from None


def one_line_errors() -> contextlib.AbstractContextManager[None]:
    """Prints ValueError and OSError as one line on stderr and exits with status 2. Wraps what precedes long work."""
    return _exit_on((ValueError, OSError), 2)


def stop_in_one_line(hint: str) -> contextlib.AbstractContextManager[None]:
    """Prints an alarm or a failed write of long work in one line, with the way to continue; exit status 1."""
    return _exit_on((RunAborted, OSError), 1, f"; {hint}")


def printable(message: object) -> str:
    """The message in one line; control characters, which a terminal would obey, are escaped."""
    line = " ".join(str(message).split())
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in line)


def reusable_index(config: RunConfig) -> Path | None:
    """The index in the run directory that the weights come from, if the search settings are unchanged."""
    folder = Path(config.model.path)
    if not config.model.path or not is_run(folder) or not (folder / INDEX).exists():
        return None
    changed = [name for name, _, _ in differences(read_run_config(folder), config)]
    return None if any(name.startswith(("retrieval.", "data.encyclopedia.")) for name in changed) else folder / INDEX


def require_checkpoint(flags: Command, alternative: str = "") -> None:
    """For commands that are pointless with random weights. Raises ValueError."""
    if not flags.run.model.path:
        raise ValueError(f"--checkpoint is missing: give a run directory or a Hugging Face directory{alternative}")


def require_inputs(config: RunConfig, *, questions: str = "", accelerator: bool = False) -> None:
    """Raises ValueError that names everything that the preset of a published model still needs.

    `questions`: the setting that names them, if the command needs any. `accelerator`: whether it needs one here.
    """
    retrieval, searches = config.retrieval, WORKFLOWS[config.agent.workflow].searches
    encodes = searches and not retrieval.url and retrieval.method != "bm25"
    needs = {
        "--model.path DIR (its weights)": not config.model.path,
        f"--{questions} FILE (questions)": questions and config.data.is_synthetic,
        "--retrieval.index DIR or --retrieval.corpus FILE (passages)": searches
        and not (retrieval.index or retrieval.corpus or retrieval.url),
        f"--retrieval.encoder DIR (of E5, or {HASHING})": encodes and not retrieval.encoder,
        "a TPU": accelerator and not _has_accelerator(),
    }
    if config.published_model and (missing := [name for name, absent in needs.items() if absent]):
        raise ValueError(
            f"a preset of a published model needs {', '.join(missing)}; --smoke_test starts with random weights, "
            "synthetic data and hashed words instead, on any device"
        )


def require_extra(extra: str, *libraries: str, needed_by: str = "") -> None:
    """Raises ValueError if a library of this extra is not installed. The message starts with `needed_by`."""
    if missing := [name for name in libraries if importlib.util.find_spec(name) is None]:
        raise ValueError(f"{needed_by}{missing[0]} is not installed: pip install 'memsearcher_jax[{extra}]'")


def _has_accelerator() -> bool:
    """Without JAX, which can look for a TPU only after all hosts have joined. A platform chosen by name is believed."""
    if platform := os.environ.get("JAX_PLATFORMS", "").partition(",")[0]:
        return platform != "cpu"
    return any(any(Path("/dev").glob(device)) for device in ACCELERATORS)


def require_same_settings(out: Path, config: RunConfig, what: str) -> None:
    """Raises ValueError if the settings differ from those stored in `out`, where the evaluation `what` continues."""
    for name, stored, given in differences(read_run_config(out), config):
        raise ValueError(f"{name} is {stored!r} in {out} and cannot change to {given!r}: start another {what}")


def split_passthrough(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words before the first --, and those after it, which another program parses."""
    words = list(argv)
    end = words.index("--") if "--" in words else len(words)
    return words[:end], words[end + 1 :]


def run_program(command: Sequence[str], *, install_hint: str, stdin: str | None = None) -> None:
    """Runs another program and exits with its status if it fails. Raises OSError if it is not installed."""
    try:
        status = subprocess.run(command, input=stdin, encoding="utf-8", check=False).returncode
    except FileNotFoundError as error:
        raise OSError(f"{command[0]} is not installed: {install_hint}") from error
    if status:
        raise SystemExit(status)


def print_skipped(problems: ProblemSplits) -> None:
    """Prints to stderr how many rows of the question files were skipped, with the reason of the first."""
    if problems.skipped_count:
        print(f"skipped {problems.skipped_count} malformed rows; the first: {problems.skipped[0]}", file=sys.stderr)


def unknown_flag(word: str, kind: Any) -> str:
    """An error message for a flag that `kind` does not have, with the closest one that it has."""
    has_settings = isinstance(kind, type) and issubclass(kind, Command)
    if not word.startswith("-"):
        hint = "settings are written --section.field value" if has_settings else "--help lists all flags"
        return f"unexpected argument {word!r}: {hint}"
    name = word.split("=")[0]
    written = name.replace("-", "_").replace("__", "--", 1)
    types = {one.name: str(one.type) for one in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else {}
    if "Positional" in types.get(written.removeprefix("--"), ""):
        return f"{name} is no flag: write its value alone"
    flags = [*types, *settings(RunConfig())] if has_settings else list(types)
    close = difflib.get_close_matches(written, [f"--{flag}" for flag in flags if flag != "run"], n=1)
    what, hint = ("setting", "--help lists all settings") if has_settings else ("flag", "--help lists all flags")
    return f"no {what} {name!r}: " + (f"did you mean {close[0]}?" if close else hint)


def _set_compile_cache(folder: str) -> None:
    """JAX reads the variable when it is imported, which is usually later."""
    if not folder:
        return
    if not is_address(folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
        folder = str(Path(folder).absolute())
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    if "jax" in sys.modules:
        sys.modules["jax"].config.update("jax_compilation_cache_dir", folder)


def _set_cpu_devices(devices: int) -> None:
    """JAX reads the variable when it is imported, and fails if XLA_FLAGS sets the number, too."""
    if devices > 1 and "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(devices))


def _require_local_paths(flags: SettingsSource) -> None:
    for name in ("out", "checkpoint"):
        path = getattr(flags, name, None)
        if is_address(path):
            address = str(path).replace(":/", "://", 1)  # Path merges the two slashes
            raise ValueError(
                f"--{name} {address}: only --out of training may be in a bucket; "
                f"copy the directory first: gcloud storage cp --recursive {address} DIR"
            )


def _new(command: type[CommandT], source: SettingsSource, words: Sequence[str]) -> CommandT:
    """Settings of a preset, or of the run in --checkpoint, with the weights in --checkpoint and the overrides."""
    checkpoint = source.checkpoint
    run_folder = checkpoint if checkpoint is not None and is_run(checkpoint) else None
    base = read_run_config(run_folder) if run_folder and not source.config else load_preset(source.config or "nano")
    if run_folder:  # its weights contain the adapters that it started from
        base = replace(base, model=replace(base.model, adapter=""))
    flags = _with_overrides(command, source, base, words)
    if checkpoint is None:
        return flags
    if not checkpoint.is_dir() and not hub.is_repository(str(checkpoint)):
        raise FileNotFoundError(f"--checkpoint {checkpoint}: no such directory")
    model = replace(flags.run.model, path=str(checkpoint))
    # A run directory has the tokenizer and the adapters of its weights; into other weights model.adapter is merged.
    model = replace(model, tokenizer="") if run_folder else replace(model, lora_rank=0)
    return replace(flags, run=replace(flags.run, model=model))


def _resumed(command: type[CommandT], source: ResumableSource, words: Sequence[str]) -> CommandT:
    """Settings of the run in --out, with the overrides. --config and --checkpoint may only repeat what is stored."""
    out = source.out
    if out is None:
        raise ValueError("--resume needs --out, the directory of the run to continue")
    stored = read_run_config(out)
    flags = _with_overrides(command, source, stored, words)
    flags = replace(flags, run=hub.pinned(flags.run, stored))
    for name, then, now in differences(stored, flags.run):
        if name.startswith("model.") and name not in RESUMABLE_MODEL_SETTINGS:
            raise ValueError(f"{name} is {then!r} in {out} and cannot change to {now!r}: omit it")
    if source.config or source.checkpoint:
        for name, then, now in differences(flags.run, hub.pinned(_new(command, source, words).run, stored)):
            raise ValueError(
                f"{name} is {then!r} in {out}, but --config and --checkpoint give {now!r}: omit --config and "
                "--checkpoint"
            )
    return flags


def _with_overrides(command: type[CommandT], source: SettingsSource, base: RunConfig, words: Sequence[str]) -> CommandT:
    flags = parse_flags(command, words, default=command(**vars(source), run=base)).with_settings()
    if flags.smoke_test:
        retrieval = replace(flags.run.retrieval, encoder=flags.run.retrieval.encoder or HASHING)
        flags = replace(flags, run=replace(flags.run, published_model=False, retrieval=retrieval))
    return flags  # type: ignore[return-value]


def _tyro_parse(kind: Any, argv: Sequence[str], *, default: Any = None, add_help: bool = True) -> tuple[Any, list[str]]:
    """The flags and the unknown words. tyro's error message becomes a ValueError."""
    for word in argv:
        if not word.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in word):
            raise ValueError(f"the argument {word!r} is not valid UTF-8")
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(
                kind,
                default=tyro.MISSING_NONPROP if default is None else default,
                args=list(argv),
                return_unknown_args=True,
                use_underscores=True,
                add_help=add_help,
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ValueError(_one_line(errors.getvalue())) from None


def _one_line(box: str) -> str:
    """The first paragraph of tyro's message without Python's jargon.

    The message is in a box, or between dashes on terminals without UTF-8.
    """
    lines = [line.strip("│ ") for line in box.splitlines()]
    body = lines[1:] if lines[0].startswith("╭") else lines[2:]
    words = itertools.takewhile(lambda line: not set(line) <= set("─-╰╯"), body)
    sentence = " ".join(words)
    if sentence.startswith("Missing from"):
        required = sentence.partition(": ")[2].split("(required)")
        sentence = f"missing: {', '.join(part.split()[0] for part in required if part.strip())}"
    sentence = re.sub(r"^Error parsing [A-Z]\w*: ", "", sentence)  # raised by a dataclass of flags
    sentence = re.sub(r"invalid literal for int\(\) with base 10: (.*)", r"\1 is not an integer", sentence)
    sentence = re.sub(r"could not convert string to float: (.*)", r"\1 is not a number", sentence)
    return f"{sentence} (--help explains every flag)"
