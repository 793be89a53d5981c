"""The command line: errors before any file is opened name the flag, and help explains every setting."""

import os
import subprocess
import sys
from dataclasses import fields, is_dataclass, replace

import pytest

from memsearcher_jax.config import RunConfig, settings
from memsearcher_jax.launch import cli, compile_cache, evaluate, help_pages, tpu_train
from memsearcher_jax.runs import load_weights
from memsearcher_jax.runs.run_dir import write_run_config


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--rl.stepz 3", "Unrecognized options: --rl.stepz, 3 Perhaps you meant: --rl.steps"),
        ("--reward.metric bleu", "invalid choice 'bleu' for argument '--reward.metric'"),
        ("--rl.steps", "Missing value for argument '--rl.steps'"),
    ],
)
def test_a_flag_that_tyro_refuses_is_named(flags, message, misused, tmp_path):
    assert message in misused(tpu_train.main, ["--out", tmp_path / "run", *flags.split()])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("def broken():\n    return 1 / 0\n", "broken.py: ZeroDivisionError: division by zero (broken.py, line 2)"),
        ("x = (\n", "broken.py: SyntaxError: '(' was never closed (broken.py, line 1)"),
        ("x = 1\n", "broken.py: defines no broken"),
        ("def broken():\n    return 3\n", "broken.py must return a RunConfig, it returned int"),
        (None, "no preset 'PATH/nope.py': choose one of"),
    ],
)
def test_an_invalid_preset_file_is_an_error(source, line, refused, tmp_path):
    file = tmp_path / ("broken.py" if source else "nope.py")
    if source:
        file.write_text(source)
    assert line.replace("PATH", str(tmp_path)) in refused(tpu_train.main, ["--config", file])


def helped(program, *words):
    """What --help prints in 80 columns, in a process that must load no large library."""
    code = (
        f"import sys; from memsearcher_jax.launch import {program}\n"
        f"try:\n    {program}.main({['--help', *words]})\n"
        "finally:\n    assert not {'jax', 'matplotlib', 'transformers'} & sys.modules.keys()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"COLUMNS": "80"})
    assert result.returncode == 0, result.stderr
    return [line.strip("│ ") for line in result.stdout.splitlines()]


def assert_explains(lines, names):
    for name in names:
        (row,) = [row for row, line in enumerate(lines) if line.split(" ")[0] == f"--{name}"]
        text = lines[row].split(maxsplit=2)[2:] or [lines[row + 1]]
        assert text[0] and not text[0].startswith("("), f"--{name} is not explained"


@pytest.mark.parametrize("program", ["tpu_train", "evaluate", "export_hf", "serve_search"])
def test_the_first_page_of_help_explains_the_flags_and_lists_the_sections(program):
    lines = helped(program)
    assert len(lines) < 70
    resume = ["resume"] if program in ("tpu_train", "evaluate") else []
    assert_explains(lines, ["config", "out", *resume, "checkpoint", "json"])
    assert all(section.name in " ".join(lines) for section in fields(RunConfig) if "Config" in str(section.type))


def test_the_page_of_a_section_explains_its_settings_with_the_values_of_the_preset():
    lines = helped("tpu_train", "rl", "--config", "tiny")
    names = [name for name in settings(cli.load_preset("tiny")) if name.startswith("rl.")]
    text = " ".join(lines)
    assert text.count("(tiny: ") == len(names) and "(default: " not in text
    assert f"(tiny: {cli.load_preset('tiny').rl.steps})" in text


@pytest.mark.parametrize(
    "section", [one.name for one in fields(RunConfig) if is_dataclass(getattr(RunConfig(), one.name))]
)
def test_every_setting_of_a_section_is_explained(section, capsys, refused):
    flags = cli.parse(cli.Command, ["--config", "tiny"])
    with pytest.raises(SystemExit):
        help_pages.print_if_asked(flags, ["--help", section])
    lines = [line.strip("│ ") for line in capsys.readouterr().out.splitlines()]
    assert_explains(lines, [name for name in settings(flags.run) if name.startswith(f"{section}.")])
    assert "--help rt: the sections are model, mesh, agent" in refused(tpu_train.main, ["--help", "rt"])


def test_settings_accept_equals_signs_and_hyphens_and_booleans_have_a_value():
    for written in ("--rl.checkpoint-every 3", "--rl.checkpoint_every=3"):
        rl = cli.parse(tpu_train.Train, [*written.split(), "--rl.save_trajectories", "False"]).run.rl
        assert (rl.checkpoint_every, rl.save_trajectories) == (3, False)


JAX_PROGRAM = """
import sys; from memsearcher_jax.launch import cli
cli.parse(cli.Command, sys.argv[1:])
import jax.monitoring
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
jax.jit(lambda x: x * 2 + 1)(3.0)
print(jax.device_count(), any(event.endswith("/cache_hits") for event in hits))
"""


def test_compiled_programs_are_kept_for_the_next_process(tmp_path):
    # A command that another test calls in this process leaves its choice in the environment.
    kept = {name for name in os.environ if not name.startswith("JAX_") and name != "XLA_FLAGS"} | {"JAX_PLATFORMS"}
    environment = {name: os.environ[name] for name in kept}
    environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    for cached in (False, True):
        command = [sys.executable, "-c", JAX_PROGRAM]
        assert subprocess.check_output(command, env=environment, text=True) == f"1 {cached}\n"


def test_the_users_cache_is_private_and_programs_of_several_cpu_devices_are_not_cached(monkeypatch, tmp_path, capsys):
    enabled = "JAX_ENABLE_COMPILATION_CACHE"
    for name in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES", compile_cache.DIRECTORY, enabled, *compile_cache.LIMITS):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "memsearcher_jax"
    folder.mkdir()
    folder.chmod(0o777)
    compile_cache.choose("", 1)
    assert "can be written by others" in capsys.readouterr().err and compile_cache.DIRECTORY not in os.environ
    folder.rmdir()
    with monkeypatch.context() as several:
        several.setenv("JAX_NUM_CPU_DEVICES", "")
        several.delenv("JAX_NUM_CPU_DEVICES")
        compile_cache.choose("", 2)
        assert os.environ["JAX_NUM_CPU_DEVICES"] == "2" and compile_cache.DIRECTORY not in os.environ
    compile_cache.choose("", 1)
    assert folder.stat().st_mode & 0o777 == 0o700 and os.environ[compile_cache.DIRECTORY].startswith(str(folder))
    compile_cache.choose(mine := str(tmp_path / "mine"), 1)
    assert os.environ[compile_cache.DIRECTORY] == mine and os.path.isdir(mine)
    compile_cache.choose(__file__, 1)
    assert "no compilation cache" in capsys.readouterr().err and os.environ[compile_cache.DIRECTORY] == mine
    compile_cache.choose("off", 1)
    assert os.environ[enabled] == "false"
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")
    with pytest.raises(ValueError, match="programs for several CPU devices cannot be cached: omit it"):
        compile_cache.choose("mine", 1)


def test_a_flag_with_which_gradients_on_several_cpu_devices_are_wrong_is_refused(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_experimental_ynn_fusion_type=")
    with pytest.raises(ValueError, match="remove it, or set mesh"):
        compile_cache.choose("", 2)


def test_adapters_of_a_preset_are_merged_into_weights_and_never_into_a_run(tmp_path):
    """Adapters that are to be trained further would not be merged, and a run's weights contain them."""
    preset = cli.load_preset("smollm2")
    for name, adapter, rank in (("weights", "package:smollm2_search", 0), ("run", "", 16)):
        (tmp_path / name).mkdir()
        if name == "run":
            write_run_config(tmp_path / name, preset)
        command = ["--config", "smollm2", "--checkpoint", str(tmp_path / name)]
        model = cli.parse(evaluate.Evaluate, command).run.model
        assert (model.adapter, model.lora_rank) == (adapter, rank)
    for rank in (16, 0):
        write_run_config(tmp_path, replace(preset, model=replace(preset.model, lora_rank=rank)))
        with pytest.raises(ValueError, match=r"was trained from the adapters package:smollm2_search and contains them"):
            load_weights.check_weights(tmp_path, preset.model)
