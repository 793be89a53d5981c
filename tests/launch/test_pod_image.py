"""The image of a pod: what it holds, in which versions, as whom it runs, and that a signal reaches Python."""

import importlib.metadata
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pod import jobset, start

DOCKERFILE = Path(jobset.__file__).with_name("Dockerfile")
ROOT = DOCKERFILE.parents[2]
LINES = [
    line.split(maxsplit=1)
    for line in DOCKERFILE.read_text().replace("\\\n", "").splitlines()
    if line and not line.startswith("#")
]


def told(instruction):
    return [rest for name, rest in LINES if name == instruction]


def test_it_starts_without_a_shell_as_the_jobset_does():
    (entry,) = told("ENTRYPOINT")
    assert json.loads(entry) == list(jobset.COMMAND)
    assert told("CMD") == []
    assert (ROOT / jobset.COMMAND[1]).resolve() == Path(start.__file__).resolve()
    assert start.TRAINER == ROOT / "launch" / "tpu_train.py"


def test_it_holds_all_that_the_build_may_see_and_nothing_else():
    """The allowed names are those that are copied, so that no key or run can get into a layer."""
    first, *rest = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()[1:]
    allowed = [line[1:] for line in rest if line.startswith("!")]
    copied = [name for line in told("COPY") for name in line.split()[:-1]]
    assert first == "*"
    assert sorted(copied) == sorted(allowed)
    assert all((ROOT / name).exists() for name in allowed)


def test_it_takes_no_secret():
    assert told("ARG") == []
    assert told("ENV") == ["PYTHONUNBUFFERED=1"]


def test_it_runs_as_somebody_who_may_write_nothing_of_it():
    names = [name for name, _ in LINES]
    assert told("USER") == ["1000"]
    assert max(place for place, name in enumerate(names) if name in ("RUN", "COPY")) < names.index("USER")
    assert not any("--chown" in rest for _, rest in LINES)


def pinned():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return {canonicalize_name(line.split("==")[0]) for line in lines if "==" in line}


def required(requirement, extras=("",)):
    """Names of what the package needs, and of what that needs in turn, as far as it is installed here."""
    found, waiting = set(), [(requirement, extras)]
    while waiting:
        name, extras = waiting.pop()
        try:
            wanted = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for one in map(Requirement, wanted):
            if one.marker and not any(one.marker.evaluate({"extra": extra}) for extra in extras):
                continue
            step = canonicalize_name(one.name), ("", *sorted(one.extras))
            if step not in found:
                found.add(step)
                waiting.append(step)
    return {name for name, _ in found}


def test_every_package_in_it_is_of_one_version():
    """Also of those that others bring along. The requirements are those of the installed checkout."""
    installs = [line for line in told("RUN") if "pip install" in line]
    assert installs and all(part.count("-c constraints.txt") == 1 for part in installs[0].split("&&"))
    assert "'.[tpu,gcs]'" in installs[0]
    needed = required("memsearcher_jax", ("", "tpu", "gcs")) | {"setuptools", "libtpu", "gcsfs"}
    assert len(needed) > 40
    assert needed - pinned() - {"memsearcher-jax"} == set()


def test_the_base_is_one_version():
    (base,) = told("FROM")
    assert base.startswith("python:3.11.") and base.endswith("-slim-bookworm")


@pytest.fixture
def trainer(tmp_path):
    """A trainer that tells how it was started, and waits for a signal."""
    file = tmp_path / "trainer.py"
    file.write_text(
        "import json, os, resource, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(85))\n"
        "limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)\n"
        "print(json.dumps([os.getpid(), sys.argv[1:], limit]), flush=True)\n"
        "signal.pause()\n"
    )
    return file


def test_the_first_program_becomes_the_trainer_and_signals_reach_it(trainer):
    program = f"from pod import start; start.TRAINER = {str(trainer)!r}; start.main(['--out', 'a b'])"
    lowered = 1 << 20

    def lower():
        _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (lowered, hard))

    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT / "launch",
        env={**os.environ, "PYTHONPATH": str(ROOT / "launch")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lower,
        text=True,
    ) as process:
        pid, argv, (soft, hard) = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 85
    assert (pid, argv) == (process.pid, ["--out", "a b"])
    assert soft == hard != lowered


def test_it_says_so_where_it_may_not_lock_enough(monkeypatch, capsys):
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
