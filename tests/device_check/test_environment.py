"""What surrounds the devices, in folders that stand for /proc and /tmp."""

import os
import socket

from memsearcher_jax.device_check import environment


def verdicts(rows):
    return {row.name: (row.verdict, row.found) for row in rows}


def test_an_older_libtpu_than_jax_requires_fails(monkeypatch):
    monkeypatch.setattr(environment, "_version", {"jax": "0.10.2", "jaxlib": "0.10.2", "libtpu": "0.0.17"}.get)
    monkeypatch.setattr(environment, "required_libtpu", lambda: "==0.0.42.*")
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    assert verdicts(environment.version_rows())["libtpu"] == ("FAILED", "0.0.17")
    monkeypatch.setattr(environment, "_version", {"jax": "0.10.2", "jaxlib": "0.10.2", "libtpu": "0.0.42.1"}.get)
    assert verdicts(environment.version_rows())["libtpu"] == ("ok", "0.0.42.1")


def test_a_libtpu_of_the_image_fails(monkeypatch):
    monkeypatch.setenv("TPU_LIBRARY_PATH", "/usr/lib/libtpu.so")
    assert verdicts(environment.version_rows())["TPU_LIBRARY_PATH"] == ("FAILED", "/usr/lib/libtpu.so")


def test_a_process_that_holds_a_chip_is_named_and_a_stale_lock_file_too(tmp_path):
    lock_file = tmp_path / "libtpu_lockfile"
    lock_file.touch()
    (row, lock) = environment.holder_rows(tmp_path / "proc", lock_file)
    assert row.passed and lock.passed is False and lock.way_out == f"rm {lock_file}"

    descriptors = tmp_path / "proc" / "4711" / "fd"
    descriptors.mkdir(parents=True)
    (descriptors / "7").symlink_to("/dev/vfio/0")
    (tmp_path / "proc" / "4711" / "cmdline").write_bytes(b"python\0train.py\0")
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


def test_the_chips_that_an_environment_names():
    assert environment.expected_chips({"TPU_CHIPS_PER_HOST_BOUNDS": "2,4,1"}) == 8
    assert environment.expected_chips({"TPU_ACCELERATOR_TYPE": "v5litepod-8"}) == 8
    assert environment.expected_chips({"TPU_ACCELERATOR_TYPE": "v5litepod-64"}) is None, "of several hosts"
    assert environment.expected_chips(os.environ | {"TPU_ACCELERATOR_TYPE": ""}) is None
