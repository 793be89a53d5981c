"""The container image of a pod: its files, package versions and user, and that signals reach the trainer."""

import contextlib
import importlib.metadata
import json
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

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


def test_the_image_has_a_pinned_base_no_build_arguments_and_a_user_who_cannot_modify_it():
    names = [name for name, _ in LINES]
    (base,) = arguments_of("FROM")
    assert base.startswith("python:3.11.") and base.endswith("-slim-bookworm")
    assert (arguments_of("ARG"), arguments_of("ENV"), arguments_of("USER")) == ([], ["PYTHONUNBUFFERED=1"], ["1000"])
    assert max(place for place, name in enumerate(names) if name in ("RUN", "COPY")) < names.index("USER")
    assert not any("--chown" in rest for _, rest in LINES)


def required(requirement, extras):
    """Names of the direct and indirect requirements of a package, as far as they are installed."""
    visited, waiting = set(), [(requirement, extras)]
    while waiting:
        name, extras = waiting.pop()
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            for dependency in map(Requirement, importlib.metadata.requires(name) or []):
                key = canonicalize_name(dependency.name), ("", *sorted(dependency.extras))
                marker = dependency.marker
                if key not in visited and (not marker or any(marker.evaluate({"extra": extra}) for extra in extras)):
                    visited.add(key)
                    waiting.append(key)
    return {name for name, _ in visited}


def test_every_installed_package_is_pinned():
    """Including indirect dependencies. The requirements are read from the installed package."""
    installs = [line for line in arguments_of("RUN") if "pip install" in line]
    assert installs and all(command.count("-c constraints.txt") == 1 for command in installs[0].split("&&"))
    assert "'.[tpu,gcs]'" in installs[0]
    names = required("memsearcher_jax", ("", "tpu", "gcs")) | {"setuptools", "libtpu", "gcsfs"}
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {canonicalize_name(line.partition("==")[0]) for line in constraints if "==" in line}
    assert len(names) > 40
    assert names - pinned - {"memsearcher-jax"} == set()


TRAINER = """
import json, os, resource, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(85))
print(json.dumps([os.getpid(), sys.argv[1:], resource.getrlimit(resource.RLIMIT_MEMLOCK)]), flush=True)
signal.pause()
"""


def test_the_trainer_replaces_the_start_process_and_gets_its_signals(tmp_path):
    copied, lowered = tmp_path / "launch" / "pod" / "start.py", 1 << 20
    copied.parent.mkdir(parents=True)
    shutil.copyfile(start.__file__, copied)
    (tmp_path / "launch" / "tpu_train.py").write_text(TRAINER)

    def lower_limit():
        _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (lowered, hard))

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, copied, "--out", "a b"], preexec_fn=lower_limit, **pipes) as process:
        pid, argv, (soft, hard) = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 85
    assert (pid, argv) == (process.pid, ["--out", "a b"])
    assert soft == hard != lowered
