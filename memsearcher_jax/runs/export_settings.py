"""The settings that exported weights were trained with, EXPORT/memsearcher.json. No JAX here.

An exported folder holds everything that its run has trained: adapters that the run began with are merged into it, and
must not be merged again. Files of the machine that exported are left out of the settings.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from memsearcher_jax.agent.prompts import packaged
from memsearcher_jax.config import RunConfig, from_dict, to_dict, with_settings
from memsearcher_jax.logs.atomic_write import atomic_write
from memsearcher_jax.retrieval.config import HASHING
from memsearcher_jax.runs import hub
from memsearcher_jax.runs.path_settings import is_python_file, with_paths
from memsearcher_jax.training.config import TeacherConfig

EXPORT_FILE = "memsearcher.json"
TEMPLATES = "templates"


def find_export(weights: str | Path, flag: str) -> Path | None:
    """The directory with the settings of weights, a directory or a repository that `flag` names; None without."""
    return hub.small_files(str(weights), flag, (EXPORT_FILE, f"{TEMPLATES}/*"))


def read_export_config(folder: str | Path) -> RunConfig:
    """The settings of the run that the weights in `folder` come from. Raises ValueError in one line."""
    file = Path(folder) / EXPORT_FILE
    try:
        config = from_dict(json.loads(file.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}): delete it, and give --config") from error
    if config.agent.prompts != TEMPLATES:
        return config
    return replace(config, agent=replace(config.agent, prompts=str(Path(folder, TEMPLATES).absolute())))


def write_export_config(folder: Path, config: RunConfig) -> None:
    """Writes what `read_export_config` reads, and copies templates of one's own."""
    prompts = config.agent.prompts
    if prompts not in packaged():
        shutil.copytree(prompts, folder / TEMPLATES, dirs_exist_ok=True)
    portable = to_dict(without_local_files(config))
    atomic_write(folder / EXPORT_FILE, (json.dumps(portable, indent=2) + "\n").encode())


def without_local_files(config: RunConfig) -> RunConfig:
    """The config without paths of this machine, addresses of services, a teacher, and weights, which the export holds.

    Of the adapters that the export contains, the name stays; of Python files, too.
    """
    named = with_paths(config, lambda path: Path(path).name if path.endswith(".py") else "")
    hashing = HASHING if config.retrieval.encoder == HASHING else ""
    changes: dict[str, Any] = {
        "training.objective": "grpo",
        "model.path": "",
        "model.tokenizer": "",
        "model.adapter": named.model.adapter or Path(config.model.adapter).name,
        "model.lora_rank": 0,
        "agent.prompts": named.agent.prompts or TEMPLATES,
        "agent.tools": tuple(filter(is_python_file, named.agent.tools)),  # without servers
        "agent.tools_api_key_env": (),
        "data.train": tuple(filter(None, named.data.train)),
        "data.test": tuple(filter(None, named.data.test)),
        "sft.trajectories": (),
        "sft.held_out": (),
        "answerer.url": "",
        "judge.url": "",
    }
    retrieval = replace(config.retrieval, corpus="", index="", url="", encoder=hashing)
    return with_settings(replace(named, teacher=TeacherConfig(), retrieval=retrieval), changes)
