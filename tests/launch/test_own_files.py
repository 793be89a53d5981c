"""Agents, rewards and tools of a user's own in commands; the copy in a run is never executed."""

import io
import json
import shutil
from pathlib import Path

import pytest

from memsearcher_jax.launch import ask, evaluate, export_hf, report, tpu_train
from memsearcher_jax.logs.trajectories import read_trajectories, step_path
from tests.support import with_flags

AGENT = '''
from memsearcher_jax.agent import protocol
from memsearcher_jax.types import *

print("executed", __file__)


def my_agent(question, *, config, prompts, token_counter):
    """Looks a number up, then answers."""
    result = yield Call("double", {"number": 4})
    reply = yield Generate(prompts.initial_prompt(question, result.text), config.completion_tokens)
    stop, answer = protocol.final_answer(reply)
    return Outcome(stop, answer, (Turn(result.text, reply.text),))
'''
REWARD = """
def my_reward(trajectories):
    return [len(one.outcome.turns[0].reply) / 100 for one in trajectories]
"""
TOOLS = '''
def double(number: int) -> int:
    """Doubles a number."""
    return 2 * number
'''
OWN = ["--agent.workflow", "my_agent.py", "--reward.function", "my-reward.py", "--agent.tools", "my_tools.py"]


@pytest.fixture
def workdir(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, text in (("my_agent", AGENT), ("my-reward", REWARD), ("my_tools", TOOLS), ("broken", "\n1 / 0\n")):
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


@pytest.mark.parametrize("setting", ["agent.workflow", "reward.function", "agent.tools"])
def test_a_broken_file_is_one_line(setting, workdir, refused):
    line = refused(tpu_train.main, ["--config", "nano", f"--{setting}", "broken.py"])
    assert line == f"error: {setting} {workdir}/broken.py: ZeroDivisionError: division by zero (broken.py, line 2)"
    assert "no such file" in refused(tpu_train.main, ["--config", "nano", f"--{setting}", "none.py"])
    agent = "from memsearcher_jax.agent.react import *\nclass broken(ReAct):\n    def check(self):\n        {}[1]\n"
    (workdir / "broken.py").write_text(agent)
    line = refused(tpu_train.main, ["--config", "nano", "--agent.workflow", "broken.py"])
    assert line == "error: KeyError: 1 (broken.py, line 4)"


@pytest.mark.slow
def test_a_run_of_ones_own_code_is_opened_only_with_the_same_code(small, workdir, refused, capsys, monkeypatch):
    tpu_train.main([*with_flags(small, "--rl.steps", "1"), *OWN, "--out", "run"])
    (first, *_) = read_trajectories(step_path("run", 0))
    assert [result.text for result in first.trajectory.tool_results] == ["8"]
    assert first.reward == len(first.trajectory.outcome.turns[0].reply) / 100 and "exact_match" in first.scores
    inputs = json.loads((workdir / "run" / "inputs.json").read_text())
    assert {Path(name).name for name in inputs["hashes"]} == {"my_agent.py", "my-reward.py", "my_tools.py"}
    assert all((workdir / "run" / copy).is_file() for copy in inputs["copies"].values())

    capsys.readouterr()
    again = ["--resume", "--out", "run", "--rl.steps", "2"]
    opened = [(tpu_train, again), (evaluate, ["--checkpoint", "run"]), (ask, ["--checkpoint", "run", "Who?"])]
    for program, flags in opened:
        line = refused(program.main, flags)
        assert f"run was made with --agent.workflow {workdir}/my_agent.py: give --agent.workflow again" in line
    assert "executed" not in capsys.readouterr().out
    report.main(["run"])
    export_hf.main(["--checkpoint", "run", "--out", "exported", *OWN])
    assert str(workdir) not in (workdir / "exported" / "memsearcher.json").read_text()

    moved = workdir / "moved"
    moved.mkdir()
    for name in ("my_agent.py", "my-reward.py", "my_tools.py"):
        shutil.move(workdir / name, moved / name)
    own = [word if word.startswith("--") else f"moved/{word}" for word in OWN]
    tpu_train.main([*again, *own])
    evaluate.main(["--checkpoint", "run", *own, "--out", "evaluation", "--json", "x.json"])
    assert json.loads(Path("x.json").read_text())["questions"] == 4
    (moved / "my_tools.py").write_text(TOOLS.replace("2 *", "3 *"))
    line = refused(evaluate.main, ["--checkpoint", "run", *own])
    assert "--agent.tools moved/my_tools.py differs from the file that run was made with" in line
    replayed = [word for word in own if "tools" not in word]
    evaluate.main(["--checkpoint", "run", *replayed, "--agent.replay", "run", "--out", "replayed"])
    log = workdir / "replayed" / "trajectories" / "host_0000.jsonl.gz"
    assert {one.trajectory.tool_results[0].text for one in read_trajectories(log)} == {"8"}


def test_a_person_can_play_an_agent_with_tools(workdir, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("I know.</think> \\boxed{Ada}\n\n"))
    (workdir / "my_agent.py").write_text(AGENT.replace("    stop,", "    yield Generate((), 4)\n    stop,"))
    ask.main(["--config", "nano", "--human", "Who?", *OWN])
    played = capsys.readouterr().out
    assert "double" in played and "number=4" in played and "Ada" in played and "turn begins after <think>" in played
    monkeypatch.setattr("sys.stdin", io.StringIO("<answer>Ada</answer>\n\n"))
    ask.main(["--config", "nano", "--human", "Who?", "--agent.workflow", "search_r1"])
    assert "turn begins" not in capsys.readouterr().out, "whose policy opens its thoughts itself"
