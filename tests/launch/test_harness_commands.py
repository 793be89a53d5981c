"""Commands with an agent of another framework."""

import json
import subprocess
import sys

import pytest

from memsearcher_jax.launch import ask, evaluate, plan_tpu, sweep, tpu_train
from memsearcher_jax.logs.metrics import read_metrics
from tests.support import SMALL_RUN, with_flags

HARNESS = """
async def my_agent(problem, client):
    headers = {"Authorization": "Bearer " + client.api_key}
    body = {"model": client.model, "messages": [{"role": "user", "content": problem.question}]}
    reply = await client.http_client.post(client.base_url + "/chat/completions", headers=headers, json=body)
    return reply.raise_for_status().json()["choices"][0]["message"]["content"]
"""


@pytest.mark.slow
def test_all_commands_take_a_harness(tmp_path, fast_compile):
    file = tmp_path / "my_agent.py"
    file.write_text(HARNESS)
    harness = ["--agent.harness", str(file)]
    run = tmp_path / "run"

    def command(module, *words):
        done = subprocess.run([sys.executable, module.__file__, *words, *harness], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    command(tpu_train, *with_flags(SMALL_RUN.split(), "--rl.steps", "1"), "--out", str(run))
    (step,) = read_metrics(run / "metrics.jsonl")
    assert step["requests"] == step["contexts"] == 1

    command(evaluate, "--checkpoint", str(run), "--out", str(tmp_path / "test"))
    results = json.loads((tmp_path / "test" / "results.json").read_text())
    assert results["evaluation"]["averages"]["macro"]

    assert command(ask, "--checkpoint", str(run), "Who?")

    values = ["--evaluate", "--setting", "evaluation.temperature=0,1", "--out", str(tmp_path / "sweep")]
    command(sweep, *values, "--", "--checkpoint", str(run))
    table = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["table"]
    assert [row["questions"] for row in table] == [4, 4]

    plan = command(plan_tpu, "--config", "qwen3_0b6", "--topology", "h100:1")
    assert "what the harness does between its requests is not counted" in plan
