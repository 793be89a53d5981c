"""An evaluation that is stopped, or shared by hosts, or one of a sweep: nothing is lost, nothing is asked twice."""

import json
import os
import random
import re
import signal
import subprocess
import sys

import evaluate
import pytest
import sweep

from memsearcher_jax.config import from_dict
from memsearcher_jax.data.demonstrator import Demonstrator, Errors
from memsearcher_jax.data.world import WorldConfig, make_world
from memsearcher_jax.report.trajectories import read_trajectories
from memsearcher_jax.report.trajectory_log import read_log
from memsearcher_jax.rl.run_folder import read_run_config

WORLD = make_world(WorldConfig())
FEW = ("--evaluation.questions", "12")


class Examiner:
    """Makes the world's scripted agents, which err here and there, and keeps the ids of those that it was asked for."""

    def __init__(self, stop_after=None):
        self.asked, self.stop_after = [], stop_after

    def __call__(self, problem):
        if len(self.asked) == self.stop_after:
            raise KeyboardInterrupt
        self.asked.append(problem.id)
        return Demonstrator(problem, WORLD, Errors(answer_early=0.5), random.Random(problem.id))


def kept(folder):
    return {
        one.trajectory.problem.id: one
        for part in sorted((folder / "trajectories").iterdir())
        for one in read_trajectories(part)
    }


@pytest.fixture
def whole(scripted):
    """The evaluation that nobody stopped."""
    return scripted(Examiner(), *FEW, out="whole")


def test_a_stopped_evaluation_goes_on_with_what_is_missing(scripted, whole, capsys):
    result, folder = whole
    assert 0 < result["metrics"]["exact_match"] < 1
    first, second = Examiner(stop_after=5), Examiner()
    with pytest.raises(KeyboardInterrupt):
        scripted(first, *FEW)
    stopped = folder.with_name("out")
    (part,) = (stopped / "trajectories").iterdir()
    with part.open("ab") as file:  # killed in the midst of the sixth
        file.write(part.read_bytes()[:100])
    capsys.readouterr()
    again, _ = scripted(second, "--resume")
    assert "evaluate 12/12" in capsys.readouterr().err
    assert len(first.asked) == 5
    assert sorted(first.asked + second.asked) == sorted(kept(folder))
    assert kept(stopped) == kept(folder)
    assert again == result

    third = Examiner()
    before = part.read_bytes()
    assert scripted(third, "--resume")[0] == result
    assert third.asked == []
    assert part.read_bytes() == before


@pytest.mark.slow
def test_a_killed_process_has_lost_nothing_that_it_had_told(tmp_path):
    """The real model, kill -9, and a second process that goes on."""
    out = tmp_path / "out"
    command = [sys.executable, evaluate.__file__, "--out", str(out)]
    fresh = ["--config", "tiny_warmstart", "--model.path", "package:tiny", "--evaluation.questions", "60"]
    with subprocess.Popen([*command, *fresh], stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            if line.startswith("evaluate 9/60"):
                os.kill(process.pid, signal.SIGKILL)
                break
    assert process.returncode == -signal.SIGKILL
    (part,) = (out / "trajectories").iterdir()
    first = list(read_log(part))
    assert 9 <= len(first) < 60
    done = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    counted = [int(number) for number in re.findall(r"^evaluate (\d+)/60", done.stderr, re.MULTILINE)]
    assert len(first) <= counted[0] <= counted[-1] == 60
    everything = list(read_trajectories(part))
    assert everything[: len(first)] == first
    assert len({one.trajectory.problem.id for one in everything}) == len(everything) == 60
    assert json.loads((out / "results.json").read_text())["questions"] == 60


def test_hosts_share_the_questions_and_the_last_one_merges(scripted, whole, capsys):
    result, folder = whole
    hosts = [Examiner() for _ in range(4)]
    assert scripted(hosts[0], *FEW, "--share", "1/3")[0] is None
    assert "share 1/3 is done; 8 questions of other shares are missing" in capsys.readouterr().out
    assert scripted(hosts[1], "--resume", "--share", "2/3")[0] is None
    again, shared = scripted(hosts[2], "--resume", "--share", "3/3")
    assert [len(host.asked) for host in hosts] == [4, 4, 4, 0]
    assert len({id for host in hosts for id in host.asked}) == 12
    assert [path.name for path in sorted((shared / "trajectories").iterdir())] == [
        f"part_000{number}.jsonl.gz" for number in range(3)
    ]
    assert kept(shared) == kept(folder)
    assert again == result


def test_another_number_of_hosts_may_go_on(scripted, whole):
    """Also where a host that is gone has left a torn line."""
    result, folder = whole
    scripted(Examiner(), *FEW, "--share", "1/3")
    scripted(Examiner(), "--resume", "--share", "3/3")
    part = folder.with_name("out") / "trajectories" / "part_0002.jsonl.gz"
    part.write_bytes(part.read_bytes()[:-7])
    last = Examiner()
    again, shared = scripted(last, "--resume")
    assert len(last.asked) == 5
    assert again == result
    assert kept(shared) == kept(folder)


def test_what_stands_there_must_be_of_these_questions(scripted, whole, refused):
    _, folder = whole
    part = folder / "trajectories" / "part_0000.jsonl.gz"
    before = part.read_bytes()
    part.write_bytes(before * 2)
    said = refused(evaluate.main, ["--resume", "--out", folder])
    assert "was answered before: start another evaluation" in said
    part.write_bytes(before)
    part.with_name("part_x.jsonl.gz").write_bytes(before)
    said = refused(evaluate.main, ["--resume", "--out", folder])
    assert "part_x.jsonl.gz: an evaluation's files are named part_0012.jsonl.gz" in said


def test_a_sweep_is_a_folder_for_each_value_and_one_table(scripted, whole, tmp_path, capsys, refused, untouched):
    flags = (*FEW, "--sweep", "agent.memory_tokens=3,32", "--json", tmp_path / "x.json")
    _, folder = scripted(Examiner(), *flags, out="sweep")
    said = capsys.readouterr().out
    assert re.search(r"\n3 +12 ", said)
    assert f"{folder}: 2 evaluations; table and plot in {folder / 'sweep.html'}" in said
    names = {value: f"agent.memory_tokens={value}" for value in ("3", "32")}
    told = json.loads((folder / "sweep.json").read_text())
    assert json.loads((tmp_path / "x.json").read_text()) == told
    assert (told["setting"], told["values"]) == ("agent.memory_tokens", ["3", "32"])
    for value, row in zip(("3", "32"), told["table"], strict=True):
        assert read_run_config(folder / names[value]).agent.memory_tokens == int(value)
        result = json.loads((folder / names[value] / "results.json").read_text())
        assert row["scores"] == result["evaluation"]["macro"]["scores"]
        assert row["tokens_per_turn"] == pytest.approx(result["metrics"]["tokens_per_turn"])
        assert row["questions"] == 12
    low, high = told["table"]
    assert low["tokens_per_turn"] < high["tokens_per_turn"]
    assert high["scores"] == whole[0]["evaluation"]["macro"]["scores"]  # 32 is the preset's own

    # It goes on where it was stopped: here, one value is gone.
    (folder / names["32"] / "trajectories" / "part_0000.jsonl.gz").unlink()
    again = Examiner()
    scripted(again, "--resume", out="sweep")
    assert len(again.asked) == 12
    assert json.loads((folder / "sweep.json").read_text()) == told
    before = untouched(folder)
    for flags, line in (
        ("--sweep agent.memory_tokens=3,64", "sweeps agent.memory_tokens=3,32: leave --sweep out"),
        ("--agent.reply_tokens 41", "agent.reply_tokens was 40 when"),
        ("--share 1/2", "--share and --sweep do not go together"),
    ):
        assert line in refused(evaluate.main, ["--resume", "--out", folder, *flags.split()])
    assert "holds no sweep" in refused(
        evaluate.main, ["--resume", "--out", whole[1], "--sweep", "agent.memory_tokens=3,32"]
    )
    assert untouched(folder) == before


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--benchmarks nq,quiz --data.root .", "--benchmarks: 'quiz' is no benchmark: choose from nq, triviaqa"),
        ("--benchmarks nq,nq --data.root {root}", "--benchmarks names nq twice"),
        ("--benchmarks nq", "set data.root to the folder that holds nq/test.jsonl"),
        ("--benchmarks nq:night --data.root {root}", "nq has no questions for night"),
        ("--benchmarks hotpotqa --data.root {root}", "hotpotqa/dev.jsonl: no such file"),
        ("--benchmarks nq --data x --data.root .", "--data and --benchmarks both say what to ask"),
        ("--share 0/2 --out x", "--share 0/2: write K/N with K from 1 to N"),
        ("--share 3/2 --out x", "--share 3/2: write K/N"),
        ("--share 2 --out x", "--share 2: write K/N"),
        ("--share 1/2", "--share needs --out"),
        ("--share 1/2 --out x --sweep seed=1,2", "--share and --sweep do not go together"),
        ("--sweep agent.memory_tokens", "write SETTING=A,B,..."),
        ("--sweep agent.memory_tokens=3,,4", "write SETTING=A,B,..."),
        ("--sweep agent.memory=3", "no setting '--agent.memory': did you mean"),
        ("--sweep agent.memory_tokens=3,3", "3 stands there twice"),
        ("--sweep agent.memory_tokens=3,many", "agent.memory_tokens is 'many': it must be of type int"),
        ("--sweep agent.memory_tokens=3,-1", "agent.memory_tokens is -1: it must be at least 0"),
        ("--sweep agent.workflow=react,chat", "agent.workflow is 'chat': it must be one of"),
        ("--evaluation.in_distribution quiz", "evaluation.in_distribution: 'quiz' is no benchmark"),
        ("--workflow chat", "--workflow"),
        ("--workflow rag --agent.prompts mine", "agent.prompts 'mine' is a set of your own"),
    ],
)
def test_what_cannot_be_evaluated(flags, line, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nq").mkdir()
    (tmp_path / "nq" / "test.jsonl").write_text('{"id": "1", "question": "q", "golden_answers": ["a"]}\n')
    given = ["--config", "tiny_warmstart", "--model.path", "package:tiny", *flags.format(root=tmp_path).split()]
    assert line in refused(evaluate.main, given)
    assert {path.name for path in tmp_path.iterdir()} == {"nq"}


def test_settings_of_every_kind_can_be_swept():
    config = from_dict({})
    for setting, text, value in (
        ("agent.memory_tokens", "512", 512),
        ("evaluation.temperature", "1", 1.0),
        ("agent.remember", "False", False),
        ("retrieval.method", "bm25", "bm25"),
        ("evaluation.in_distribution", '["nq"]', ("nq",)),
    ):
        section, name = setting.split(".")
        assert getattr(getattr(sweep.with_value(config, setting, text), section), name) == value
    agent = sweep.with_value(config, "agent.workflow", "rag").agent
    assert (agent.workflow, agent.prompts) == ("rag", "rag")
    assert sweep.Sweep("model.path", ("a/b",)).folder("a/b") == "model.path=a_b"
