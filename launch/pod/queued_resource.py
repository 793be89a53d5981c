"""Starts a run on TPU VMs (v4 to v6e): asks for them in the queue, runs one command on all of them, gives them back.

python launch/pod/queued_resource.py create NAME --zone ZONE --topology v6e:4x8 --provisioning spot
python launch/pod/queued_resource.py status NAME --zone ZONE
python launch/pod/queued_resource.py ssh NAME --zone ZONE -- sudo docker run --detach ... IMAGE --config qwen7b ...
python launch/pod/queued_resource.py delete NAME --zone ZONE

Each calls gcloud once. --dry-run prints the call as a shell would be told it, and runs nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # where the other commands are

import argparse
import math
import re
import shlex
import subprocess
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass

import cli

TPUS = Path(__file__).with_name("tpus.toml")
GCLOUD = ("gcloud", "compute", "tpus")
PROVISIONING = {"on_demand": (), "spot": ("--spot",), "reserved": ("--reserved",)}


@dataclass(frozen=True)
class Accelerator:
    """One slice as the TPU API knows it."""

    type: str  # such as v6e-32; v4 and v5p count cores, two of a chip, the others chips
    runtime_version: str


def main(argv: Sequence[str]) -> None:
    with cli.one_line_errors():
        ours, remote = cli.cut(argv)
        flags = parser().parse_args(ours)
        command = gcloud(flags, remote)
        if flags.dry_run:
            print(shlex.join(command))
        else:
            run(command)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = cli.Parser(prog="queued_resource.py", description=__doc__.split("\n")[0], allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", required=True, metavar="create|status|ssh|delete")
    for name, what in (
        ("create", "ask for slices"),
        ("status", "say how the request stands"),
        ("ssh", "run what stands after --, program and arguments, on every VM of every slice at the same time"),
        ("delete", "give the slices back, and end what runs there"),
    ):
        action = actions.add_parser(name, help=what, description=what, allow_abbrev=False)
        action.add_argument("name", metavar="NAME", help="of the request; a single slice is called the same")
        action.add_argument("--zone", required=True, help="such as us-east5-b")
        action.add_argument("--project", help="without it: gcloud's own")
        action.add_argument("--dry-run", action="store_true", help="print what would run and run nothing")
        if name in ("create", "ssh"):
            action.add_argument("--slices", type=int, default=1, help="how many there are")
        if name == "create":
            action.add_argument("--topology", required=True, metavar="NAME", help="slice, such as v6e:4x8")
            action.add_argument("--provisioning", choices=list(PROVISIONING), default="on_demand")
            action.add_argument("--valid_until", metavar="DURATION", help="give up after so long, such as 6h")
            action.add_argument("--runtime_version", metavar="NAME", help="without it: that of the generation")
    return parser


def gcloud(flags: argparse.Namespace, remote: Sequence[str]) -> list[str]:
    """The call that the flags mean; `remote` is the command for the VMs. Raises ValueError in one line."""
    if bool(remote) != (flags.action == "ssh"):
        raise ValueError("ssh needs a command after --" if not remote else f"{flags.action} takes nothing after --")
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", flags.name):
        raise ValueError(f"NAME {flags.name!r}: use lower-case letters, digits and hyphens, first a letter")
    if getattr(flags, "slices", 1) < 1:
        raise ValueError(f"--slices is {flags.slices}: it must be at least 1")
    where = [f"--zone={flags.zone}", *([f"--project={flags.project}"] if flags.project else [])]
    match flags.action:
        case "create":
            return [*GCLOUD, "queued-resources", "create", flags.name, *where, *request(flags)]
        case "status":
            shown = "--format=value(state.state)"
            return [*GCLOUD, "queued-resources", "describe", flags.name, *where, shown]
        case "delete":
            # Without --force gcloud refuses while there are VMs. It asks before it deletes.
            return [*GCLOUD, "queued-resources", "delete", flags.name, *where, "--force"]
        case "ssh":
            kind = ["tpu-vm", "ssh"] if flags.slices == 1 else ["queued-resources", "ssh"]
            nodes = [] if flags.slices == 1 else ["--node=all"]
            return [*GCLOUD, *kind, flags.name, *where, *nodes, "--worker=all", f"--command={shlex.join(remote)}"]


def request(flags: argparse.Namespace) -> list[str]:
    """What is asked for, as flags of `queued-resources create`."""
    accelerator = find_accelerator(flags.topology)
    single = flags.slices == 1
    return [
        f"--accelerator-type={accelerator.type}",
        f"--runtime-version={flags.runtime_version or accelerator.runtime_version}",
        *([f"--node-id={flags.name}"] if single else [f"--node-count={flags.slices}", f"--node-prefix={flags.name}"]),
        *PROVISIONING[flags.provisioning],
        *([f"--valid-until-duration={flags.valid_until}"] if flags.valid_until else []),
    ]


def find_accelerator(name: str) -> Accelerator:
    """The accelerator type of a slice. Raises ValueError that lists the known slices."""
    tpus = tomllib.loads(TPUS.read_text(encoding="utf-8"))
    known = [
        f"{generation}:{topology}"
        for generation, facts in tpus.items()
        if "accelerator" in facts
        for machine in facts["machines"]
        for topology in machine["topologies"]
    ]
    generation, _, topology = name.partition(":")
    if generation in tpus and "accelerator" not in tpus[generation]:
        raise ValueError(f"--topology {name}: {generation} comes with GKE only, see launch/pod/jobset.py")
    if name not in known:
        raise ValueError(f"--topology {name} is none of {', '.join(known)}")
    facts, chips = tpus[generation], math.prod(int(length) for length in topology.split("x"))
    return Accelerator(f"{facts['accelerator']}-{chips * facts['cores_per_chip']}", facts["runtime_version"])


def run(command: Sequence[str]) -> None:
    """Calls gcloud, and ends with its exit status if it fails. Raises OSError if there is none."""
    try:
        status = subprocess.run(command, check=False).returncode
    except FileNotFoundError as error:
        raise OSError("gcloud is not installed: see cloud.google.com/sdk, or read the call by --dry-run") from error
    if status:
        raise SystemExit(status)


if __name__ == "__main__":
    cli.run(main)
