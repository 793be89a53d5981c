"""The directory of a run, which is self-contained. No JAX here, so that a command line is checked quickly.

run.json        the run's config; it marks a directory as a run
tokenizer/      a copy of the tokenizer files
checkpoints/    orbax, a directory per step; those of a run in a bucket (`runs/remote_dir.py`) are in the bucket
metrics.jsonl   tensorboard/   trajectories/   curves.png   report.html
inputs.json  inputs/   hashes of what the run was given, and copies of the small ones (`runs/inputs.py`)
data/  index/   built at the start unless the config names existing ones
"""

from __future__ import annotations

import json
import shutil
from importlib.resources import files
from pathlib import Path

from memsearcher_jax.config import RunConfig, from_dict, to_dict
from memsearcher_jax.jsonl import parse_object
from memsearcher_jax.logs.atomic_write import atomic_write
from memsearcher_jax.model.hf_config import TOKENIZER_FILES

PACKAGED = "package:"
RUN_FILE = "run.json"
TOKENIZER = "tokenizer"
CHECKPOINTS = "checkpoints"
DATA = "data"
INDEX = "index"
BUCKET_FILE = "bucket.json"  # the address of the bucket directory that this directory mirrors


def located(folder: str | Path) -> Path:
    """The path of a directory; `package:NAME` is a directory of this package, wherever it is installed.

    Raises ValueError if NAME is outside the package.
    """
    name = str(folder)
    if not name.startswith(PACKAGED):
        return Path(folder)
    name = name.removeprefix(PACKAGED)
    if name in ("", "..") or Path(name).name != name:
        raise ValueError(f"{folder}: {PACKAGED} must be followed by the name of a directory of the package")
    return Path(str(files("memsearcher_jax") / "assets" / name))


PACKAGED_TOKENIZER = str(located("package:tiny"))


def is_run(folder: str | Path) -> bool:
    return (located(folder) / RUN_FILE).is_file()


def read_run_config(folder: str | Path) -> RunConfig:
    """The config that a run stored. Raises FileNotFoundError or ValueError in one line."""
    file = Path(folder) / RUN_FILE
    if not file.is_file():
        raise FileNotFoundError(f"{folder} holds no run: there is no {RUN_FILE} in it")
    try:
        return from_dict(json.loads(file.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}): restore it, or start a new run") from error


def checkpoints_of(folder: str | Path) -> str:
    """The path or address of the run's checkpoints, for orbax."""
    file = Path(folder) / BUCKET_FILE
    top = parse_object(str(file), file.read_bytes())["address"] if file.is_file() else folder
    return f"{top}/{CHECKPOINTS}"


def open_run_folder(folder: Path, config: RunConfig, tokenizer_folder: str) -> None:
    """Turns the directory into a run: copies the tokenizer's files, and writes the config last."""
    source = Path(tokenizer_folder)
    target = folder / TOKENIZER
    target.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if (source / name).is_file() and source.resolve() != target.resolve():
            shutil.copyfile(source / name, target / name)
    write_run_config(folder, config)


def write_run_config(folder: Path, config: RunConfig) -> None:
    """Writes atomically what `read_run_config` reads."""
    atomic_write(folder / RUN_FILE, (json.dumps(to_dict(config), indent=2) + "\n").encode())


def tokenizer_folder(folder: str | Path) -> str:
    """The directory of the tokenizer of these weights."""
    return str(located(folder) / TOKENIZER) if is_run(folder) else str(located(folder))
