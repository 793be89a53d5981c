"""Starts a run on TPUs of Google Kubernetes Engine, as a JobSet: one Job per slice, one pod per VM.

python launch/pod/jobset.py --topology v6e:4x8 --image IMAGE --name NAME --config qwen7b --out gs://BUCKET/NAME \\
    -- --model.path DIR --data.train FILE --retrieval.index DIR --retrieval.encoder DIR

The words after -- are flags of launch/tpu_train.py, which starts or resumes the run in --out. --dry_run prints the
command without running it; --manifest FILE writes the JobSet for `kubectl create -f FILE`, as JSON, which kubectl reads
like YAML.

Sources: fields from the schema of JobSet (kubernetes-sigs/jobset, v1alpha2); node labels, machines and topologies from
cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus, see tpus.toml; privileges from .../docs/how-to/tpus.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from memsearcher_jax.launch import cli, outputs, tpu_train
from memsearcher_jax.launch.pod.tpu_slices import find_slice
from memsearcher_jax.ranges import Count, CountOrZero
from memsearcher_jax.runtime.preemption import STOPPED
from memsearcher_jax.runtime.remote_dir import check_address

JOB, CONTAINER = "train", "train"
COMMAND = ("python", "launch/pod/start.py")  # the image's entry point, without a shell, so that Python gets SIGTERM
CREATE = ("kubectl", "create", "-f", "-")  # `apply` would change an existing job of this name
INSTALL_HINT = "see cloud.google.com/sdk, or write a file with --manifest"
NOT_PASSED = {
    **dict.fromkeys(("--config", "--out"), "put it before the --"),
    **dict.fromkeys(("--resume", "--start_or_resume"), "every start resumes the run in --out"),
    "--checkpoint": "give the weights with --model.path",
    "--sweep": "it cannot write to a bucket: start one run for each value",
    "--json": "the metrics are in the run directory",
    **dict.fromkeys(("--help", "-h"), "run launch/tpu_train.py --help"),
}
PORTS = {"tpu": 8471, "coordinator": 8482, "metrics": 8431}
ENVIRONMENT = {"JAX_PLATFORMS": "tpu,cpu"}  # exits without a working TPU; by default JAX would continue on the CPU
DATA = "/data"  # mount path of --data_claim
MAX_LABEL = 63  # characters
POD_SUFFIX = "-abcde"  # as long as the suffix that Kubernetes appends to a pod's name
_Name = tyro.conf.arg(metavar="NAME")


@dataclass(frozen=True)
class Jobset:
    """Start a run on Google Kubernetes Engine. The words after -- are flags of launch/tpu_train.py."""

    topology: Annotated[str, _Name]
    """Slice, such as v6e:4x8."""
    image: str
    """Container image of launch/pod/Dockerfile."""
    name: Annotated[str, _Name]
    """Name of the JobSet."""
    config: Annotated[str, _Name]
    """Preset of the run."""
    out: Annotated[str, tyro.conf.arg(metavar="gs://BUCKET/DIR")]
    """Directory of the run."""
    slices: Count = 1
    """Number of slices."""
    data_claim: Annotated[str, _Name] = ""
    """PersistentVolumeClaim to mount, read-only, at /data."""
    secret: Annotated[str, _Name] = ""
    """Secret whose entries become environment variables of the trainer."""
    max_restarts: CountOrZero = 50
    """Maximum restarts after a stop from outside."""
    grace_seconds: Count = 600
    """Time to save after SIGTERM."""
    manifest: cli.File = None
    """Write the JobSet to this file and start nothing."""
    dry_run: bool = False
    """Print the command and run nothing."""


def main(argv: Sequence[str]) -> None:
    with cli.one_line_errors():
        own_flags, trainer_flags = cli.split_passthrough(argv)
        flags = cli.parse_flags(Jobset, own_flags)
        if flags.dry_run and flags.manifest:
            raise ValueError("--dry_run and --manifest exclude each other: omit one")
        check(flags, trainer_flags)
        jobset = manifest(flags, trainer_flags)
        if flags.dry_run:
            print(as_shell(jobset))
        elif flags.manifest:
            outputs.require_writable(flags.manifest, "--manifest")
            outputs.write_json(flags.manifest, jobset)
            print(f"{flags.manifest}: start it with kubectl create -f {shlex.quote(str(flags.manifest))}")
        else:
            cli.run_program(CREATE, install_hint=INSTALL_HINT, stdin=as_json(jobset))


def check(flags: Jobset, trainer_flags: Sequence[str]) -> None:
    """Checks the flags and the trainer's. Raises ValueError in one line."""
    if not flags.image or re.search(r"\s", flags.image):
        raise ValueError(f"--image {flags.image!r}: give the image as for docker push")
    check_address(flags.out)
    for name, kind in (("data_claim", "PersistentVolumeClaim"), ("secret", "Secret")):
        if not re.fullmatch(r"([a-z0-9]([-.a-z0-9]*[a-z0-9])?)?", getattr(flags, name)):
            raise ValueError(f"--{name} {getattr(flags, name)!r}: give the name of a {kind}")
    check_name(flags.name, flags.slices, find_slice(flags.topology).hosts)
    check_trainer(flags.config, trainer_flags)


def check_name(name: str, slices: int, hosts: int) -> None:
    """Raises ValueError if the names of the pods, which start with it, would be invalid, by JobSet's rule."""
    longest = f"{name}-{JOB}-{slices - 1}-{hosts - 1}{POD_SUFFIX}"
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        raise ValueError(
            f"--name {name!r}: use lower-case letters, digits and hyphens; start with a letter, end without a hyphen"
        )
    if len(longest) > MAX_LABEL:
        over = len(longest) - MAX_LABEL
        raise ValueError(f"--name {name}: shorten it by {over} characters: the names of pods start with it")


def check_trainer(config: str, words: Sequence[str]) -> None:
    """Raises ValueError for flags that the trainer would reject minutes later, on the cluster."""
    for word in words:
        flag = word.split("=")[0]
        if flag in NOT_PASSED:
            raise ValueError(f"{flag} is not allowed after --: {NOT_PASSED[flag]}")
    run = cli.parse(tpu_train.Train, ["--config", config, *words]).run
    if run.rl.method == "sft":
        raise ValueError("rl.method sft cannot write to a bucket: train without a JobSet, with a local --out")
    cli.require_inputs(run, questions="data.train")


def manifest(flags: Jobset, trainer_flags: Sequence[str]) -> dict[str, Any]:
    """The JobSet of checked flags. Fields are those of jobset.x-k8s.io/v1alpha2."""
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": flags.name,
            # One node pool per slice: only the chips of one slice are connected.
            "annotations": {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"},
        },
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": failure_policy(flags.max_restarts),
            "replicatedJobs": [
                {"name": JOB, "replicas": flags.slices, "template": {"spec": slice_job(flags, trainer_flags)}},
            ],
        },
    }


def failure_policy(max_restarts: int) -> dict[str, Any]:
    """Restarts everything after a stop from outside; any other failure is the program's own and would repeat.

    Evictions and retryable exits count equally: pods that agree on a stop all exit with the retryable status, so that a
    Job does not record which of them was evicted.
    """
    return {
        "maxRestarts": max_restarts,
        "rules": [
            {"name": "stopped", "action": "RestartJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
            {"name": "failed", "action": "FailJobSet"},
        ],
    }


def slice_job(flags: Jobset, trainer_flags: Sequence[str]) -> dict[str, Any]:
    """The Job of one slice, a pod on each of its VMs. The failure of one pod ends the Job."""
    hosts = find_slice(flags.topology).hosts
    stopped = {"operator": "In", "values": [STOPPED], "containerName": CONTAINER}
    return {
        "parallelism": hosts,
        "completions": hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        # A match fails the Job with reason PodFailurePolicy, any other failure with BackoffLimitExceeded.
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "FailJob", "onExitCodes": stopped},
            ]
        },
        "template": {"spec": pod(flags, trainer_flags)},
    }


def pod(flags: Jobset, trainer_flags: Sequence[str]) -> dict[str, Any]:
    """The pod of one VM, with all of its chips. GKE adds the environment that describes the slice."""
    slice_ = find_slice(flags.topology)
    # JobSet repeats this command at every restart.
    args = ["--config", flags.config, "--out", flags.out, "--start_or_resume", *trainer_flags]
    chips = {"google.com/tpu": slice_.chips_per_host}
    claim = {"claimName": flags.data_claim, "readOnly": True}
    volumes = [{"name": "data", "persistentVolumeClaim": claim}] if flags.data_claim else []
    mounts = [{"name": "data", "mountPath": DATA, "readOnly": True}] if flags.data_claim else []
    # The minimum: TPU devices belong to root, and raising the locked-memory limit needs SYS_RESOURCE.
    capabilities = {"add": ["SYS_RESOURCE"]}
    privileges = {"runAsUser": 0, "privileged": False, "allowPrivilegeEscalation": False, "capabilities": capabilities}
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": flags.grace_seconds,
        "automountServiceAccountToken": False,  # the trainer does not use the cluster's API
        "hostNetwork": True,
        "dnsPolicy": "ClusterFirstWithHostNet",
        "nodeSelector": {
            "cloud.google.com/gke-tpu-accelerator": slice_.gke_accelerator,
            "cloud.google.com/gke-tpu-topology": slice_.topology,
            "node.kubernetes.io/instance-type": slice_.machine,
        },
        "volumes": volumes,
        "containers": [
            {
                "name": CONTAINER,
                "image": flags.image,
                "command": list(COMMAND),
                "args": [arg.replace("$", "$$") for arg in args],  # Kubernetes would expand $(NAME)
                "env": [{"name": name, "value": value} for name, value in ENVIRONMENT.items()],
                "envFrom": [{"secretRef": {"name": flags.secret}}] if flags.secret else [],
                "ports": [{"name": name, "containerPort": port} for name, port in PORTS.items()],
                "resources": {"requests": chips, "limits": chips},
                "securityContext": privileges,
                "volumeMounts": mounts,
            }
        ],
    }


def as_json(jobset: dict[str, Any]) -> str:
    return json.dumps(jobset, indent=2, ensure_ascii=False)


def as_shell(jobset: dict[str, Any]) -> str:
    """The equivalent shell command. No line of the JSON is EOF: line ends in strings are escaped."""
    return f"{' '.join(CREATE)} <<'EOF'\n{as_json(jobset)}\nEOF"


if __name__ == "__main__":
    cli.run(main)
