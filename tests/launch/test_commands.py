"""The commands of a user: train, resume, evaluate, ask and export, with a small run that all tests share."""

import io
import json
import re
import shutil
from pathlib import Path

import pytest

from memsearcher_jax.data.synthetic.encyclopedia import EncyclopediaConfig, make_encyclopedia
from memsearcher_jax.launch import ask, evaluate, outputs, tpu_train
from memsearcher_jax.logs.metrics import read_metrics
from memsearcher_jax.logs.run_facts import read_facts
from memsearcher_jax.rl import state
from memsearcher_jax.rl.health import HealthState
from memsearcher_jax.runs import run_dir
from memsearcher_jax.training import checkpoint


@pytest.fixture
def run(finished, tmp_path) -> Path:
    """A copy of the finished run."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_a_run_writes_its_files_and_metrics(finished):
    assert run_dir.is_run(finished)
    assert {path.name for path in finished.iterdir()} == {
        *("run.json", "tokenizer", "checkpoints", "metrics.jsonl", "tensorboard", "trajectories"),
        *("curves.png", "report.html", "index", "inputs.json", "results.json"),
    }
    facts = read_facts(finished)
    assert facts.training and facts.settings["rl"]["steps"] == 2
    assert facts.results == {"steps": 2}
    result = json.loads(finished.with_suffix(".json").read_text())
    assert result == {"run": str(finished), "metrics": read_metrics(finished / "metrics.jsonl")}


def test_resume_continues_and_reports_changed_settings(run, capsys, monkeypatch):
    monkeypatch.setattr(state, "HealthState", lambda **saved: HealthState(**saved | {"rollbacks": 1}))
    tpu_train.main(["--resume", "--out", str(run), "--rl.steps", "3", "--rl.checkpoint_every", "5"])
    output = capsys.readouterr()
    assert "rl.steps changed: 2 -> 3" in output.err
    assert "step 2 of 3; the learning rate begins at 0.0003 and is constant" in output.err
    assert "train 3/3" in output.err
    assert f"{run}: step 3 done" in output.out
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [0, 1, 2]
    assert checkpoint.latest_step(run / "checkpoints") == 3
    assert run_dir.read_run_config(run).rl.steps == 3


@pytest.mark.parametrize(
    "flags", [[], ["--rl.steps", "1"], "flags of the first start", ["--rl.epochs", "1", "--rl.prompts_per_step", "180"]]
)
def test_resume_of_a_finished_run_changes_nothing(flags, small, run, snapshot, capsys, tmp_path):
    """There are 360 questions, so the last flags make two steps of an epoch."""
    before, flags = snapshot(run), small if isinstance(flags, str) else flags
    tpu_train.main(["--resume", "--out", str(run), "--json", str(tmp_path / "x.json"), *flags])
    unit = "epochs" if "--rl.epochs" in flags else "steps"
    assert f"is already done; raise --rl.{unit} to continue" in capsys.readouterr().out
    assert snapshot(run) == before
    assert len(json.loads((tmp_path / "x.json").read_text())["metrics"]) == 2


def test_resume_makes_the_last_evaluation_and_the_report_that_a_stop_prevented(run, capsys):
    """The stop came between the last checkpoint and the results."""
    for name in ("report.html", "results.json"):
        (run / name).unlink()
    tpu_train.main(["--resume", "--out", str(run), "--rl.evaluate_every", "2"])
    assert (run / "report.html").is_file() and read_facts(run).results["steps"] == 2
    first, last = read_metrics(run / "metrics.jsonl")
    assert "test/reward" in last and "test/reward" not in first and f"{run}: step 2 done" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--model.layers 2", "model.layers is 1 in {run} and cannot change to 2: omit it"),
        ("--config qwen05b", "model.vocab_size is 2048 in {run}, but --config and --checkpoint give 151936"),
        ("--checkpoint {run}", "model.path is '' in {run}, but --config and --checkpoint give '{run}'"),
        ("--rl.steps 4 --training.minibatch_rows 12", "12 does not divide over 8 devices"),
        ("--rl.steps 4 --profile 4", "--profile 4: choose a step from 2 to 3"),
    ],
)
def test_an_invalid_resume_is_an_error_and_changes_nothing(flags, line, run, refused, snapshot):
    before = snapshot(run)
    error = refused(tpu_train.main, ["--resume", "--out", run, *flags.format(run=run).split()])
    assert line.format(run=run) in error
    assert snapshot(run) == before


def test_a_killed_start_can_be_repeated(tmp_path):
    """A start builds data, index and tokenizer, complete or partial, before it writes run.json."""
    out = tmp_path / "run"
    for name in ("data/rows", ".index.abc.partial/ids.npy", "tokenizer/tokenizer.json", "run.json.partial"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("partial")
    with outputs.new_output_dir(out, "train") as folder:
        assert folder == out
    for name, message in (("thesis.tex", "is not empty"), ("run.json", "continue the run there with --resume")):
        (out / name).write_text("mine")
        with pytest.raises(FileExistsError, match=message), outputs.new_output_dir(out, "train"):
            pass
        assert (out / name).read_text() == "mine"


def test_evaluation_of_a_run(finished, evaluated):
    assert "evaluate 4/4" in evaluated.with_suffix(".err").read_text()
    output = evaluated.with_suffix(".out").read_text()
    assert f"{evaluated}: 4 questions answered by {finished}" in output
    assert f"read {evaluated}/report.html" in output and (evaluated / "report.html").is_file()
    result = json.loads((evaluated / "results.json").read_text())
    assert result == json.loads(evaluated.with_suffix(".json").read_text())
    assert result["step"] == 2
    assert {"exact_match", "f1", "cover_exact_match", "turns", "tokens_per_turn"} <= result["metrics"].keys()
    assert not (evaluated / "index").exists()  # the index of the run is used


def test_an_evaluation_resumes_only_with_its_settings(run, tmp_path, refused, snapshot, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "evaluation"
    for resume in ([], ["--resume"]):
        evaluate.main(["--checkpoint", "run", "--model.path", "run", "--out", str(out), *resume])
    before = snapshot(out)
    error = refused(evaluate.main, ["--resume", "--out", out, "--evaluation.max_turns", "9"])
    assert f"evaluation.max_turns is 4 in {out} and cannot change to 9: start another evaluation" in error
    assert f"{run} holds no evaluation" in refused(evaluate.main, ["--resume", "--out", run])
    assert f"{out} holds an evaluation" in refused(tpu_train.main, ["--resume", "--out", out])
    shutil.rmtree(run / "checkpoints" / "2")
    error = refused(evaluate.main, ["--resume", "--out", out])
    assert f"{out} evaluates step 2 of {run}, whose newest checkpoint is now step 1" in error
    assert snapshot(out) == before


PROBLEM = make_encyclopedia(EncyclopediaConfig()).test[0]  # "Which country does the city where X was born belong to?"


def type_replies(monkeypatch, *replies: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(reply + "\r\n\r\n" for reply in replies)))


def test_ask_human_runs_the_memsearcher_workflow(monkeypatch, tmp_path, capsys, refused):
    """A complete MemSearcher trajectory: searches in the synthetic encyclopedia, memories, and an answer from them."""
    person, city = PROBLEM.metadata["supporting_titles"]
    (country,) = PROBLEM.golden_answers
    call = '<tool_call>{"name": "wikipedia_search", "arguments": {"query": "%s"}}</tool_call>'
    type_replies(
        monkeypatch,
        f"Where was that?</think>\n{call % person}",
        f"<memory>{person} was born in {city}.</memory>",
        f"So I look for the city.</think>\n{call % city}",
        f"<memory>{person} was born in {city}, in {country}.</memory>",
        f"The memory says it.</think>\n\\boxed{{{country}}}",
    )
    ask.main(["--config", "nano", "--human", "--json", str(tmp_path / "x.json"), PROBLEM.question])
    result = json.loads((tmp_path / "x.json").read_text())
    assert (result["stop"], result["answer"]) == ("answered", country)
    first, second, third = result["turns"]
    assert f"{person}'s" in first["observation"]
    assert city in second["memory"]
    assert country in second["observation"]
    assert third["memory"] == second["new_memory"]
    output = capsys.readouterr().out
    assert "memory rewritten" in output and output.index("Think inside <think>") < output.index("turn 1")
    assert re.search(rf"answer +{country}", output)
    assert re.search(r"memory tokens +\d", output)
    monkeypatch.setattr("sys.stdin", None)
    assert "the standard input, which is closed" in refused(ask.main, ["--config", "nano", "--human", "Who?"])
