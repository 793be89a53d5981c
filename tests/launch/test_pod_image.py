"""The container image of a pod: its files, package versions and user, and that signals reach the trainer."""

import importlib.metadata
import json
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from memsearcher_jax.launch.pod import jobset, start

DOCKERFILE = Path(jobset.__file__).with_name("Dockerfile")
ROOT = DOCKERFILE.parents[2]
LINES = [
    line.split(maxsplit=1)
    for line in DOCKERFILE.read_text().replace("\\\n", "").splitlines()
    if line and not line.startswith("#")
]


def arguments_of(instruction):
    return [rest for name, rest in LINES if name == instruction]


def test_the_entrypoint_is_the_command_of_the_jobset():
    (entry,) = arguments_of("ENTRYPOINT")
    assert f"command: [{', '.join(json.loads(entry))}]" in jobset.TEMPLATE.read_text()
    assert arguments_of("CMD") == []
    assert (ROOT / json.loads(entry)[1]).resolve() == Path(start.__file__).resolve()
    assert start.TRAINER == ROOT / "launch" / "tpu_train.py"


def test_the_image_contains_exactly_the_allowed_files():
    """The allowed files equal the copied files, so no key or run can enter a layer."""
    first, *rest = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()[1:]
    allowed = [line[1:] for line in rest if line.startswith("!")]
    copied = [name for line in arguments_of("COPY") for name in line.split()[:-1]]
    assert first == "*"
    assert sorted(copied) == sorted(allowed)
    assert all((ROOT / name).exists() for name in allowed)


def test_the_image_has_no_build_arguments_or_secrets():
    assert arguments_of("ARG") == []
    assert arguments_of("ENV") == ["PYTHONUNBUFFERED=1"]


def test_the_image_user_cannot_modify_the_image():
    names = [name for name, _ in LINES]
    assert arguments_of("USER") == ["1000"]
    assert max(place for place, name in enumerate(names) if name in ("RUN", "COPY")) < names.index("USER")
    assert not any("--chown" in rest for _, rest in LINES)


def pinned():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return {canonicalize_name(line.split("==")[0]) for line in lines if "==" in line}


def required(requirement, extras=("",)):
    """Names of the direct and indirect requirements of a package, as far as they are installed."""
    visited, waiting = set(), [(requirement, extras)]
    while waiting:
        name, extras = waiting.pop()
        try:
            dependencies = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for dependency in map(Requirement, dependencies):
            if dependency.marker and not any(dependency.marker.evaluate({"extra": extra}) for extra in extras):
                continue
            key = canonicalize_name(dependency.name), ("", *sorted(dependency.extras))
            if key not in visited:
                visited.add(key)
                waiting.append(key)
    return {name for name, _ in visited}


def test_every_installed_package_is_pinned():
    """Including indirect dependencies. The requirements are read from the installed package."""
    installs = [line for line in arguments_of("RUN") if "pip install" in line]
    assert installs and all(command.count("-c constraints.txt") == 1 for command in installs[0].split("&&"))
    assert "'.[tpu,gcs]'" in installs[0]
    required_names = required("memsearcher_jax", ("", "tpu", "gcs")) | {"setuptools", "libtpu", "gcsfs"}
    assert len(required_names) > 40
    assert required_names - pinned() - {"memsearcher-jax"} == set()


def test_the_base_image_is_pinned():
    (base,) = arguments_of("FROM")
    assert base.startswith("python:3.11.") and base.endswith("-slim-bookworm")


@pytest.fixture
def trainer(tmp_path):
    """A trainer that prints its process id, arguments and limits, and waits for a signal."""
    file = tmp_path / "trainer.py"
    file.write_text(
        "import json, os, resource, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(85))\n"
        "limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)\n"
        "print(json.dumps([os.getpid(), sys.argv[1:], limit]), flush=True)\n"
        "signal.pause()\n"
    )
    return file


def test_the_trainer_replaces_the_start_process_and_gets_its_signals(trainer, tmp_path):
    copied = tmp_path / "launch" / "pod" / "start.py"
    copied.parent.mkdir(parents=True)
    shutil.copyfile(start.__file__, copied)
    trainer.rename(tmp_path / "launch" / "tpu_train.py")
    lowered = 1 << 20

    def lower_limit():
        _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (lowered, hard))

    with subprocess.Popen(
        [sys.executable, copied, "--out", "a b"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lower_limit,
        text=True,
    ) as process:
        pid, argv, (soft, hard) = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 85
    assert (pid, argv) == (process.pid, ["--out", "a b"])
    assert soft == hard != lowered


def test_a_low_limit_of_locked_memory_is_reported(monkeypatch, capsys):
    set_to = []

    def refuse(what, limits):
        if limits[1] == resource.RLIM_INFINITY:
            raise ValueError("not allowed to raise maximum limit")
        set_to.append(limits)

    monkeypatch.setattr(start.resource, "getrlimit", lambda what: (1 << 16, 1 << 23))
    monkeypatch.setattr(start.resource, "setrlimit", refuse)
    start.raise_locked_memory()
    assert set_to == [(1 << 23, 1 << 23)]
    assert "locked memory is limited to 8,388,608 bytes" in capsys.readouterr().err
