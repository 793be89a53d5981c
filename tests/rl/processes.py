"""Starts the processes of tests with several hosts."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def run_hosts(script: Path, processes: int, *arguments: object, environment: Mapping[str, str] = {}) -> None:
    """Runs `script PORT PROCESS *arguments` in several processes; all must succeed."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    root = script.parents[2]
    own = {"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin", "XLA_FLAGS": os.environ["XLA_FLAGS"]}
    hosts = [
        subprocess.Popen(
            [sys.executable, script, *map(str, (port, process, *arguments))],
            cwd=root,
            env={**environment, **own},
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(processes)
    ]
    try:
        for host in hosts:
            _, stderr = host.communicate(timeout=500)
            assert host.returncode == 0, stderr[-5_000:]
    finally:
        for host in hosts:
            host.kill()
