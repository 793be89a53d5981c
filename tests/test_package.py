"""The built wheel: its files, metadata and command."""

import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from memsearcher_jax.launch import main

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "memsearcher_jax"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of a clean copy: folders that an earlier build left behind could hide missing files."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in (PACKAGE, "tests", "configs", "launch"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet", "-w", out, source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        yield archive


@pytest.fixture(scope="module")
def metadata(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


@pytest.fixture(scope="module")
def pins():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def test_the_wheel_contains_exactly_the_files_of_the_package(wheel):
    expected = {path.relative_to(ROOT).as_posix() for path in (ROOT / PACKAGE).rglob("*") if path.is_file()}
    outside = (path for name in ("configs", "launch") for path in (ROOT / name).rglob("*") if path.is_file())
    expected |= {f"{PACKAGE}/{path.relative_to(ROOT).as_posix()}" for path in outside}
    expected = {name for name in expected if "__pycache__" not in name}
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == expected
    assert any(name.endswith(".txt") for name in packed), "the prompt templates"
    assert any(name.startswith(f"{PACKAGE}/assets/tiny/") for name in packed), "the small weights and their tokenizer"


def test_the_metadata_states_licence_python_and_extras(metadata, wheel):
    assert (metadata["Name"], metadata["License"]) == (PACKAGE, "Apache-2.0")
    assert metadata["Requires-Python"] == ">=3.11"
    extras = "browser cuda docs documents gcs gguf harness parity serve test tpu wandb"
    assert sorted(metadata.get_all("Provides-Extra")) == extras.split()
    (licence,) = (name for name in wheel.namelist() if name.endswith("LICENSE"))
    assert "Apache License" in wheel.read(licence).decode()


def test_every_required_dependency_has_both_bounds(metadata):
    requirements = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert len(requirements) >= 14
    for requirement in requirements:
        bounds = requirement.partition(";")[0]
        assert ">=" in bounds and "<" in bounds, requirement


def test_the_constraints_pin_every_requirement_within_its_bounds(metadata, pins):
    for requirement in map(Requirement, metadata.get_all("Requires-Dist")):
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement


def install(wheel, folder):
    """Installs the wheel by pip, without its dependencies; byte-compiling every file would take seconds."""
    options = ["--no-deps", "--no-compile", "--quiet", "--target", folder]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, wheel.filename], check=True)


HELP_PROGRAM = """
import sys
from contextlib import suppress
from memsearcher_jax.launch import main
for name in sys.argv[1:]:
    with suppress(SystemExit):
        main.run_command([name, "--help"])
"""


@pytest.mark.variant
def test_the_installed_command_has_every_subcommand_and_the_presets(wheel, tmp_path):
    """Installed by pip, outside the source tree."""
    install(wheel, tmp_path)

    def run(*arguments, **kwargs):
        environment = {"PATH": "", "PYTHONPATH": str(tmp_path), "COLUMNS": "80"}
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, **kwargs)

    help_ = run(tmp_path / "bin" / "memsearcher", "train", "--help", "rl", check=True).stdout
    assert help_.startswith("usage: memsearcher train ") and "--rl.steps" in help_
    commands = re.findall(r"^    (\w+)", run(tmp_path / "bin" / "memsearcher", check=True).stdout, flags=re.MULTILINE)
    assert commands == list(main.COMMANDS)
    usages = run("-c", HELP_PROGRAM, *commands, check=True).stdout
    assert re.findall(r"^usage: memsearcher (\w+) ", usages, flags=re.MULTILINE) == commands
    code = "from memsearcher_jax.launch import cli; print(cli.__file__, cli.load_preset('tiny_react').agent.workflow)"
    assert run("-c", code, check=True).stdout == f"{tmp_path}/memsearcher_jax/launch/cli.py react\n"


def test_the_citation_states_the_version(metadata):
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == metadata["Version"]
