"""What an installed package holds: every module, every template and asset, and the extras that the README names."""

import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "memsearcher_jax"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of a clean copy: a build leaves folders behind, and files of an earlier build would hide a loss."""
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


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel):
    kept = {path.relative_to(ROOT).as_posix() for path in (ROOT / PACKAGE).rglob("*") if path.is_file()}
    kept = {name for name in kept if "__pycache__" not in name}
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == kept
    assert any(name.endswith(".txt") for name in packed), "the prompt templates"
    assert any(name.startswith(f"{PACKAGE}/assets/tiny/") for name in packed), "the small weights and their tokenizer"


def test_the_metadata_states_licence_python_and_extras(metadata, wheel):
    assert (metadata["Name"], metadata["License"]) == (PACKAGE, "Apache-2.0")
    assert metadata["Requires-Python"] == ">=3.11"
    assert set(metadata.get_all("Provides-Extra")) == {
        "tpu",
        "cuda",
        "serve",
        "test",
        "bench",
        "parity",
        "browser",
        "gcs",
    }
    (licence,) = (name for name in wheel.namelist() if name.endswith("LICENSE"))
    assert "Apache License" in wheel.read(licence).decode()


def test_every_plain_requirement_is_bounded_on_both_sides(metadata):
    requirements = [one for one in metadata.get_all("Requires-Dist") if "extra ==" not in one]
    assert len(requirements) >= 14
    for requirement in requirements:
        bounds = requirement.partition(";")[0]
        assert ">=" in bounds and "<" in bounds, requirement


def test_the_constraints_pin_every_requirement_within_its_bounds(metadata, pins):
    for one in map(Requirement, metadata.get_all("Requires-Dist")):
        assert one.specifier.contains(pins[canonicalize_name(one.name)]), one


def test_every_constraint_is_an_exact_public_version(pins):
    """A local version such as 1.0+cpu, or a path, would resolve on one machine only."""
    for name, version in pins.items():
        assert re.fullmatch(r"\d+(\.\d+)*(\.post\d+)?", version), (name, version)
