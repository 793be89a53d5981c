"""benchmarks/service.py with few clients: it starts the service, sends requests and measures latencies."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "service.py"


@pytest.mark.slow
def test_concurrent_clients_have_no_errors():
    flags = ["--clients", "16", "--seconds", "3"]
    done = subprocess.run([sys.executable, BENCHMARK, *flags], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    numbers = {name: float(value.replace(",", "")) for name, value in map(str.split, done.stdout.splitlines())}
    assert numbers["errors"] == 0 and numbers["requests"] > 16
    assert 0 < numbers["p50"] <= numbers["p90"] <= numbers["p99"] <= numbers["max_latency"]


@pytest.mark.slow
def test_a_failed_service_start_is_an_error():
    flags = ["--seconds", "1", "--serve=--retrieval.corpus none.jsonl"]
    done = subprocess.run([sys.executable, BENCHMARK, *flags], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "error: none.jsonl: no such file\n"
