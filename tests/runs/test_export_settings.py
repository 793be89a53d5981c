"""The settings of an export: what another machine reads, and that adapters are not merged twice."""

import shutil
from dataclasses import replace

import pytest

from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.checks import check
from memsearcher_jax.config import RunConfig, with_settings
from memsearcher_jax.configs.nano import nano
from memsearcher_jax.configs.smollm2 import smollm2
from memsearcher_jax.launch import ask, cli
from memsearcher_jax.model import weights
from memsearcher_jax.runs import load_weights
from memsearcher_jax.runs.export_settings import read_export_config, write_export_config
from memsearcher_jax.runs.inputs import keep_inputs
from memsearcher_jax.runs.run_dir import located, write_run_config


def test_settings_come_back_without_files_of_the_machine(tmp_path):
    paths = {
        "data.train": ("nq", "/home/me/train.jsonl"),
        "data.root": "/home/me/data",
        "retrieval.index": "/home/me/index",
        "model.path": "/home/me/weights",
        "model.adapter": "/home/me/adapters",
    }
    services = {"judge.url": "http://10.0.0.1/v1", "agent.tools": ("mcp:python /home/me/tools.py",)}
    config = with_settings(nano(), paths | services)
    write_export_config(tmp_path, config)
    written = (tmp_path / "memsearcher.json").read_text()
    assert "/home/me" not in written and "10.0.0.1" not in written
    found = check(replace(read_export_config(tmp_path), model=nano().model))
    assert (found.agent, found.sampling, found.data.train) == (nano().agent, config.sampling, ("nq",))


def test_templates_of_ones_own_go_with_the_export(tmp_path):
    templates, out = tmp_path / "mine", tmp_path / "export"
    templates.mkdir()
    out.mkdir()
    (templates / "system.txt").write_text("mine")
    write_export_config(out, RunConfig(agent=AgentConfig(prompts=str(templates))))
    templates.rename(tmp_path / "moved")
    assert read_export_config(out).agent.prompts == str(out / "templates")
    assert (out / "templates" / "system.txt").read_text() == "mine"


def test_the_adapters_of_a_preset_are_not_merged_into_an_export(tmp_path):
    preset = smollm2()
    write_export_config(tmp_path, preset)
    (tmp_path / "config.json").write_text("{}")
    for words in (["--config", "smollm2", "--checkpoint", str(tmp_path)], ["--checkpoint", str(tmp_path)]):
        model = cli.parse(ask.Ask, [*words, "Who?"]).run.model
        assert (model.path, model.adapter, model.lora_rank) == (str(tmp_path), "", 0)
    with pytest.raises(ValueError, match=r"contains the adapters package:smollm2_search already: set model.adapter"):
        load_weights.check_weights(tmp_path, preset.model)


def test_adapters_are_not_merged_into_weights_that_have_changed(tmp_path):
    base = shutil.copytree(located("package:tiny"), tmp_path / "base")
    config = RunConfig(model=replace(weights.read_config(base), path=str(base), lora_rank=4))
    write_run_config(tmp_path, config)
    keep_inputs(tmp_path, config, None)
    with pytest.raises(FileNotFoundError, match="holds no checkpoint yet"):
        load_weights.check_weights(tmp_path, config.model)
    file = base / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"base has changed since .* was trained from it: restore it"):
        load_weights.check_weights(tmp_path, config.model)


def test_damage_is_named(tmp_path):
    (tmp_path / "memsearcher.json").write_text("[]")
    with pytest.raises(ValueError, match=r"memsearcher.json is damaged .* give --config"):
        read_export_config(tmp_path)
