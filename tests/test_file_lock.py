"""Locks between processes. Two descriptors of one process exclude each other as those of two processes do."""

import subprocess
import sys
import threading
import time

import pytest

from memsearcher_jax.file_lock import locked


def test_one_process_at_a_time_holds_the_lock(tmp_path):
    file = tmp_path / "lock"
    with locked(file, "busy"), pytest.raises(ValueError, match="busy"), locked(file, "busy"):
        pass
    assert not file.exists()
    with locked(file, "busy"):
        pass


TURNS = """
import sys
from pathlib import Path
from memsearcher_jax import file_lock
file_lock.POLL_SECONDS = 0.0001
for _ in range(3_000):
    with file_lock.locked(Path(sys.argv[1], "lock"), "busy", wait=60):
        pass
"""


def test_processes_take_turns(tmp_path):
    """Often one looks for the file just when another removes it."""
    processes = [subprocess.Popen([sys.executable, "-c", TURNS, tmp_path]) for _ in range(4)]
    assert [process.wait() for process in processes] == [0] * 4


def test_a_process_waits_for_the_lock_although_its_file_is_removed(tmp_path):
    file, order = tmp_path / "lock", []

    def second():
        with locked(file, "busy", wait=30):
            order.append("second")
            assert file.exists()

    thread = threading.Thread(target=second)
    with locked(file, "busy"):
        thread.start()
        time.sleep(0.2)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
