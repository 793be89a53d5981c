"""launch/serve_agent.py: wrong flags are one line, and the program starts, answers and stops on SIGTERM."""

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from memsearcher_jax.launch import serve_agent
from memsearcher_jax.runtime.run_dir import located

TINY = ["--config", "tiny", "--checkpoint", str(located("package:tiny")), "--retrieval.index_type", "exact"]


@pytest.mark.slow
def test_the_program_answers_until_sigterm(fast_compile, tmp_path):
    command = [sys.executable, serve_agent.__file__, *TINY, "--port", "0", "--sampling.slots", "8", "--name", "small"]
    root = Path(serve_agent.__file__).resolve().parents[1]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=root) as process:
        try:
            line = process.stderr.readline()
            assert line.startswith("serving the agent small at http://127.0.0.1:"), line + process.stderr.read()
            body = {"model": "small", "messages": [{"role": "user", "content": "Who is the mayor?"}]}
            url, sent = f"{line.split()[-1]}/v1/chat/completions", json.dumps(body).encode()
            request = urllib.request.Request(url, sent, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as response:
                assert json.load(response)["choices"][0]["message"]["memsearcher"]["stop"]
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
            assert process.stderr.read() == "stopped\n"
        finally:
            process.kill()
