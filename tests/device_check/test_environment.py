"""What surrounds the devices, in folders that stand for /proc and /tmp."""

import socket

import pytest

from memsearcher_jax.device_check import environment


def verdicts(rows):
    return {row.name: (row.verdict, row.found) for row in rows}


def test_a_fault_of_libtpu_is_its_row(monkeypatch):
    monkeypatch.setattr(environment, "_version", {"jax": "0.10.2", "jaxlib": "0.10.2", "libtpu": "0.0.17"}.get)
    (*_, row) = environment.version_rows("libtpu 0.0.17 is too old")
    assert (row.verdict, row.found, row.way_out) == ("FAILED", "0.0.17", "libtpu 0.0.17 is too old")
    assert verdicts(environment.version_rows(""))["libtpu"] == ("ok", "0.0.17")


def test_a_process_that_holds_a_chip_is_named_and_a_stale_lock_file_too(tmp_path):
    lock_file = tmp_path / "libtpu_lockfile"
    lock_file.touch()
    (row, lock) = environment.holder_rows(tmp_path / "proc", lock_file)
    assert row.passed and lock.passed is False and lock.way_out == f"rm {lock_file}"

    descriptors = tmp_path / "proc" / "4711" / "fd"
    descriptors.mkdir(parents=True)
    (descriptors / "7").symlink_to("/dev/vfio/0")
    (tmp_path / "proc" / "4711" / "cmdline").write_bytes(b"/home/ada/bin/python\0/home/ada/train.py\0--key\0k")
    (row, lock) = environment.holder_rows(tmp_path / "proc", lock_file)
    assert row.passed is False and "process 4711 (python train.py) holds /dev/vfio/0" in row.found
    assert "kill 4711" in row.way_out and lock.way_out == "end the process above"


def test_a_port_that_is_taken_is_shown(monkeypatch):
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        monkeypatch.setattr(environment, "PORTS", {port: "a test"})
        (row,) = environment.port_rows()
    assert row.found == "taken" and row.passed is None and "JAX_COORDINATOR_PORT" in row.way_out


def test_little_memory_fails(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable:    4000000 kB\n")
    found = verdicts(environment.host_rows(tmp_path, meminfo))
    assert found["free host memory"] == ("FAILED", "4 GB") and "free disk" in found


@pytest.mark.parametrize(
    ("accelerator_type", "chips"),
    [
        ("v5litepod-1", 1),
        ("v5litepod-8", 8),
        ("v5litepod-64", 4),
        ("v6e-4", 4),
        ("v6e-64", 4),
        ("v4-8", 4),
        ("v4-32", 4),
        ("v5p-16", 4),
        ("", None),
        ("other-8", None),
    ],
)
def test_the_chips_that_an_environment_names(accelerator_type, chips):
    assert environment.expected_chips({"TPU_ACCELERATOR_TYPE": accelerator_type}) == chips


def test_the_chips_of_a_host_are_those_of_its_bounds():
    variables = {"TPU_CHIPS_PER_HOST_BOUNDS": "2,4,1", "TPU_ACCELERATOR_TYPE": "v6e-64"}
    assert environment.expected_chips(variables) == 8


def test_several_hosts_are_counted_and_not_named():
    (row,) = environment.host_count_rows({"TPU_WORKER_HOSTNAMES": "10.0.0.1,10.0.0.2"})
    assert row.found == "2" and "10.0" not in str(row)
    assert not list(environment.host_count_rows({"TPU_WORKER_HOSTNAMES": "localhost"}))
