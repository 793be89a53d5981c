"""The image of a pod: what it holds, and that a signal reaches Python."""

import json
from pathlib import Path

import tpu_train
from pod import jobset

DOCKERFILE = Path(jobset.__file__).with_name("Dockerfile")
ROOT = DOCKERFILE.parents[2]
LINES = [line.split(maxsplit=1) for line in DOCKERFILE.read_text().splitlines() if line and not line.startswith("#")]


def told(instruction):
    return [rest for name, rest in LINES if name == instruction]


def test_it_starts_the_trainer_without_a_shell_as_the_jobset_does():
    (entry,) = told("ENTRYPOINT")
    assert json.loads(entry) == list(jobset.COMMAND)
    assert told("CMD") == []
    assert (ROOT / jobset.COMMAND[1]).resolve() == Path(tpu_train.__file__).resolve()


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
