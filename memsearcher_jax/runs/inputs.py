"""What a run was given, by content: hashes of its inputs, and copies of the small ones in its folder. No JAX here.

    RUN/inputs.json        {"hashes": {input: hash}, "copies": {file: copy}, "program": [...]}; the copy of a corpus is
                           the index that the run has built of it
    RUN/inputs/            templates, question files and Python files, as they were when the run began; the latter are
                           never executed: a command line names them again, and their hash must be the same

`program` has version and commit of every process that worked on the run, "+changes" if files differed from the commit.
A hash is the SHA-256 of names, sizes and contents of files; of a file above 64 MiB, of 64 blocks of 1 MiB at equal
distances. Synthetic data follows from the settings, and the manifest of an index names its corpus and its encoder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from memsearcher_jax.agent.prompts import packaged
from memsearcher_jax.config import RunConfig, with_settings
from memsearcher_jax.data.benchmarks import resolve
from memsearcher_jax.jsonl import parse_object
from memsearcher_jax.logs.atomic_write import atomic_write
from memsearcher_jax.python_files import CodeName, imported_files
from memsearcher_jax.retrieval.builder.build_dir import MANIFEST
from memsearcher_jax.runs import hub
from memsearcher_jax.runs.path_settings import is_python_file, with_paths
from memsearcher_jax.runs.run_dir import CHECKPOINTS, INDEX, TOKENIZER, is_run, located

INPUTS_FILE = "inputs.json"
COPIES = "inputs"
_BLOCK_BYTES = 1 << 20
_BLOCKS_OF_A_LARGE_FILE = 64


@dataclass(frozen=True)
class Inputs:
    """The content of inputs.json."""

    hashes: dict[str, str] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    program: list[dict[str, str]] = field(default_factory=list)


def read_inputs(folder: Path) -> Inputs:
    """What the run in `folder` was given; nothing if it says nothing. Raises ValueError for a damaged file."""
    file = folder / INPUTS_FILE
    if not file.is_file():
        return Inputs()
    try:
        return Inputs(**parse_object(str(file), file.read_bytes()))
    except TypeError as error:
        raise ValueError(f"{file} is damaged ({error}): restore it, or start a new run") from error


def keep_inputs(
    folder: Path, config: RunConfig, step: int | None, *, weights: bool = True
) -> tuple[dict[str, str], list[str]]:
    """Copies the templates and question files of a run that starts or goes on in `folder`, and writes inputs.json.

    What the run has been given before stays as it was then. `step`: of the checkpoint in model.path, if that is a run.
    `weights`: whether those in model.path and model.adapter are read. Returns the hashes of all inputs, and a line for
    each that has changed and is read from its copy. Raises ValueError for an input that has changed and of which there
    is no copy, or whose copy has changed.
    """
    earlier = read_inputs(folder) if is_run(folder) else Inputs()  # and not those of a start that was killed
    hashes = input_hashes(config, step, weights=weights)
    notes = _check(earlier, folder, config, hashes)
    copies = dict(earlier.copies)
    for file, copy in _small_inputs(config).items():
        if file not in copies:
            (folder / copy).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, folder / copy)
            copies[file] = copy
    if config.retrieval.corpus and not config.retrieval.index and (folder / INDEX / MANIFEST).is_file():
        copies[config.retrieval.corpus] = INDEX
    programs = list(earlier.program)
    if (program := _program()) not in programs:
        programs.append(program)
    inputs = Inputs(hashes | earlier.hashes, copies, programs)
    atomic_write(folder / INPUTS_FILE, (json.dumps(vars(inputs), indent=2) + "\n").encode())
    return inputs.hashes, notes


def _check(stored: Inputs, folder: Path, config: RunConfig, now: Mapping[str, str]) -> list[str]:
    """A line for each input that has changed and whose copy is read: of `keep_inputs`, which raises the same errors.

    `now`: the hashes of the inputs as they are.
    """
    own_config = with_own_inputs(folder, config)
    own_files = _small_inputs(own_config)
    notes = []
    for original, stored_hash in stored.hashes.items():
        copy = folder / stored.copies.get(original, "")
        copy_path = str(copy.absolute())
        reads_copied_file = copy_path in own_files
        if reads_copied_file and fingerprint([copy]) != stored_hash:
            raise ValueError(f"{copy} was changed: restore it, or start a new run")
        if reads_copied_file or copy_path == own_config.retrieval.index:
            if now.get(original, "") != stored_hash:
                notes.append(f"{original} has changed since the run began, which goes on with its own copy")
        elif stored_hash and now.get(original, stored_hash) != stored_hash:
            raise ValueError(f"{original} has changed since the run in {folder} began: restore it, or start a new run")
    return notes


def changed_inputs(folder: Path, config: RunConfig, *, weights: bool = True) -> list[str]:
    """The paths, and the settings of weights, whose content differs from what the run in `folder` was given.

    `config`: that of the command which would begin this run today. `weights`: whether they are compared, too.
    """
    now = input_hashes(config, weights=weights)
    changed = []
    for name, stored_hash in read_inputs(folder).hashes.items():
        is_gone = Path(name).is_absolute() and not Path(name).exists()
        if is_gone or now.get(name, stored_hash) != stored_hash:
            changed.append(name)
    return changed


def with_own_inputs(folder: Path, config: RunConfig) -> RunConfig:
    """The config with the run's copies in place of the files that it was given, which may have moved or changed."""
    copies = read_inputs(folder).copies
    retrieval = config.retrieval
    as_given = {CodeName.of(code.value).file for code in own_code(config)} | {retrieval.corpus}
    if (folder / TOKENIZER).is_dir():
        config = with_settings(config, {"model.tokenizer": str(folder / TOKENIZER)})
    index = (folder / INDEX).absolute()
    if copies.get(retrieval.corpus) == INDEX and (index / MANIFEST).is_file():  # else the corpus is indexed again
        config = with_settings(config, {"retrieval.corpus": "", "retrieval.index": retrieval.index or str(index)})

    def own_copy(path: str) -> str:
        copy = folder / copies.get(path, _copy_of(path))  # of a file, or of what the run reads in a folder
        return str(copy.absolute()) if path not in as_given and copy.exists() else path

    own = with_paths(config, own_copy)
    if own.data.root != config.data.root and len(_small_inputs(own)) < len(_small_inputs(config)):
        own = with_settings(own, {"data.root": config.data.root})  # for benchmarks that the run has not read yet
    return own


class OwnCode(NamedTuple):
    """A Python file of the user's, or a server of tools, that a setting names."""

    setting: str
    value: str

    @property
    def name(self) -> str:
        """The file's name, wherever it is."""
        return Path(CodeName.of(self.value).file).name

    @property
    def files(self) -> list[Path]:
        """The file, and those beside it that it imports; none for a server."""
        file = Path(CodeName.of(self.value).file)
        return imported_files(file) if is_python_file(self.value) and file.is_file() else []


def own_code(config: RunConfig) -> list[OwnCode]:
    """The user's code that the settings name; several settings may name the same file."""
    found = []
    for setting, value in (("agent.workflow", config.agent.workflow), ("reward.function", config.reward.function)):
        if value.endswith(".py"):
            found.append(OwnCode(setting, value))
    if config.agent.harness:  # also a command: a run's settings start no program by themselves
        found.append(OwnCode("agent.harness", config.agent.harness))
    if not config.agent.replay:
        found += [OwnCode("agent.tools", value) for value in config.agent.tools]
    return found


def require_same_code(folder: Path, stored: RunConfig, given: RunConfig, words: Iterable[str]) -> None:
    """Raises ValueError unless the command line names the code of the run in `folder` again, unchanged.

    `given`: the settings with which a command opens the run.
    """
    flags = {word.partition("=")[0] for word in words}
    hashes = read_inputs(folder).hashes
    given_code = own_code(given)
    used_settings = {code.setting for code in given_code}
    for name, original in own_code(stored):
        if name in used_settings and f"--{name}" not in flags:
            raise ValueError(
                f"{folder} was made with --{name} {original}: give --{name} again; a run's copy of code never runs"
            )
    for setting in sorted(used_settings):
        now = [code for code in given_code if code.setting == setting]
        then = [code for code in own_code(stored) if code.setting == setting]
        for place, code in enumerate(now):
            # Files of one name in two folders are told apart by their setting, and by their place in it.
            counterparts = [then[place]] if len(now) == len(then) else then
            named_alike = [original for original in counterparts if original.name == code.name]
            changed = [_changed_file(code, original, hashes) for original in named_alike]
            if changed and all(changed):
                where = "" if Path(changed[0]).name == code.name else f": {changed[0]}"
                raise ValueError(
                    f"--{setting} {code.value}{where} differs from the file that {folder} was made with: restore that "
                    f"one; its copy is in {folder / COPIES}"
                )


def _changed_file(code: OwnCode, original: OwnCode, hashes: Mapping[str, str]) -> str:
    """The first file of `code` that differs from its counterpart, whose folder may be another one; "" if none does."""
    folder = Path(original.value).absolute().parent
    for file in code.files:
        if hashes.get(str(folder / file.name), "") not in ("", fingerprint([file])):
            return str(file)
    return ""


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """The config with absolute paths wherever it names existing files or folders: a run works from any directory."""
    return with_paths(config, lambda path: str(Path(path).absolute()) if Path(path).exists() else path)


def input_hashes(config: RunConfig, step: int | None = None, *, weights: bool = True) -> dict[str, str]:
    """The hash of every input that exists, under the path or the setting that names it.

    `weights`: also of model.path and model.adapter. `step`: of the checkpoint in model.path, if that is a run.
    """
    hashes = {file: fingerprint([Path(file)]) for file in _small_inputs(config)}
    passages = [Path(config.retrieval.corpus)]
    if config.retrieval.index:
        passages.append(Path(config.retrieval.index, MANIFEST))
    hashes |= {str(file): fingerprint([file]) for file in passages if file.is_file()}
    weight_paths = {"teacher.path": config.teacher.path}
    if weights:
        weight_paths |= {"model.path": config.model.path, "model.adapter": config.model.adapter}
    for setting, path in weight_paths.items():
        if path and not hub.is_repository(path):  # a repository is named with its commit
            hashes[setting] = weights_hash(path, step if setting == "model.path" else None)
    return hashes


def fingerprint(files: Iterable[Path]) -> str:
    """SHA-256 of the names, sizes and contents of files, in the order of their names; "" for no files."""
    ordered = sorted(files)
    if not ordered:
        return ""
    digest = hashlib.sha256()
    for file in ordered:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as content:
            for start in range(0, size, _block_distance(size)):
                content.seek(start)
                digest.update(content.read(_BLOCK_BYTES))
    return digest.hexdigest()


def _block_distance(size: int) -> int:
    """Bytes between the starts of two blocks that are hashed, of a file of `size` bytes."""
    if size <= _BLOCK_BYTES * _BLOCKS_OF_A_LARGE_FILE:
        return _BLOCK_BYTES
    return (size - _BLOCK_BYTES) // (_BLOCKS_OF_A_LARGE_FILE - 1)


def _small_inputs(config: RunConfig) -> dict[str, str]:
    """The small files that a run reads -> their copies in its folder. Missing ones are left out."""
    prompts = config.agent.prompts
    data = config.data
    root = hub.local_root(data.root)
    found: dict[str, str] = {}
    if prompts not in packaged():
        found = {str(file): f"{_copy_of(prompts)}/{file.name}" for file in sorted(Path(prompts).glob("*.txt"))}
    single = [data.exclude]
    for code in own_code(config):
        single += map(str, code.files)
    for split, entries in (("train", data.train), ("test", data.test)):
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                path, benchmark = resolve(entry, split, root)
                if benchmark:
                    found[str(path)] = f"{_copy_of(data.root)}/{benchmark}/{path.name}"
                else:
                    single.append(entry)
    return found | {file: f"{_copy_of(file)}/{Path(file).name}" for file in single if Path(file).is_file()}


def _copy_of(path: str) -> str:
    """The folder in that of a run for copies of what the settings name by this path."""
    return f"{COPIES}/{hashlib.sha256(path.encode()).hexdigest()[:12]}"


def weights_hash(path: str, step: int | None = None) -> str:
    """The fingerprint of local weights, of a run those of `step` or the newest.

    "" for random weights, and for those of a bucket.
    """
    folder = located(path)
    if not folder.is_dir():
        return ""
    if is_run(folder):
        if step is None:
            saved = [int(found.name) for found in (folder / CHECKPOINTS).glob("*") if found.name.isdecimal()]
            step = max(saved, default=0)
        params = folder / CHECKPOINTS / str(step) / "params"
        return fingerprint(file for file in params.rglob("*") if file.is_file())
    return fingerprint(folder.glob("*.safetensors"))


def _program() -> dict[str, str]:
    try:
        release = version("memsearcher_jax")
    except PackageNotFoundError:  # a checkout that is not installed
        release = ""
    return {"version": release, "commit": _commit(Path(__file__).resolve().parents[2])}


def _commit(checkout: Path) -> str:
    """The commit of a checkout; "" if there is none, because the program is installed, or no git."""
    if not (checkout / ".git").exists():
        return ""
    command = ["git", "-C", str(checkout), "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+changes"]
    try:
        return subprocess.run(command, capture_output=True, encoding="utf-8", check=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
