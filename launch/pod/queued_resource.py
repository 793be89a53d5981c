"""Starts a run on TPU VMs (v4 to v6e): requests slices, runs one command on all of their VMs, and deletes them.

python launch/pod/queued_resource.py create NAME --zone ZONE --topology v6e:4x8 --provisioning spot
python launch/pod/queued_resource.py status NAME --zone ZONE
python launch/pod/queued_resource.py ssh NAME --zone ZONE -- sudo docker run --detach ... IMAGE --config qwen7b ...
python launch/pod/queued_resource.py delete NAME --zone ZONE

Each action runs gcloud once, in its own project. --dry_run prints the command, quoted for a shell.
"""

from __future__ import annotations

if __name__ == "__main__":
    import memsearcher_jax.launch.__main__  # noqa: F401  (runs `main` below)

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from memsearcher_jax.launch import cli, command_words
from memsearcher_jax.launch.pod.tpu_slices import find_slice, run_program
from memsearcher_jax.ranges import Count


@dataclass(frozen=True)
class QueuedResource:
    """Request slices of TPU VMs, use them, and delete them.

    create requests slices; status prints the state of the request; ssh runs the words after -- on every VM at the same
    time; delete deletes the slices and ends their programs.
    """

    action: tyro.conf.Positional[Literal["create", "status", "ssh", "delete"]]
    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]
    """Name of the request and of a single slice."""
    zone: str
    """Zone, such as us-east5-b."""
    slices: Count = 1
    """Number of slices, for create and ssh."""
    topology: str = ""
    """Slice to create, such as v6e:4x8."""
    provisioning: Literal["on_demand", "spot", "reserved", "flex_start"] = "on_demand"
    """Kind of capacity, for create. Flex-start runs for max_run and is a preview of Google's."""
    max_run: Annotated[str, tyro.conf.arg(metavar="DURATION")] = ""
    """Time after which the slices of flex_start are deleted, such as 10h, at most 7 days."""
    valid_until: Annotated[str, tyro.conf.arg(metavar="DURATION")] = ""
    """Give up after this time, such as 6h, for create."""
    runtime_version: Annotated[str, tyro.conf.arg(metavar="IMAGE")] = ""
    """Software of the VMs, for create. Default: the image that Google's documentation names for the generation."""
    data_disk: Annotated[str, tyro.conf.arg(metavar="DISK")] = ""
    """Disk to attach to every VM, read-only, for create: projects/PROJECT/zones/ZONE/disks/NAME."""
    dry_run: bool = False
    """Print the command and run nothing."""


def main(argv: Sequence[str]) -> None:
    with cli.one_line_errors():
        own_flags, remote = command_words.split_passthrough(argv)
        flags = cli.parse_flags(QueuedResource, own_flags)
        command = gcloud(flags, remote)
        if flags.dry_run:
            print(shlex.join(command))
        else:
            run_program(command)


def gcloud(flags: QueuedResource, remote: Sequence[str]) -> list[str]:
    """The gcloud command; `remote` is the command for the VMs. Raises ValueError in one line."""
    if bool(remote) != (flags.action == "ssh"):
        raise ValueError("ssh needs a command after --, and the other actions take none")
    tpus = ["gcloud", "compute", "tpus"]
    where = [flags.name, f"--zone={flags.zone}"]
    if flags.action == "create":
        track = ["gcloud", "alpha", *tpus[1:]] if flags.provisioning == "flex_start" else tpus
        return [*track, "queued-resources", "create", *where, *requested(flags)]
    if flags.action == "status":
        return [*tpus, "queued-resources", "describe", *where, "--format=value(state.state)"]
    if flags.action == "delete":  # without --force gcloud refuses while there are VMs; it asks before it deletes
        return [*tpus, "queued-resources", "delete", *where, "--force"]
    on_all_workers = ["--worker=all", f"--command={shlex.join(remote)}"]
    if flags.slices == 1:
        return [*tpus, "tpu-vm", "ssh", *where, *on_all_workers]
    return [*tpus, "queued-resources", "ssh", *where, "--node=all", *on_all_workers]


def requested(flags: QueuedResource) -> list[str]:
    """The words that describe the slices to create."""
    tpu_slice = find_slice(flags.topology)
    if not tpu_slice.accelerator_type:
        raise ValueError(f"--topology {flags.topology}: only GKE has it, see launch/pod/jobset.py")
    runtime_version = flags.runtime_version or tpu_slice.runtime_version
    words = [f"--accelerator-type={tpu_slice.accelerator_type}", f"--runtime-version={runtime_version}"]
    if flags.slices == 1:
        words.append(f"--node-id={flags.name}")
    else:
        words += [f"--node-count={flags.slices}", f"--node-prefix={flags.name}"]
    if bool(flags.max_run) != (flags.provisioning == "flex_start"):
        raise ValueError("--provisioning flex_start needs --max_run, such as 10h, and the other kinds take none")
    if flags.provisioning == "flex_start":
        words += ["--provisioning-model=flex-start", f"--max-run-duration={flags.max_run}"]
    elif flags.provisioning != "on_demand":
        words.append(f"--{flags.provisioning}")
    if flags.valid_until:
        words.append(f"--valid-until-duration={flags.valid_until}")
    if flags.data_disk:
        words.append(f"--data-disk=source={flags.data_disk},mode=read-only")
    return words
