"""TPU VMs from the queue: the exact calls of gcloud, and that every argument arrives as it was written."""

import json
import re
import shlex
import shutil
import subprocess
import sys

import cli
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pod import jobset, queued_resource

# By hand, from Google's tables: v4 and v5p count two cores of a chip, v5e and v6e chips.
TYPES = {
    "v4:2x2x1": "v4-8",
    "v4:2x2x4": "v4-32",
    "v4:4x4x4": "v4-128",
    "v4:8x16x16": "v4-4096",
    "v5e:1x1": "v5litepod-1",
    "v5e:2x4": "v5litepod-8",
    "v5e:8x8": "v5litepod-64",
    "v5e:16x16": "v5litepod-256",
    "v5p:2x2x1": "v5p-8",
    "v5p:2x2x4": "v5p-32",
    "v5p:4x8x8": "v5p-512",
    "v6e:2x2": "v6e-4",
    "v6e:4x8": "v6e-32",
    "v6e:16x16": "v6e-256",
}

GOLDEN = {
    "create a --zone us-east5-b --topology v6e:4x8": (
        "gcloud compute tpus queued-resources create a --zone=us-east5-b "
        "--accelerator-type=v6e-32 --runtime-version=v2-alpha-tpuv6e --node-id=a"
    ),
    "create a --zone us-east5-b --project p --topology v5p:2x2x4 --slices 2 --provisioning spot --valid_until 6h": (
        "gcloud compute tpus queued-resources create a --zone=us-east5-b --project=p "
        "--accelerator-type=v5p-32 --runtime-version=v2-alpha-tpuv5 --node-count=2 --node-prefix=a "
        "--spot --valid-until-duration=6h"
    ),
    "create a --zone z --topology v4:2x2x4 --provisioning reserved": (
        "gcloud compute tpus queued-resources create a --zone=z "
        "--accelerator-type=v4-32 --runtime-version=tpu-ubuntu2204-base --node-id=a --reserved"
    ),
    "create a --zone z --topology v5e:4x4 --runtime_version mine": (
        "gcloud compute tpus queued-resources create a --zone=z "
        "--accelerator-type=v5litepod-16 --runtime-version=mine --node-id=a"
    ),
    "create a --zone z --topology v5e:4x4": (
        "gcloud compute tpus queued-resources create a --zone=z "
        "--accelerator-type=v5litepod-16 --runtime-version=v2-alpha-tpuv5-lite --node-id=a"
    ),
    "status a --zone z": "gcloud compute tpus queued-resources describe a --zone=z '--format=value(state.state)'",
    "delete a --zone z": "gcloud compute tpus queued-resources delete a --zone=z --force",
    "ssh a --zone z -- python -V": "gcloud compute tpus tpu-vm ssh a --zone=z --worker=all '--command=python -V'",
    "ssh a --zone z --slices 2 -- python -V": (
        "gcloud compute tpus queued-resources ssh a --zone=z --node=all --worker=all '--command=python -V'"
    ),
    "ssh a --zone z -- sh -c x -- y": (
        "gcloud compute tpus tpu-vm ssh a --zone=z --worker=all '--command=sh -c x -- y'"
    ),
}


def dry(argv):
    ours, remote = cli.cut(argv)
    return queued_resource.gcloud(queued_resource.parser().parse_args(ours), remote)


@pytest.fixture
def gcloud(tmp_path, monkeypatch):
    """A gcloud that notes its arguments, and the only program that can be found."""
    programs, told = tmp_path / "programs", tmp_path / "told.json"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))

    def install(status):
        file = programs / "gcloud"
        source = f"import json, sys\njson.dump(sys.argv[1:], open({str(told)!r}, 'w'))\n"
        file.write_text(f"#!{sys.executable}\n{source}sys.exit({status})\n")
        file.chmod(0o755)
        return told

    return install


@pytest.mark.parametrize("command", GOLDEN)
def test_a_dry_run_prints_what_would_run_and_runs_nothing(command, gcloud, capsys):
    told = gcloud(0)
    action, *rest = command.split()
    queued_resource.main([action, "--dry-run", *rest])
    assert capsys.readouterr().out == GOLDEN[command] + "\n"
    assert not told.exists()


@pytest.mark.parametrize("command", GOLDEN)
def test_what_runs_is_what_the_dry_run_prints(command, gcloud):
    told = gcloud(0)
    queued_resource.main(command.split())
    assert ["gcloud", *json.loads(told.read_text())] == shlex.split(GOLDEN[command])


def test_no_local_shell_sees_the_command(gcloud, tmp_path):
    told, made = gcloud(0), tmp_path / "made"
    words = ["touch", f"{made}; touch {made}", f"$(touch {made})", "it's", "", 'a "b"\n*']
    queued_resource.main(["ssh", "a", "--zone", "z", "--", *words])
    command = json.loads(told.read_text())[-1].removeprefix("--command=")
    assert shlex.split(command) == words
    assert not made.exists()


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0")), min_size=1))
def test_odd_words_arrive_through_both_shells(words):
    """The printed line through ours, and the command in it through that of the VM."""
    call = dry(["ssh", "a", "--zone", "z", "--", *words])
    assert shlex.split(shlex.join(call)) == call
    assert shlex.split(call[-1].removeprefix("--command=")) == words


@pytest.mark.parametrize("topology", TYPES)
def test_accelerator_types(topology):
    assert queued_resource.find_accelerator(topology).type == TYPES[topology]


def test_every_slice_but_those_of_tpu7x_has_a_type_of_its_own():
    slices = [name for name in jobset.known_slices() if not name.startswith("tpu7x")]
    assert len({queued_resource.find_accelerator(name).type for name in slices}) == len(slices) > 30


def test_the_failure_of_gcloud_is_ours(gcloud):
    gcloud(4)
    with pytest.raises(SystemExit) as stop:
        queued_resource.main(["status", "a", "--zone", "z"])
    assert stop.value.code == 4


def test_without_gcloud_it_says_so(refused, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "gcloud is not installed" in refused(queued_resource.main, ["status", "a", "--zone", "z"])


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("create a --zone z --topology tpu7x:2x2x2", "tpu7x comes with GKE only, see launch/pod/jobset.py"),
        ("create a --zone z --topology tpu7x:9x9x9", "tpu7x comes with GKE only"),
        ("create a --zone z --topology v6e:3x3", "--topology v6e:3x3 is none of v4:2x2x1, "),
        ("create a --zone z --topology v6e-32", "--topology v6e-32 is none of"),
        ("create a --zone z", "the following arguments are required: --topology"),
        ("create a --topology v6e:2x2", "the following arguments are required: --zone"),
        ("create a --zone z --topology v6e:2x2 --slices 0", "--slices is 0"),
        ("create a --zone z --topology v6e:2x2 --provisioning cheap", "invalid choice: 'cheap'"),
        ("create A_1 --zone z --topology v6e:2x2", "NAME 'A_1': use lower-case letters"),
        ("ssh a --zone z", "ssh needs a command after --"),
        ("ssh a --zone z python", "unrecognized arguments: python"),
        ("delete a --zone z -- b", "delete takes nothing after --"),
        ("stop a --zone z", "invalid choice: 'stop'"),
        ("", "required: create|status|ssh|delete"),
    ],
)
def test_what_it_refuses(command, line, refused, gcloud):
    told = gcloud(0)
    assert line in refused(queued_resource.main, command.split())
    assert not told.exists()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcloud") is None, reason="gcloud is not installed")
def test_gcloud_itself_knows_every_flag():
    """By its own help, which needs no account."""
    calls: dict[tuple[str, ...], set[str]] = {}
    for line in GOLDEN.values():
        words = shlex.split(line)
        flags = {word.split("=")[0] for word in words if word.startswith("--")}
        calls.setdefault(tuple(words[:5]), set()).update(flags)
    assert len(calls) == 5
    for words, flags in calls.items():
        told = subprocess.run([*words, "--help"], capture_output=True, text=True, check=True).stdout
        plain = re.sub(r"\x1b\[[0-9;]*m", "", told)
        assert flags <= {*re.findall(r"--[a-z-]+", plain), "--project", "--format"}, words
