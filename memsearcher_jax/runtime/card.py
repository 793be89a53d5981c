"""The reproduction card of a run, RUN/card.json: what another run needs to give the same numbers.

    program     version and commit of every process that worked on the run, "+changes" if files differed from the commit
    settings    every setting, by its full name; the seeds are among them
    data        SHA-256 of each file of questions; synthetic data follows from the settings
    corpus      fingerprint of the passages' file
    index       checksum of the passages, their number, the measured recall and on how many queries
    weights     fingerprint of the initial or evaluated weights, and their step
    results     of an evaluation, its scores with intervals; of training, means over the last steps with intervals

A fingerprint is the SHA-256 of names, sizes and contents of files; of a file above 64 MiB, of 64 blocks of 1 MiB at
equal distances.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from memsearcher_jax.config import RunConfig, settings
from memsearcher_jax.data.benchmarks import resolve
from memsearcher_jax.jsonl import encode_floats, flatten, parse_object
from memsearcher_jax.logs.atomic_write import atomic_write
from memsearcher_jax.retrieval.builder.build_dir import MANIFEST, file_sha256
from memsearcher_jax.runtime import hub
from memsearcher_jax.runtime.run_dir import CHECKPOINTS, is_run, located

CARD_FILE = "card.json"
_BLOCK, _BLOCKS = 1 << 20, 64


def write_card(folder: Path, config: RunConfig, *, index: Path, step: int | None) -> None:
    """Writes the card of a run that starts or continues in `folder`; programs of earlier processes and results stay.

    `index`: the index that the run searches, unless the config names one. `step`: of the checkpoint in model.path.
    """
    earlier = read_card(folder) if (folder / CARD_FILE).is_file() else {}
    program, programs = _program(), earlier.get("program", [])
    local = hub.local(config)
    card = {
        "program": [*programs, program] if program not in programs else programs,
        "settings": settings(config),
        "data": _data(local),
        "corpus": fingerprint([Path(local.retrieval.corpus)]) if local.retrieval.corpus else "",
        "index": _index(Path(local.retrieval.index) if local.retrieval.index else index),
        "weights": {"path": config.model.path, "step": step, "fingerprint": _weights(local.model.path, step)},
        "results": earlier.get("results", {}),
    }
    _write(folder, card)


def add_results(folder: Path, results: Mapping[str, Any]) -> None:
    """Adds the results to the card in `folder`."""
    _write(folder, read_card(folder) | {"results": results})


def read_card(folder: Path) -> dict[str, Any]:
    """Raises FileNotFoundError or ValueError in one line."""
    file = folder / CARD_FILE
    if not file.is_file():
        raise FileNotFoundError(f"{folder} has no {CARD_FILE}: name a folder that training or an evaluation wrote")
    return parse_object(str(file), file.read_bytes())


def card_differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(name, value in the first, value in the second) of every entry in which two cards differ; None where absent."""
    ours, theirs = flatten(first), flatten(second)
    names = dict.fromkeys([*ours, *theirs])
    return [(name, ours.get(name), theirs.get(name)) for name in names if ours.get(name) != theirs.get(name)]


def _write(folder: Path, card: Mapping[str, Any]) -> None:
    atomic_write(folder / CARD_FILE, (json.dumps(encode_floats(card), indent=2) + "\n").encode())


def _program() -> dict[str, str]:
    try:
        release = version("memsearcher_jax")
    except PackageNotFoundError:  # a checkout that is not installed
        release = ""
    return {"version": release, "commit": _commit(Path(__file__).resolve())}


def _commit(file: Path) -> str:
    """The commit of the checkout that the file belongs to; "" if it is installed, or there is no git."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(file.parent), *words]
        return subprocess.run(command, capture_output=True, encoding="utf-8", check=True, timeout=60).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", str(file))
        changes = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+changes" if changes else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def _data(config: RunConfig) -> dict[str, str]:
    """The checksum of each entry of the training data and of data.test."""
    data = config.data
    entries = [("train", entry) for entry in data.train_entries] + [("test", entry) for entry in data.test]
    return {f"{split} {entry}": file_sha256(resolve(entry, split, data.root)[0]) for split, entry in entries}


def _index(folder: Path) -> dict[str, Any]:
    """What identifies a vector index; {} for BM25 and for a search service."""
    file = folder / MANIFEST
    if not file.is_file():
        return {}
    manifest = parse_object(str(file), file.read_bytes())
    return {name: manifest.get(name) for name in ("checksum", "passages", "recall", "measured_on")}


def _weights(path: str, step: int | None) -> str:
    """The fingerprint of local weights; "" for random ones and for those of a bucket."""
    folder = located(path) if path else None
    if folder is None or not folder.is_dir():
        return ""
    if is_run(folder):
        params = folder / CHECKPOINTS / str(step) / "params"
        return fingerprint(file for file in params.rglob("*") if file.is_file())
    return fingerprint(folder.glob("*.safetensors"))


def fingerprint(files: Iterable[Path]) -> str:
    """SHA-256 of the names, sizes and contents of files, in the order of their names; "" for no files."""
    digest, ordered = hashlib.sha256(), sorted(files)
    for file in ordered:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        step = _BLOCK if size <= _BLOCK * _BLOCKS else (size - _BLOCK) // (_BLOCKS - 1)
        with file.open("rb") as content:
            for start in range(0, size, step):
                content.seek(start)
                digest.update(content.read(_BLOCK))
    return digest.hexdigest() if ordered else ""
