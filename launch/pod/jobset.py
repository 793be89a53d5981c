"""Starts a run on TPUs of Google Kubernetes Engine, as a JobSet: one Job per slice, one pod per VM.

python launch/pod/jobset.py --topology v6e:4x8 --image IMAGE --name NAME --config qwen7b --out gs://BUCKET/NAME \\
    -- --model.path DIR --data.train FILE --retrieval.index DIR --retrieval.encoder DIR

The words after -- are flags of launch/tpu_train.py, which starts or resumes the run in --out. --dry_run only prints the
JobSet, jobset.yaml filled in, for `kubectl create -f FILE`.
"""

from __future__ import annotations

if __name__ == "__main__":
    import memsearcher_jax.launch.__main__  # noqa: F401  (runs `main` below)

import json
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from memsearcher_jax.hosts.preemption import STOPPED
from memsearcher_jax.launch import cli, command_words, preconditions, tpu_train
from memsearcher_jax.launch.pod.tpu_slices import find_slice, run_program
from memsearcher_jax.ranges import Count, CountOrZero
from memsearcher_jax.runs.remote_dir import check_address

TEMPLATE = Path(__file__).with_name("jobset.yaml")
OWN_FLAGS = {"--config", "--out", "--resume", "--start_or_resume", "--checkpoint"}  # of the trainer


@dataclass(frozen=True)
class Jobset:
    """Start a run on Google Kubernetes Engine. The words after -- are flags of launch/tpu_train.py."""

    topology: str
    """Slice, such as v6e:4x8."""
    image: str
    """Container image of launch/pod/Dockerfile."""
    name: str
    """Name of the JobSet."""
    config: str
    """Preset of the run."""
    out: str
    """Directory of the run, gs://BUCKET/DIR."""
    slices: Count = 1
    """Number of slices."""
    data_claim: str = ""
    """PersistentVolumeClaim to mount, read-only, at /data."""
    secret: str = ""
    """Secret whose entries become environment variables of the trainer."""
    max_restarts: CountOrZero = 50
    """Maximum restarts after a stop from outside."""
    grace_seconds: Count = 600
    """Time to save after SIGTERM."""
    dry_run: bool = False
    """Print the JobSet and start nothing."""


def main(argv: Sequence[str]) -> None:
    with cli.one_line_errors():
        own_flags, trainer_flags = command_words.split_passthrough(argv)
        flags = cli.parse_flags(Jobset, own_flags)
        check(flags, trainer_flags)
        jobset = manifest(flags, trainer_flags)
        if flags.dry_run:
            print(jobset, end="")
        else:  # `kubectl apply` would change an existing job of this name
            run_program(("kubectl", "create", "-f", "-"), stdin=jobset)


def check(flags: Jobset, trainer_flags: Sequence[str]) -> None:
    """Raises ValueError for flags that the cluster, or minutes later the trainer on it, would reject."""
    check_address(flags.out)
    tpu_slice = find_slice(flags.topology)
    # The names of the pods are labels: they start with this name and end with five letters from Kubernetes.
    longest = 63 - len(f"-train-{flags.slices - 1}-{tpu_slice.hosts - 1}-abcde")
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", flags.name) or len(flags.name) > longest:
        rule = "lower-case letters, digits and hyphens; start with a letter and end without a hyphen"
        raise ValueError(f"--name {flags.name!r}: use at most {longest} {rule}")
    for flag, value in (("--secret", flags.secret), ("--data_claim", flags.data_claim)):
        if value and not re.fullmatch(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?", value):
            raise ValueError(f"{flag} {value!r}: Kubernetes names are lower-case letters, digits, hyphens and dots")
    misplaced = sorted({word.partition("=")[0] for word in trainer_flags} & OWN_FLAGS)
    if misplaced:
        raise ValueError(f"{misplaced[0]} cannot follow --: put --config and --out before it, weights in --model.path")
    run = cli.parse(tpu_train.Train, ["--config", flags.config, *trainer_flags]).run
    if flags.config not in cli.presets():
        raise ValueError(f"--config {flags.config}: choose a name, because the image has no presets besides configs/")
    mesh = run.mesh.shape(flags.slices * tpu_slice.devices)
    devices_of_host = tpu_slice.devices // tpu_slice.hosts
    if devices_of_host % run.sampling.tensor:
        raise ValueError(
            f"sampling.tensor {run.sampling.tensor} does not divide the {devices_of_host} devices of a host"
        )
    _require_multiple("training.minibatch_rows", run.training.minibatch_rows, mesh["data"] * mesh["fsdp"])
    _require_multiple("sampling.slots", run.sampling.slots, devices_of_host // run.sampling.tensor)
    preconditions.require_inputs(run, questions="data.train")


def _require_multiple(setting: str, number: int, parts: int) -> None:
    if number % parts:
        raise ValueError(f"{setting} {number} does not divide over {parts}: choose a multiple of {parts}")


def manifest(flags: Jobset, trainer_flags: Sequence[str]) -> str:
    """The JobSet of checked flags, as YAML."""
    # JobSet repeats this command at every restart.
    args = ["--config", flags.config, "--out", flags.out, "--start_or_resume", *trainer_flags]
    claim = {"claimName": flags.data_claim, "readOnly": True}
    values = {
        **vars(flags),
        **vars(find_slice(flags.topology)),
        "stopped_status": STOPPED,
        "args": [arg.replace("$", "$$") for arg in args],  # Kubernetes would expand $(NAME)
        "secrets": [{"secretRef": {"name": flags.secret}}] if flags.secret else [],
        "volumes": [{"name": "data", "persistentVolumeClaim": claim}] if flags.data_claim else [],
        "mounts": [{"name": "data", "mountPath": "/data", "readOnly": True}] if flags.data_claim else [],
    }
    template = string.Template(TEMPLATE.read_text(encoding="utf-8"))
    return template.substitute({name: as_yaml(value) for name, value in values.items()})


def as_yaml(value: object) -> str:
    """The value as JSON, which is YAML as well if characters that YAML would interpret are escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(letter if letter.isprintable() else f"\\U{ord(letter):08x}" for letter in text)
