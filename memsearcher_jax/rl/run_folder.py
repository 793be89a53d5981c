"""The folder of a run, which is complete in itself. No JAX here, so that a command line is checked quickly.

run.json        the run's config; a folder without it is no run
tokenizer/      a copy of the tokenizer's files
checkpoints/    orbax, a folder per step; of a run in a bucket (`rl/bucket.py`) they are there
metrics.jsonl   tensorboard/   trajectories/   curves.png
data/  index/   built at the start unless the config names built ones
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from memsearcher_jax.config import RunConfig, from_dict, to_dict
from memsearcher_jax.model.hf_config import TOKENIZER_FILES

PACKAGED = "package:"
RUN_FILE, TOKENIZER, CHECKPOINTS, DATA, INDEX = "run.json", "tokenizer", "checkpoints", "data", "index"
BUCKET_FILE = "bucket.json"  # names the bucket's folder whose run is worked on here


def located(folder: str | Path) -> Path:
    """The folder; `package:NAME` is the one of that name that comes with this package, wherever it is installed.

    Raises ValueError for a NAME that would lead out of the package.
    """
    name = str(folder)
    if not name.startswith(PACKAGED):
        return Path(folder)
    name = name.removeprefix(PACKAGED)
    if name in ("", "..") or Path(name).name != name:
        raise ValueError(f"{folder}: what stands behind {PACKAGED} must be the name of a folder of the package")
    return Path(str(files("memsearcher_jax") / "assets" / name))


def is_run(folder: str | Path) -> bool:
    """Whether the folder is a run of ours."""
    return (located(folder) / RUN_FILE).is_file()


def is_vacant(folder: Path) -> bool:
    """Whether a new run may be written here: nothing is, or an empty folder, or what a killed start had built.

    Data and index are written whole or not at all and are checked when they are opened, so a start may go on with them.
    """
    if not folder.exists():
        return True
    if not folder.is_dir() or is_run(folder):
        return False
    built = {DATA, INDEX, TOKENIZER, f"{RUN_FILE}.partial", BUCKET_FILE}
    return all(one.name in built or one.name.startswith(f".{INDEX}.") for one in folder.iterdir())


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
    """Where the checkpoints of the run in this folder are: a path, or an address that orbax takes."""
    file = Path(folder) / BUCKET_FILE
    top = json.loads(file.read_text(encoding="utf-8"))["address"] if file.is_file() else folder
    return f"{top}/{CHECKPOINTS}"


def open_run_folder(folder: Path, config: RunConfig, tokenizer_folder: str) -> None:
    """Writes what makes the folder a run's, the config last."""
    folder.mkdir(parents=True, exist_ok=True)
    _copy_tokenizer(Path(tokenizer_folder), folder / TOKENIZER)
    write_run_config(folder, config)


def write_run_config(folder: Path, config: RunConfig) -> None:
    """What `read_run_config` reads."""
    beside = folder / f"{RUN_FILE}.partial"
    beside.write_text(json.dumps(to_dict(config), indent=2) + "\n", encoding="utf-8")
    beside.rename(folder / RUN_FILE)


def tokenizer_folder(folder: str | Path) -> str:
    """Where the tokenizer of these weights is."""
    return str(located(folder) / TOKENIZER) if is_run(folder) else str(located(folder))


def with_own_tokenizer(folder: Path, config: RunConfig) -> RunConfig:
    """The config with the tokenizer that stands in the folder: the one that it came from may be gone, or another."""
    return replace(config, model=replace(config.model, tokenizer=str(folder / TOKENIZER)))


def _copy_tokenizer(source: Path, target: Path) -> None:
    """Copies the files by which transformers and we read a tokenizer."""
    target.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if (source / name).is_file() and source.resolve() != target.resolve():
            shutil.copyfile(source / name, target / name)
