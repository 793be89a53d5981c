"""Starts a run on TPU VMs (v4 to v6e): requests slices, runs one command on all of their VMs, and deletes them.

python launch/pod/queued_resource.py create NAME --zone ZONE --topology v6e:4x8 --provisioning spot
python launch/pod/queued_resource.py status NAME --zone ZONE
python launch/pod/queued_resource.py ssh NAME --zone ZONE -- sudo docker run --detach ... IMAGE --config qwen7b ...
python launch/pod/queued_resource.py delete NAME --zone ZONE

Each action runs gcloud once. --dry_run prints the command, quoted for a shell, without running it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from memsearcher_jax.launch import cli
from memsearcher_jax.launch.pod.tpu_slices import find_slice
from memsearcher_jax.ranges import Count

GCLOUD = ("gcloud", "compute", "tpus")
INSTALL_HINT = "see cloud.google.com/sdk, or print the command with --dry_run"
PROVISIONING = {"on_demand": (), "spot": ("--spot",), "reserved": ("--reserved",)}


@dataclass(frozen=True)
class Request:
    """A request for slices, by its name."""

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]
    """Name of the request and of a single slice."""
    zone: str
    """Zone, such as us-east5-b."""
    project: str = ""
    """Google Cloud project. Default: gcloud's."""
    dry_run: bool = False
    """Print the command and run nothing."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", self.name):
            raise ValueError(f"NAME {self.name!r}: use lower-case letters, digits and hyphens, first a letter")

    def arguments(self) -> list[str]:
        """Arguments of every gcloud command."""
        return [self.name, f"--zone={self.zone}", *([f"--project={self.project}"] if self.project else [])]


@dataclass(frozen=True)
class Create(Request):
    """Request slices."""

    topology: Annotated[str, tyro.conf.arg(metavar="NAME")] = tyro.MISSING
    """Slice, such as v6e:4x8."""
    slices: Count = 1
    """Number of slices."""
    provisioning: Literal["on_demand", "spot", "reserved"] = "on_demand"
    """Kind of capacity."""
    valid_until: Annotated[str, tyro.conf.arg(metavar="DURATION")] = ""
    """Give up after this time, such as 6h."""
    runtime_version: Annotated[str, tyro.conf.arg(metavar="NAME")] = ""
    """Software of the VMs. Default: that of the TPU generation."""

    def command(self) -> list[str]:
        slice_ = find_slice(self.topology)
        if not slice_.accelerator_type:
            raise ValueError(f"--topology {self.topology}: only GKE has it, see launch/pod/jobset.py")
        nodes = [f"--node-count={self.slices}", f"--node-prefix={self.name}"]
        return [
            *("queued-resources", "create", *self.arguments()),
            f"--accelerator-type={slice_.accelerator_type}",
            f"--runtime-version={self.runtime_version or slice_.runtime_version}",
            *([f"--node-id={self.name}"] if self.slices == 1 else nodes),
            *PROVISIONING[self.provisioning],
            *([f"--valid-until-duration={self.valid_until}"] if self.valid_until else []),
        ]


@dataclass(frozen=True)
class Status(Request):
    """Print the state of the request."""

    def command(self) -> list[str]:
        return ["queued-resources", "describe", *self.arguments(), "--format=value(state.state)"]


@dataclass(frozen=True)
class Delete(Request):
    """Delete the slices and end their programs."""

    def command(self) -> list[str]:
        # Without --force gcloud refuses while there are VMs. It asks before it deletes.
        return ["queued-resources", "delete", *self.arguments(), "--force"]


@dataclass(frozen=True)
class Ssh(Request):
    """Run the words after --, a program and its arguments, on every VM of every slice at the same time."""

    slices: Count = 1
    """Number of slices of the request."""

    def command(self) -> list[str]:
        if self.slices == 1:
            return ["tpu-vm", "ssh", *self.arguments(), "--worker=all"]
        return ["queued-resources", "ssh", *self.arguments(), "--node=all", "--worker=all"]


def main(argv: Sequence[str]) -> None:
    with cli.one_line_errors():
        own_flags, remote = cli.split_passthrough(argv)
        action: Create | Status | Ssh | Delete = cli.parse_flags(Create | Status | Ssh | Delete, own_flags)  # type: ignore
        command = gcloud(action, remote)
        if action.dry_run:
            print(shlex.join(command))
        else:
            cli.run_program(command, install_hint=INSTALL_HINT)


def gcloud(action: Create | Status | Ssh | Delete, remote: Sequence[str]) -> list[str]:
    """The gcloud command; `remote` is the command for the VMs. Raises ValueError in one line."""
    command = [*GCLOUD, *action.command()]
    if isinstance(action, Ssh):
        if not remote:
            raise ValueError("ssh needs a command after --")
        return [*command, f"--command={shlex.join(remote)}"]
    if remote:
        raise ValueError(f"{type(action).__name__.lower()} takes nothing after --")
    return command


if __name__ == "__main__":
    cli.run(main)
