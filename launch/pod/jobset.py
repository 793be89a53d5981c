"""Starts a run on TPUs of Google Kubernetes Engine, as a JobSet: one Job per slice, one pod per VM.

python launch/pod/jobset.py --topology v6e:4x8 --image IMAGE --name NAME --config qwen7b --out gs://BUCKET/NAME \\
    -- --model.path DIR --data.train FILE --retrieval.index DIR

What stands after -- goes to launch/tpu_train.py, which starts the run in --out or goes on with it. --dry-run prints
what would run and runs nothing; --manifest FILE writes the JobSet for `kubectl create -f FILE`, as JSON, which kubectl
reads as it reads YAML.

Sources: fields from the schema of JobSet (kubernetes-sigs/jobset, v1alpha2); node labels, machines and topologies from
cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus, see tpus.toml; privileges from .../docs/how-to/tpus.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # where the other commands are

import argparse
import json
import math
import re
import shlex
import subprocess
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cli
import tpu_train
from host import STOPPED

from memsearcher_jax.rl.bucket import check_address

TPUS = Path(__file__).with_name("tpus.toml")
JOB, CONTAINER = "train", "train"
COMMAND = ("python", "launch/pod/start.py")  # as the image's entry point, no shell between the cluster and Python
CREATE = ("kubectl", "create", "-f", "-")  # `apply` would change a job of this name that is there already
STANDS_BEFORE = "it stands before the --, for every pod alike"
NOT_PASSED = {
    **{flag: STANDS_BEFORE for flag in ("--config", "--out")},
    **{flag: "every start goes on with what it finds" for flag in ("--resume", "--start_or_resume")},
    "--checkpoint": "name the weights by --model.path",
    "--json": "the numbers of a run are in its folder",
    **{flag: "ask launch/tpu_train.py itself" for flag in ("--help", "-h")},
}
PORTS = {"tpu": 8471, "coordinator": 8482, "metrics": 8431}
ENVIRONMENT = {"JAX_PLATFORMS": "tpu,cpu"}  # without a working TPU it ends; by default JAX would go on with the CPU
DATA = "/data"  # where pods find what --data_claim names
LONGEST_LABEL = 63
POD_SUFFIX = "-abcde"  # as long as what Kubernetes appends to a pod's name


@dataclass(frozen=True)
class Slice:
    """One slice as GKE knows it."""

    accelerator: str  # node label
    topology: str  # such as 4x8
    machine: str
    chips: int  # of the slice
    chips_per_host: int

    @property
    def hosts(self) -> int:
        return self.chips // self.chips_per_host


@dataclass(frozen=True)
class PodJob:
    """What a JobSet is rendered from."""

    name: str
    image: str
    slice: Slice
    slices: int
    args: tuple[str, ...]  # of the trainer
    max_restarts: int
    grace_seconds: int
    data_claim: str = ""  # of a volume with weights, questions and index; none if empty
    secret: str = ""  # whose entries the trainer finds in its environment; none if empty


def main(argv: Sequence[str]) -> None:
    with cli.one_line_errors():
        ours, trainers = cli.cut(argv)
        flags = parser().parse_args(ours)
        jobset = manifest(job(flags, trainers))
        if flags.dry_run:
            print(as_shell(jobset))
        elif flags.manifest:
            cli.write_json(flags.manifest, jobset)
            print(f"{flags.manifest}: start it with kubectl create -f {shlex.quote(str(flags.manifest))}")
        else:
            create(jobset)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = cli.Parser(
        prog="jobset.py",
        description=__doc__.split("\n")[0],
        epilog="What stands after -- goes to launch/tpu_train.py.",
        allow_abbrev=False,
    )
    parser.add_argument("--topology", required=True, metavar="NAME", help="slice, such as v6e:4x8")
    parser.add_argument("--slices", type=int, default=1, help="how many of them")
    parser.add_argument("--image", required=True, help="container image of launch/pod/Dockerfile")
    parser.add_argument("--name", required=True, help="name of the JobSet")
    parser.add_argument("--config", required=True, metavar="NAME", help="preset of the run")
    parser.add_argument("--out", required=True, metavar="gs://BUCKET/FOLDER", help="folder of the run")
    parser.add_argument("--data_claim", default="", metavar="NAME", help=f"volume claim to mount, read-only, at {DATA}")
    parser.add_argument("--secret", default="", metavar="NAME", help="secret with keys, each under its variable's name")
    parser.add_argument("--max_restarts", type=int, default=50, help="restarts after a stop from outside")
    parser.add_argument("--grace_seconds", type=int, default=600, help="time to save in, after SIGTERM")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--manifest", type=Path, metavar="FILE", help="write the JobSet there and start nothing")
    instead.add_argument("--dry-run", action="store_true", help="print what would run and run nothing")
    return parser


def job(flags: argparse.Namespace, trainers: Sequence[str]) -> PodJob:
    """Checks our flags and the trainer's. Raises ValueError in one line."""
    one = find_slice(flags.topology)
    for name, least in (("slices", 1), ("max_restarts", 0), ("grace_seconds", 1)):
        if getattr(flags, name) < least:
            raise ValueError(f"--{name} is {getattr(flags, name)}: it must be at least {least}")
    if not flags.image or re.search(r"\s", flags.image):
        raise ValueError(f"--image {flags.image!r}: give the image as docker push knows it")
    check_address(flags.out)
    for name, kind in (("data_claim", "PersistentVolumeClaim"), ("secret", "Secret")):
        if not re.fullmatch(r"([a-z0-9]([-.a-z0-9]*[a-z0-9])?)?", getattr(flags, name)):
            raise ValueError(f"--{name} {getattr(flags, name)!r}: give the name of a {kind}")
    check_name(flags.name, flags.slices, one.hosts)
    check_trainer(flags.config, trainers)
    # JobSet repeats the command after each stop, as it was rendered.
    args = ("--config", flags.config, "--out", flags.out, "--start_or_resume", *trainers)
    rest = (flags.max_restarts, flags.grace_seconds, flags.data_claim, flags.secret)
    return PodJob(flags.name, flags.image, one, flags.slices, args, *rest)


def known_slices() -> dict[str, Slice]:
    """Every slice of tpus.toml by its name."""
    return {
        f"{generation}:{topology}": Slice(
            facts["gke_accelerator"],
            topology,
            machine["name"],
            math.prod(int(length) for length in topology.split("x")),
            machine["chips"],
        )
        for generation, facts in tomllib.loads(TPUS.read_text(encoding="utf-8")).items()
        for machine in facts["machines"]
        for topology in machine["topologies"]
    }


def find_slice(name: str) -> Slice:
    """The slice of this name. Raises ValueError that lists the known ones."""
    known = known_slices()
    if name not in known:
        raise ValueError(f"--topology {name} is none of {', '.join(known)}")
    return known[name]


def check_name(name: str, slices: int, hosts: int) -> None:
    """Raises ValueError if the name cannot head the names of all pods, by JobSet's own rule."""
    longest = f"{name}-{JOB}-{slices - 1}-{hosts - 1}{POD_SUFFIX}"
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        raise ValueError(f"--name {name!r}: use lower-case letters, digits and hyphens, first a letter, last no hyphen")
    if len(longest) > LONGEST_LABEL:
        over = len(longest) - LONGEST_LABEL
        raise ValueError(f"--name {name}: shorten it by {over} characters, the names of pods begin with it")


def check_trainer(config: str, words: Sequence[str]) -> None:
    """Raises ValueError for what the trainer would refuse at its start, on a cluster and minutes later."""
    for word in words:
        flag = word.split("=")[0]
        if flag in NOT_PASSED:
            raise ValueError(f"{flag} cannot stand after --: {NOT_PASSED[flag]}")
    cli.parse(tpu_train.Train, ["--config", config, *words])


def manifest(job: PodJob) -> dict[str, Any]:
    """The JobSet. Fields are those of jobset.x-k8s.io/v1alpha2."""
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": job.name,
            # Each slice has a node pool for itself: the chips of one slice are wired to each other, not to the next.
            "annotations": {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"},
        },
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": failure_policy(job.max_restarts),
            "replicatedJobs": [{"name": JOB, "replicas": job.slices, "template": {"spec": slice_job(job)}}],
        },
    }


def failure_policy(max_restarts: int) -> dict[str, Any]:
    """A stop from outside restarts everything; any other failure is the program's own and would only repeat.

    Evictions and retryable exits count alike: pods that agree on a stop all leave with the retryable code, so that a
    Job does not tell which of them was evicted.
    """
    return {
        "maxRestarts": max_restarts,
        "rules": [
            {"name": "stopped", "action": "RestartJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
            {"name": "failed", "action": "FailJobSet"},
        ],
    }


def slice_job(job: PodJob) -> dict[str, Any]:
    """The Job of one slice, a pod on each of its VMs. The failure of one pod ends the Job."""
    stopped = {"operator": "In", "values": [STOPPED], "containerName": CONTAINER}
    return {
        "parallelism": job.slice.hosts,
        "completions": job.slice.hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        # What matches ends the Job for the reason PodFailurePolicy, what does not for BackoffLimitExceeded.
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "FailJob", "onExitCodes": stopped},
            ]
        },
        "template": {"spec": pod(job)},
    }


def pod(job: PodJob) -> dict[str, Any]:
    """The pod of one VM, with all of its chips. GKE adds what tells it its place among the others."""
    chips = {"google.com/tpu": job.slice.chips_per_host}
    claim = {"claimName": job.data_claim, "readOnly": True}
    volumes = [{"name": "data", "persistentVolumeClaim": claim}] if job.data_claim else []
    mounts = [{"name": "data", "mountPath": DATA, "readOnly": True}] if job.data_claim else []
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace_seconds,
        "automountServiceAccountToken": False,  # it has nothing to say to the cluster
        "hostNetwork": True,
        "dnsPolicy": "ClusterFirstWithHostNet",
        "nodeSelector": {
            "cloud.google.com/gke-tpu-accelerator": job.slice.accelerator,
            "cloud.google.com/gke-tpu-topology": job.slice.topology,
            "node.kubernetes.io/instance-type": job.slice.machine,
        },
        "volumes": volumes,
        "containers": [
            {
                "name": CONTAINER,
                "image": job.image,
                "command": list(COMMAND),
                "args": [literal(arg) for arg in job.args],
                "env": [{"name": name, "value": value} for name, value in ENVIRONMENT.items()],
                "envFrom": [{"secretRef": {"name": job.secret}}] if job.secret else [],
                "ports": [{"name": name, "containerPort": port} for name, port in PORTS.items()],
                "resources": {"requests": chips, "limits": chips},
                "securityContext": privileges(),
                "volumeMounts": mounts,
            }
        ],
    }


def privileges() -> dict[str, Any]:
    """The devices of a TPU belong to root, and only SYS_RESOURCE may raise the limit of locked memory; nothing more."""
    capabilities = {"add": ["SYS_RESOURCE"]}
    return {"runAsUser": 0, "privileged": False, "allowPrivilegeEscalation": False, "capabilities": capabilities}


def literal(arg: str) -> str:
    """The argument as Kubernetes passes it on unchanged: it would expand $(NAME)."""
    return arg.replace("$", "$$")


def as_json(jobset: dict[str, Any]) -> str:
    """What kubectl reads."""
    return json.dumps(jobset, indent=2, ensure_ascii=False)


def as_shell(jobset: dict[str, Any]) -> str:
    """What a shell would have to be told. No line of JSON is EOF: line ends within strings are escaped."""
    return f"{' '.join(CREATE)} <<'EOF'\n{as_json(jobset)}\nEOF"


def create(jobset: dict[str, Any]) -> None:
    """Hands the JobSet to kubectl, and ends with its exit status if it fails. Raises OSError if there is none."""
    try:
        status = subprocess.run(CREATE, input=as_json(jobset).encode(), check=False).returncode
    except FileNotFoundError as error:
        raise OSError("kubectl is not installed: see cloud.google.com/sdk, or write a file by --manifest") from error
    if status:
        raise SystemExit(status)


if __name__ == "__main__":
    cli.run(main)
