"""Stopped, sharded and swept evaluations: no result is lost, and no question is asked twice."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from memsearcher_jax.config import from_dict
from memsearcher_jax.configs.qwen7b import qwen7b
from memsearcher_jax.data.synthetic.encyclopedia import EncyclopediaConfig, make_encyclopedia
from memsearcher_jax.launch import evaluate, sweep
from memsearcher_jax.logs.trajectories import read_log, read_trajectories
from memsearcher_jax.rl import setup
from memsearcher_jax.rl.setup import open_search
from memsearcher_jax.runtime.run_dir import read_run_config
from memsearcher_jax.sft.config import SFTConfig
from memsearcher_jax.sft.search_demonstrator import SearchDemonstrator
from memsearcher_jax.types import StopReason

ENCYCLOPEDIA = make_encyclopedia(EncyclopediaConfig())
FEW = ("--evaluation.max_questions", "12")


class AgentFactory:
    """Makes scripted agents that sometimes answer wrongly, and records the ids of their problems."""

    def __init__(self, stop_after=None):
        self.problem_ids, self.stop_after = [], stop_after

    def __call__(self, problem):
        if len(self.problem_ids) == self.stop_after:
            raise KeyboardInterrupt
        self.problem_ids.append(problem.id)
        return SearchDemonstrator(problem, ENCYCLOPEDIA, SFTConfig(answer_early=0.5), random.Random(problem.id))


def read_all(folder):
    return {
        scored.trajectory.problem.id: scored
        for file in sorted((folder / "trajectories").iterdir())
        for scored in read_trajectories(file)
    }


@pytest.fixture(scope="module")
def uninterrupted(scripted_into, tmp_path_factory):
    """The results and folder of an evaluation without interruption. Read-only: a test that modifies it must copy it."""
    folder = tmp_path_factory.mktemp("uninterrupted") / "out"
    return scripted_into(folder, AgentFactory(), *FEW), folder


def test_a_stopped_evaluation_resumes_with_the_missing_questions(scripted, uninterrupted, tmp_path, capsys):
    result, folder = uninterrupted
    assert 0 < result["metrics"]["exact_match"] < 1
    first, second = AgentFactory(stop_after=5), AgentFactory()
    with pytest.raises(KeyboardInterrupt):
        scripted(first, *FEW)
    stopped = tmp_path / "out"
    (shard,) = (stopped / "trajectories").iterdir()
    with shard.open("ab") as file:  # the process was killed while writing the sixth
        file.write(shard.read_bytes()[:100])
    capsys.readouterr()
    resumed, _ = scripted(second, "--resume")
    assert "evaluate 12/12" in capsys.readouterr().err
    assert len(first.problem_ids) == 5
    assert sorted(first.problem_ids + second.problem_ids) == sorted(read_all(folder))
    assert read_all(stopped) == read_all(folder)
    assert resumed == result

    third = AgentFactory()
    before = shard.read_bytes()
    assert scripted(third, "--resume")[0] == result
    assert third.problem_ids == []
    assert shard.read_bytes() == before


@pytest.mark.slow
def test_a_killed_evaluation_keeps_all_reported_questions(tmp_path):
    """kill -9 with the packaged model, resumed by a second process."""
    out = tmp_path / "out"
    command = [sys.executable, evaluate.__file__, "--out", str(out)]
    flags = ["--config", "tiny_warmstart", "--model.path", "package:tiny", "--evaluation.max_questions", "60"]
    with subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            if line.startswith("evaluate 9/60"):
                os.kill(process.pid, signal.SIGKILL)
                break
    assert process.returncode == -signal.SIGKILL
    (shard,) = (out / "trajectories").iterdir()
    first = list(read_log(shard))
    assert 9 <= len(first) < 60
    done = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    counted = [int(number) for number in re.findall(r"^evaluate (\d+)/60", done.stderr, re.MULTILINE)]
    assert len(first) <= counted[0] <= counted[-1] == 60
    trajectories = list(read_trajectories(shard))
    assert trajectories[: len(first)] == first
    assert len({scored.trajectory.problem.id for scored in trajectories}) == len(trajectories) == 60
    assert json.loads((out / "results.json").read_text())["questions"] == 60


def test_hosts_share_the_questions_and_the_last_host_writes_the_results(scripted, uninterrupted, capsys):
    result, folder = uninterrupted
    hosts = [AgentFactory() for _ in range(4)]
    assert scripted(hosts[0], *FEW, "--shard", "0/3")[0] is None
    assert "shard 0/3 is done; 8 questions of other shards are missing" in capsys.readouterr().out
    assert scripted(hosts[1], "--resume", "--shard", "1/3")[0] is None
    resumed, shared = scripted(hosts[2], "--resume", "--shard", "2/3")
    assert [len(host.problem_ids) for host in hosts] == [4, 4, 4, 0]
    assert len({id for host in hosts for id in host.problem_ids}) == 12
    assert [path.name for path in sorted((shared / "trajectories").iterdir())] == [
        f"shard_000{number}.jsonl.gz" for number in range(3)
    ]
    assert read_all(shared) == read_all(folder)
    assert resumed == result


def test_an_evaluation_resumes_with_another_number_of_hosts(scripted, uninterrupted, tmp_path):
    """The file of a former host may end in a torn line."""
    result, folder = uninterrupted
    scripted(AgentFactory(), *FEW, "--shard", "0/3")
    scripted(AgentFactory(), "--resume", "--shard", "2/3")
    shard = tmp_path / "out" / "trajectories" / "shard_0002.jsonl.gz"
    shard.write_bytes(shard.read_bytes()[:-7])
    last = AgentFactory()
    resumed, shared = scripted(last, "--resume")
    assert len(last.problem_ids) == 5
    assert resumed == result
    assert read_all(shared) == read_all(folder)


def test_unexpected_trajectory_files_are_errors(uninterrupted, tmp_path, refused):
    folder = shutil.copytree(uninterrupted[1], tmp_path / "out")
    shard = folder / "trajectories" / "shard_0000.jsonl.gz"
    before = shard.read_bytes()
    shard.write_bytes(before * 2)
    error = refused(evaluate.main, ["--resume", "--out", folder])
    assert "was answered before: start another evaluation" in error
    shard.write_bytes(before)
    shard.with_name("shard_x.jsonl.gz").write_bytes(before)
    error = refused(evaluate.main, ["--resume", "--out", folder])
    assert "shard_x.jsonl.gz: an evaluation's files are named shard_0012.jsonl.gz" in error


def test_a_sweep_has_a_folder_per_value_and_a_table(scripted, uninterrupted, tmp_path, capsys, refused, snapshot):
    flags = (*FEW, "--sweep", "agent.memory_tokens=3,32", "--json", tmp_path / "x.json")
    _, folder = scripted(AgentFactory(), *flags, out="sweep")
    output = capsys.readouterr().out
    assert re.search(r"\n3 +12 ", output)
    assert f"{folder}: 2 evaluations; table and plot in {folder / 'sweep.html'}" in output
    names = {value: f"agent.memory_tokens={value}" for value in ("3", "32")}
    sweep_result = json.loads((folder / "sweep.json").read_text())
    assert json.loads((tmp_path / "x.json").read_text()) == sweep_result
    assert (sweep_result["setting"], sweep_result["values"]) == ("agent.memory_tokens", ["3", "32"])
    for value, row in zip(("3", "32"), sweep_result["table"], strict=True):
        assert read_run_config(folder / names[value]).agent.memory_tokens == int(value)
        result = json.loads((folder / names[value] / "results.json").read_text())
        assert row["scores"] == result["evaluation"]["macro"]["scores"]
        assert row["tokens_per_turn"] == pytest.approx(result["metrics"]["tokens_per_turn"])
        assert row["questions"] == 12
    low, high = sweep_result["table"]
    assert low["tokens_per_turn"] < high["tokens_per_turn"]
    assert high["scores"] == uninterrupted[0]["evaluation"]["macro"]["scores"]  # 32 is the value of the preset

    # A resumed sweep evaluates only what is missing: here, a value.
    (folder / names["32"] / "trajectories" / "shard_0000.jsonl.gz").unlink()
    resumed = AgentFactory()
    scripted(resumed, "--resume", out="sweep")
    assert len(resumed.problem_ids) == 12
    assert json.loads((folder / "sweep.json").read_text()) == sweep_result
    before = snapshot(folder)
    for flags, line in (
        ("--sweep agent.memory_tokens=3,64", "sweeps agent.memory_tokens=3,32: omit --sweep"),
        ("--agent.completion_tokens 41", "agent.completion_tokens is 40 in"),
        ("--shard 0/2", "--shard and --sweep exclude each other"),
    ):
        assert line in refused(evaluate.main, ["--resume", "--out", folder, *flags.split()])
    assert "holds no sweep" in refused(
        evaluate.main, ["--resume", "--out", uninterrupted[1], "--sweep", "agent.memory_tokens=3,32"]
    )
    assert snapshot(folder) == before


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--benchmarks nq,quiz --data.root .", "--benchmarks: no benchmark 'quiz': choose from nq, triviaqa"),
        ("--benchmarks nq,nq --data.root {root}", "--benchmarks: nq is listed twice"),
        ("--benchmarks nq", "set data.root to the folder that holds nq/test.jsonl"),
        ("--benchmarks nq:night --data.root {root}", "nq has no split night"),
        ("--benchmarks hotpotqa --data.root {root}", "hotpotqa/dev.jsonl: no such file"),
        ("--benchmarks nq --data x --data.root .", "--data and --benchmarks exclude each other"),
        ("--shard 2/2 --out x", "--shard 2/2: write K/N with K from 0 to N - 1"),
        ("--shard 3/2 --out x", "--shard 3/2: write K/N"),
        ("--shard 2 --out x", "--shard 2: write K/N"),
        ("--shard 0/2", "--shard needs --out"),
        ("--shard 0/2 --out x --sweep seed=1,2", "--shard and --sweep exclude each other"),
        ("--sweep agent.memory_tokens", "write SETTING=A,B,..."),
        ("--sweep agent.memory_tokens=3,,4", "write SETTING=A,B,..."),
        ("--sweep agent.memory=3", "no setting '--agent.memory': did you mean"),
        ("--sweep agent.memory_tokens=3,3", "duplicate value 3"),
        ("--sweep agent.memory_tokens=3,many", "agent.memory_tokens is 'many': it must be of type int"),
        ("--sweep agent.memory_tokens=3,-1", "agent.memory_tokens is -1: it must be at least 0"),
        ("--sweep agent.workflow=react,chat", "agent.workflow is 'chat': it must be one of"),
        ("--evaluation.in_distribution quiz", "evaluation.in_distribution: 'quiz' is no benchmark"),
        ("--workflow chat", "--workflow"),
        ("--workflow rag --agent.prompts mine", "agent.prompts 'mine' is not a packaged set"),
    ],
)
def test_invalid_flags_are_errors(flags, line, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nq").mkdir()
    (tmp_path / "nq" / "test.jsonl").write_text('{"id": "1", "question": "q", "golden_answers": ["a"]}\n')
    given = ["--config", "tiny_warmstart", "--model.path", "package:tiny", *flags.format(root=tmp_path).split()]
    assert line in refused(evaluate.main, given)
    assert {path.name for path in tmp_path.iterdir()} == {"nq"}


def test_a_sweep_of_the_budget_fits_the_context_of_7b(shared):
    """All values are checked before the first evaluation, and all get the longest context of them."""
    preset = qwen7b()
    config = replace(preset, model=replace(preset.model, tokenizer=str(shared / "tokenizer/qwen2.5")))
    budgets = ("512", "1024", "2048")
    configs = sweep.with_values(config, sweep.Sweep("agent.memory_tokens", budgets))
    assert [one.agent.memory_tokens for one in configs.values()] == [512, 1024, 2048]
    (context,) = {one.sampling.context_tokens for one in configs.values()}
    assert preset.sampling.context_tokens < context <= preset.model.max_positions
    tokenizer = setup.open_tokenizer(config.model)
    for one in configs.values():
        setup.open_prompts(one, tokenizer)
    unchanged = sweep.with_values(config, sweep.Sweep("agent.memory_tokens", budgets[:2]))
    assert {one.sampling.context_tokens for one in unchanged.values()} == {preset.sampling.context_tokens}
    with pytest.raises(ValueError, match=r"more than model.max_positions"):
        sweep.with_values(config, sweep.Sweep("agent.memory_tokens", ("512", "40000")))


class FailingIndex:
    """Refuses every second call."""

    def __init__(self, searcher):
        self.searcher, self.calls = searcher, 0

    def search(self, queries, top_n):
        self.calls += 1
        if self.calls % 2:
            raise ConnectionError("refused")
        return self.searcher.search(queries, top_n)


def test_lost_questions_are_counted_apart_and_asked_again(scripted, uninterrupted, monkeypatch, capsys):
    result, folder = uninterrupted
    first, second = AgentFactory(), AgentFactory()
    with monkeypatch.context() as patch:
        patch.setattr(setup, "open_search", lambda *args: FailingIndex(open_search(*args)))
        broken, stopped = scripted(first, *FEW)
    lost = [id for id, one in read_all(stopped).items() if one.trajectory.outcome.stop is StopReason.SEARCH_FAILED]
    assert 0 < len(lost) < 12
    assert (broken["questions"], broken["lost"]) == (12 - len(lost), len(lost))
    benchmark = broken["evaluation"]["benchmarks"]["encyclopedia"]
    assert (benchmark["questions"], benchmark["lost"]) == (12 - len(lost), len(lost))
    assert f"{len(lost)} questions were lost to faults" in capsys.readouterr().out
    resumed, _ = scripted(second, "--resume")
    assert sorted(second.problem_ids) == sorted(lost)
    assert resumed == result
    assert read_all(stopped) == read_all(folder)


def test_settings_of_every_type_can_be_swept():
    config = from_dict({})
    for setting, text, value in (
        ("agent.memory_tokens", "512", 512),
        ("evaluation.temperature", "1", 1.0),
        ("agent.carry_memory", "False", False),
        ("retrieval.method", "bm25", "bm25"),
        ("evaluation.in_distribution", '["nq"]', ("nq",)),
    ):
        section, name = setting.split(".")
        assert getattr(getattr(sweep.with_value(config, setting, text), section), name) == value
    agent = sweep.with_value(config, "agent.workflow", "rag").agent
    assert (agent.workflow, agent.prompts) == ("rag", "rag")
    assert sweep.Sweep("model.path", ("a/b",)).folder("a/b") == "model.path=a_b"
