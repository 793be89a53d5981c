"""The settings that exported weights were trained with, EXPORT/memsearcher.json. No JAX here.

An exported folder holds everything that its run has trained: adapters that the run began with are merged into it, and
must not be merged again. Files of the machine that exported are left out of the settings.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

from memsearcher_jax.agent.prompts import packaged
from memsearcher_jax.config import RunConfig, from_dict, to_dict
from memsearcher_jax.data.benchmarks import SPLITS
from memsearcher_jax.logs.atomic_write import atomic_write
from memsearcher_jax.retrieval.config import HASHING
from memsearcher_jax.runtime import hub
from memsearcher_jax.runtime.run_dir import PACKAGED
from memsearcher_jax.training.config import TeacherConfig

EXPORT_FILE, TEMPLATES = "memsearcher.json", "templates"


def is_export(folder: str | Path) -> bool:
    return (Path(folder) / EXPORT_FILE).is_file()


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
    """The config without paths of this machine, without a teacher, and without weights, which the export holds; the
    name of the adapters that it contains stays."""
    data, retrieval, adapter = config.data, config.retrieval, config.model.adapter
    if not (adapter.startswith(PACKAGED) or hub.is_repository(adapter)):
        adapter = Path(adapter).name
    agent, prompts = config.agent, config.agent.prompts if config.agent.prompts in packaged() else TEMPLATES

    def named(code: str) -> str:
        return Path(code).name if code.endswith(".py") else code

    tools = tuple(map(named, filter(lambda one: one.endswith(".py"), agent.tools)))  # without addresses
    by_name = [[entry for entry in entries if entry.partition(":")[0] in SPLITS] for entries in (data.train, data.test)]
    return replace(
        config,
        training=replace(config.training, objective="grpo"),
        teacher=TeacherConfig(),
        model=replace(config.model, path="", tokenizer="", adapter=adapter, lora_rank=0),
        agent=replace(agent, prompts=prompts, workflow=named(agent.workflow), tools=tools, replay=""),
        reward=replace(config.reward, function=named(config.reward.function)),
        data=replace(data, train=tuple(by_name[0]), test=tuple(by_name[1]), mixture="", root="", exclude=""),
        retrieval=replace(
            retrieval, corpus="", index="", url="", encoder=HASHING if retrieval.encoder == HASHING else ""
        ),
    )
