"""Queued resources: the exact gcloud calls, and that every argument arrives unchanged."""

import json
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsearcher_jax.launch import cli, command_words
from memsearcher_jax.launch.pod import queued_resource, tpu_slices

# Copied from Google's tables: v4 and v5p count two cores per chip, v5e and v6e count chips.
ACCELERATOR_TYPES = {
    "v4:8x16x16": "v4-4096",
    "v5e:2x4": "v5litepod-8",
    "v5e:16x16": "v5litepod-256",
    "v5p:4x8x8": "v5p-512",
    "v6e:4x8": "v6e-32",
    "v6e:16x16": "v6e-256",
}

GOLDEN = {
    "create a --zone us-east5-b --topology v5p:2x2x4 --slices 2 --provisioning spot --valid_until 6h": (
        "gcloud compute tpus queued-resources create a --zone=us-east5-b "
        "--accelerator-type=v5p-32 --runtime-version=v2-alpha-tpuv5 --node-count=2 --node-prefix=a "
        "--spot --valid-until-duration=6h"
    ),
    "create a --zone z --topology v6e:2x4 --runtime_version v6e-ubuntu-2404 --data_disk projects/p/zones/z/disks/d": (
        "gcloud compute tpus queued-resources create a --zone=z "
        "--accelerator-type=v6e-8 --runtime-version=v6e-ubuntu-2404 --node-id=a "
        "--data-disk=source=projects/p/zones/z/disks/d,mode=read-only"
    ),
    "create a --zone z --topology v6e:2x4 --provisioning flex_start --max_run 10h": (
        "gcloud alpha compute tpus queued-resources create a --zone=z --accelerator-type=v6e-8 "
        "--runtime-version=v2-alpha-tpuv6e --node-id=a --provisioning-model=flex-start --max-run-duration=10h"
    ),
    "create a --zone z --topology v4:2x2x4 --provisioning reserved": (
        "gcloud compute tpus queued-resources create a --zone=z "
        "--accelerator-type=v4-32 --runtime-version=tpu-ubuntu2204-base --node-id=a --reserved"
    ),
}


def gcloud_call(argv):
    ours, remote = command_words.split_passthrough(argv)
    return queued_resource.gcloud(cli.parse_flags(queued_resource.QueuedResource, ours), remote)


@pytest.mark.parametrize("command", GOLDEN)
def test_a_dry_run_prints_the_command_that_is_else_executed(command, fake_program, capsys):
    recorded = fake_program("gcloud")
    queued_resource.main([*command.split()[:1], "--dry_run", *command.split()[1:]])
    assert capsys.readouterr().out == GOLDEN[command] + "\n"
    assert not recorded.exists()
    queued_resource.main(command.split())
    assert ["gcloud", *json.loads(recorded.read_text())[0]] == shlex.split(GOLDEN[command])


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0")), min_size=1))
def test_arguments_survive_both_shells(arguments):
    """The printed line is parsed by the local shell, and the command in it by the shell of the VM."""
    call = gcloud_call(["ssh", "a", "--zone", "z", "--", *arguments])
    assert shlex.split(shlex.join(call)) == call
    assert shlex.split(call[-1].removeprefix("--command=")) == arguments


def test_every_slice_that_is_not_of_gke_alone_has_an_accelerator_type_of_google_of_its_own():
    types = {
        name: tpu_slice.accelerator_type
        for name, tpu_slice in tpu_slices.SLICES.items()
        if not name.startswith("tpu7x:") and not name.endswith("-4t")
    }
    assert types | ACCELERATOR_TYPES == types
    assert len(set(types.values())) == len(types) > 30
