"""docs/reproduce.md: its presets, settings, sweeps and commands exist."""

import re
from pathlib import Path

import pytest

from memsearcher_jax.config import RunConfig, settings
from memsearcher_jax.launch import cli, evaluate, tpu_train

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"(?:python launch/|`)(\w+\.py)\b([^`\n]*)", TEXT)


def test_commands_presets_and_settings_exist():
    assert len(COMMANDS) > 20
    names = settings(RunConfig())
    for program, flags in COMMANDS:
        assert any((ROOT / folder / program).is_file() for folder in ("launch", "benchmarks")), program
        for preset in re.findall(r"--config (\w+)", flags):
            cli.load_preset(preset)
        for name in re.findall(r"--(\w+\.[\w.]+)", flags):
            assert name in names, name


@pytest.mark.parametrize("flags", [flags for program, flags in COMMANDS if program == "sweep.py"])
def test_sweeps_have_valid_values(flags):
    kind = evaluate.Evaluate if "--evaluate" in flags else tpu_train.Train
    setting, values = re.search(r"--setting ([\w.]+)=(\S+)", flags).groups()
    config = re.findall(r"--config \w+", flags) or ["--config tiny"]
    for value in values.split(","):
        cli.parse(kind, [*config[0].split(), f"--{setting}", value])


def test_the_width_of_the_band_is_that_of_the_published_seeds():
    from memsearcher_jax.report.expected import find_experiment, read_experiments

    tiny = settings(cli.load_preset("tiny")) | {"evaluation.temperature": 1.0}
    band = find_experiment(read_experiments(cli.PRESETS / "published.toml"), "tiny", tiny).bands[0]
    assert f"{50 * (band.high - band.low):.1f} points to either side" in TEXT
