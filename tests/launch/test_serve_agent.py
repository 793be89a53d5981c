"""launch/serve_agent.py: wrong flags are one line, and the program starts, answers and stops on SIGTERM."""

import importlib.util
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


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--port 70000", "--port is 70000: it must be at least 0 and at most 65,535"),
        ("--limits.request_timeout nan", "--limits.request_timeout is nan: it must be above 0"),
        ("--api_key_env NO_SUCH_KEY", "--api_key_env: the environment holds no variable of that name"),
        ("--host no.such.host.invalid --port 0", "cannot listen on no.such.host.invalid:0"),
        ("--retrieval.corpus none.jsonl --port 0", "none.jsonl: no such file"),
    ],
)
def test_invalid_flags_are_errors(flags, line, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert line in refused(serve_agent.main, [*TINY, *flags.split()])
    assert list(tmp_path.iterdir()) == []


def test_what_is_missing_is_named(refused, tmp_path):
    assert "--checkpoint is missing: give a run directory" in refused(serve_agent.main, [])
    weights = ["--config", "qwen7b", "--checkpoint", tmp_path]
    assert "needs --retrieval.index DIR or --retrieval.corpus FILE" in refused(serve_agent.main, weights)
    memory = ["--config", "tiny_memalpha", "--checkpoint", tmp_path, "--memalpha.answer_from", "rag"]
    assert "questions are answered from the memory: omit memalpha.answer_from" in refused(serve_agent.main, memory)


def test_the_error_without_a_dependency_names_the_extra(refused, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "mcp" else real(name))
    assert "mcp is not installed: pip install 'memsearcher_jax[serve]'" in refused(serve_agent.main, TINY)


@pytest.mark.slow
def test_the_program_answers_until_sigterm(fast_compile, tmp_path):
    command = [sys.executable, serve_agent.__file__, *TINY, "--port", "0", "--sampling.slots", "8", "--name", "small"]
    root = Path(serve_agent.__file__).resolve().parents[1]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=root) as process:
        try:
            line = process.stderr.readline()
            assert line.startswith("serving the agent small at http://127.0.0.1:"), line + process.stderr.read()
            body = {"model": "small", "messages": [{"role": "user", "content": "Who is the mayor?"}]}
            request = urllib.request.Request(
                f"{line.split()[-1]}/v1/chat/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=60) as response:
                assert json.load(response)["choices"][0]["message"]["memsearcher"]["stop"]
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
            assert process.stderr.read() == "stopped\n"
        finally:
            process.kill()
