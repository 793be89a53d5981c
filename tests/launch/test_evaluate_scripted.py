"""Evaluations of scripted policies: known metrics, and what a stop, a fault or other hosts must not lose."""

import json
import random
import shutil

import pytest

from examples.warmstart.search import NO_ERRORS, Errors, SearchDemonstrator
from memsearcher_jax.data.synthetic.encyclopedia import EncyclopediaConfig, make_encyclopedia
from memsearcher_jax.launch import evaluate
from memsearcher_jax.logs.trajectories import compress_trajectories, read_trajectories
from memsearcher_jax.rl import setup
from memsearcher_jax.rl.setup import open_search
from memsearcher_jax.types import StopReason
from tests.support import chat_completion

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
        return SearchDemonstrator(problem, ENCYCLOPEDIA, Errors(answer_early=0.5), random.Random(problem.id))


def read_all(folder):
    return {
        scored.trajectory.problem.id: scored
        for file in sorted((folder / "trajectories").iterdir())
        for scored in read_trajectories(file)
    }


def test_an_oracle_of_the_encyclopedia_has_full_scores(scripted, capsys):
    result, folder = scripted(lambda problem: SearchDemonstrator(problem, ENCYCLOPEDIA, NO_ERRORS, random.Random(0)))
    assert result["questions"] == len(ENCYCLOPEDIA.test)
    summary = result["evaluation"]["benchmarks"]["encyclopedia"]
    assert len(summary["scores"]) == 5
    assert all(score["mean"] == score["high"] == 1.0 for score in summary["scores"].values())
    assert summary["stops"] == {"answered": 1.0}
    hops = [problem.metadata["hops"] for problem in ENCYCLOPEDIA.test]
    assert summary["searches"] == sum(hops) / len(hops)
    assert summary["turns"] == summary["searches"] + 1
    assert {name: value for name, value in result["metrics"].items() if name.endswith("_hops")} == {
        f"exact_match/{hop}_hops": 1.0 for hop in (1, 2, 3)
    }
    lengths = [len(context.ids) for scored in read_all(folder).values() for context in scored.trajectory.contexts]
    assert summary["tokens_per_turn"] == pytest.approx(sum(lengths) / len(lengths))
    assert summary["peak_context_tokens"] == max(lengths)
    assert "encyclopedia" in capsys.readouterr().out


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
    (log,) = (stopped / "trajectories").iterdir()
    with log.open("ab") as file:  # the process was killed while writing the sixth
        file.write(log.read_bytes()[:100])
    capsys.readouterr()
    resumed, _ = scripted(second, "--resume")
    assert "evaluate 12/12" in capsys.readouterr().err
    assert len(first.problem_ids) == 5
    assert sorted(first.problem_ids + second.problem_ids) == sorted(read_all(folder))
    assert read_all(stopped) == read_all(folder)
    assert resumed == result

    third = AgentFactory()
    before = log.read_bytes()
    assert scripted(third, "--resume")[0] == result
    assert third.problem_ids == []
    assert log.read_bytes() == before


def test_answers_are_judged_by_a_service_that_was_down_at_first(scripted, uninterrupted, serving, capsys):
    up = False

    def behave(user, times):
        golden, _, answer = user.partition("Golden answers: ")[2].partition("\nAnswer: ")
        verdict = {"judgement": "correct" if answer in json.loads(golden) else "incorrect", "confidence": 80}
        return chat_completion(json.dumps(verdict)) if up else (503, {"error": "starting"})

    url, requests = serving(behave)
    flags = ("--judge.backend", "openai", "--judge.url", url, "--judge.model", "judge-32b", "--judge.max_outage", "0")
    result, _ = scripted(AgentFactory(), *FEW, *flags)
    assert result["judge"] == {"encyclopedia": {"questions": 12, "unjudged": 12}}
    output = capsys.readouterr()
    assert "12 answers were not judged, the number is left out; --resume asks again" in " ".join(output.out.split())
    assert "the judge does not answer: " in output.err
    up = True
    moved, asked_there = serving(behave)
    result, _ = scripted(AgentFactory(), "--resume", "--judge.url", moved)
    judged = result["judge"]["encyclopedia"]
    assert judged["accuracy"]["mean"] == result["metrics"]["exact_match"] == uninterrupted[0]["metrics"]["exact_match"]
    assert (judged["agreement_with_exact_match"], judged["unjudged"], judged["calibration_error"]) == (1.0, 0, None)
    assert {path for path, _, _ in requests + asked_there} == {"/v1/chat/completions"}
    assert "agrees" in capsys.readouterr().out


def test_an_evaluation_resumes_with_another_number_of_hosts(scripted, uninterrupted, tmp_path):
    """The file of a former host may end in a torn line."""
    result, folder = uninterrupted
    stopped = shutil.copytree(folder, tmp_path / "out")
    first = stopped / "trajectories" / "host_0000.jsonl.gz"
    logged = list(read_trajectories(first, log=True))
    shutil.copy(first, first.with_name("host_0000 copy.jsonl.gz"))  # is not read
    first.write_bytes(compress_trajectories(logged[:4]))
    other = b"".join(compress_trajectories([scored]) for scored in logged[8:])
    first.with_name("host_0002.jsonl.gz").write_bytes(other[:-50])
    alone = AgentFactory()
    assert scripted(alone, "--resume")[0] == result
    assert len(alone.problem_ids) == 5
    assert read_all(stopped) == read_all(folder)


def test_unexpected_trajectories_and_weights_are_errors(uninterrupted, tmp_path, refused):
    folder = shutil.copytree(uninterrupted[1], tmp_path / "out")
    log = folder / "trajectories" / "host_0000.jsonl.gz"
    before = log.read_bytes()
    log.write_bytes(before * 2)
    error = refused(evaluate.main, ["--resume", "--out", folder])
    assert "was answered before: start another evaluation" in error
    inputs = folder / "inputs.json"
    inputs.write_text(inputs.read_text().replace('"model.path": "', '"model.path": "0'))
    assert "model.path has changed since the run in" in refused(evaluate.main, ["--resume", "--out", folder])


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
    assert all(broken["metrics"][name] == benchmark[name] for name in ("turns", "searches", "tokens_per_turn"))
    assert f"{len(lost)} questions were lost to faults" in capsys.readouterr().out
    resumed, _ = scripted(second, "--resume")
    assert sorted(second.problem_ids) == sorted(lost)
    assert resumed == result
    assert read_all(stopped) == read_all(folder)
