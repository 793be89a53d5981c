"""What a user does: train, stop, go on, evaluate, ask, export; with one small run that all tests share."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import ask
import cli
import evaluate
import export_hf
import numpy as np
import pytest
import tpu_train
from safetensors.numpy import load_file

from memsearcher_jax.data.world import WorldConfig, make_world
from memsearcher_jax.report.metrics import read_metrics
from memsearcher_jax.report.trajectories import read_trajectories
from memsearcher_jax.rl import run_folder
from memsearcher_jax.training import checkpoint


@pytest.fixture
def run(finished, tmp_path) -> Path:
    """A copy of the finished run."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_a_run_leaves_its_numbers(finished):
    assert run_folder.is_run(finished)
    assert {path.name for path in finished.iterdir()} == {
        *("run.json", "tokenizer", "checkpoints", "metrics.jsonl", "tensorboard", "trajectories"),
        *("curves.png", "report.html", "data", "index"),
    }
    told = json.loads(finished.with_suffix(".json").read_text())
    assert told == {"run": str(finished), "metrics": read_metrics(finished / "metrics.jsonl")}


def test_a_run_goes_on_and_says_what_changed(run, capsys):
    tpu_train.main(["--resume", "--out", str(run), "--rl.steps", "3", "--rl.checkpoint_every", "5"])
    said = capsys.readouterr()
    assert "rl.steps was 2 and is 3 from now on" in said.err
    assert "step 2 of 3" in said.err
    assert "train 3/3" in said.err
    assert f"{run}: step 3 done" in said.out
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [0, 1, 2]
    assert checkpoint.latest_step(run / "checkpoints") == 3
    assert run_folder.read_run_config(run).rl.steps == 3


@pytest.mark.parametrize("flags", [[], ["--rl.steps", "1"]])
def test_a_finished_run_says_so_and_stays_as_it_is(flags, run, untouched, capsys, tmp_path):
    before = untouched(run)
    tpu_train.main(["--resume", "--out", str(run), "--json", str(tmp_path / "x.json"), *flags])
    assert "is done already; raise --rl.steps to go on" in capsys.readouterr().out
    assert untouched(run) == before
    assert len(json.loads((tmp_path / "x.json").read_text())["metrics"]) == 2


def test_the_same_command_with_resume_goes_on(small, run, capsys):
    tpu_train.main([*small, "--out", str(run), "--resume"])
    assert "step 2 of 2 is done already" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--model.layers 2", "model.layers was 1 when {run} was started and cannot become 2: leave it out"),
        ("--model.tokenizer x", "model.tokenizer was '' when {run} was started"),
        ("--config qwen05b", "{run} goes on with model.vocab_size 2048, but --config and --checkpoint mean 151936"),
        ("--checkpoint {run}", "{run} goes on with model.path '', but --config and --checkpoint mean '{run}'"),
        ("--rl.steps 4 --training.rows_per_update 12", "12 does not divide over 8 devices"),
        ("--rl.steps 4 --data.train x", "the questions come from a file, the passages do not"),
    ],
)
def test_a_run_that_cannot_go_on_like_this_stays_as_it_is(flags, line, run, refused, untouched):
    before = untouched(run)
    said = refused(tpu_train.main, ["--resume", "--out", run, *flags.format(run=run).split()])
    assert line.format(run=run) in said
    assert untouched(run) == before


def test_a_damaged_checkpoint_is_set_aside_for_the_older_one(run, refused, untouched, damage, capsys):
    """Whoever asks for the newest weights gets no others in silence; a run goes on from what is sound."""
    assert damage(run) == 2
    before = untouched(run)
    for program in (evaluate, export_hf):
        assert "cannot be read" in refused(program.main, ["--checkpoint", run, "--out", run.parent / "out"])
        assert not (run.parent / "out").exists()
    assert untouched(run) == before
    tpu_train.main(["--resume", "--out", str(run), "--rl.steps", "3"])
    said = capsys.readouterr()
    assert f"checkpoint {run / 'checkpoints' / '2'} cannot be read" in said.err
    assert "it is kept as 2.damaged" in said.err
    assert f"{run}: 360 problems, step 1 of 3" in said.err
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [0, 1, 2]


def test_a_new_run_does_not_touch_an_old_one(small, run, refused, untouched):
    before = untouched(run)
    said = refused(tpu_train.main, [*small, "--out", run])
    assert f"--out {run} is not empty: continue the run there with --resume, or choose another" in said
    assert untouched(run) == before


def test_a_start_that_was_killed_may_be_repeated(tmp_path):
    """What a start builds before it becomes a run: data and index, whole or half, and the tokenizer."""
    out = tmp_path / "run"
    for name in ("data/rows", ".index.abc.partial/ids.npy", "tokenizer/tokenizer.json", "run.json.partial"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("half")
    with cli.new_folder(out, "train") as folder:
        assert folder == out
    (out / "thesis.tex").write_text("mine")
    with pytest.raises(FileExistsError, match="is not empty"), cli.new_folder(out, "train"):
        pass
    assert (out / "thesis.tex").read_text() == "mine"


def test_without_a_folder_a_dated_one_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with cli.new_folder(None, "nano") as folder:
        (made,) = (tmp_path / "runs").iterdir()
        assert folder.resolve() == made
        assert made.name.startswith("nano-2")


@pytest.mark.slow
def test_a_killed_run_goes_on(small, tmp_path):
    """kill -9 between two checkpoints; the whole of it in processes of their own."""
    out = tmp_path / "run"
    command = [sys.executable, tpu_train.__file__, *small, "--out", str(out), "--rl.steps", "40"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            if line.startswith("train 3/40"):
                os.kill(process.pid, signal.SIGKILL)
                break
    assert process.returncode == -signal.SIGKILL
    steps_left = ["--resume", "--rl.steps", "5"]
    done = subprocess.run([*command[:2], "--out", str(out), *steps_left], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in read_metrics(out / "metrics.jsonl")] == [0, 1, 2, 3, 4]


def test_evaluation_of_a_run(finished, tmp_path, capsys):
    out = tmp_path / "evaluation"
    evaluate.main(["--checkpoint", str(finished), "--out", str(out), "--json", str(tmp_path / "x.json")])
    said = capsys.readouterr()
    assert "evaluate 4/4" in said.err
    assert "exact match" in said.out
    assert f"{out}: 4 questions answered by {finished}" in said.out
    result = json.loads((out / "results.json").read_text())
    assert result == json.loads((tmp_path / "x.json").read_text())
    assert result["step"] == 2
    assert {"exact_match", "f1", "cover_exact_match", "turns", "tokens_per_turn"} <= result["metrics"].keys()
    assert not (out / "index").exists()  # the run's own serves


def test_an_evaluation_goes_on_under_its_own_settings(finished, run, tmp_path, refused, untouched, capsys):
    out = tmp_path / "evaluation"
    evaluate.main(["--checkpoint", str(run), "--out", str(out)])
    (part,) = (out / "trajectories").iterdir()
    first, written = json.loads((out / "results.json").read_text()), part.stat().st_mtime_ns
    evaluate.main(["--resume", "--out", str(out)])
    assert part.stat().st_mtime_ns == written  # read, not run again
    assert json.loads((out / "results.json").read_text()) == first

    before = untouched(out)
    said = refused(evaluate.main, ["--resume", "--out", out, "--evaluation.max_turns", "9"])
    assert "evaluation.max_turns was 4" in said
    assert "cannot become 9: start another evaluation" in said
    assert f"{run} holds no evaluation" in refused(evaluate.main, ["--resume", "--out", run])
    shutil.rmtree(run / "checkpoints" / "2")
    said = refused(evaluate.main, ["--resume", "--out", out])
    assert f"{out} evaluates step 2 of {run}, whose newest checkpoint is step 1 now" in said
    assert untouched(out) == before


def test_evaluation_of_an_export_on_a_file(small, exported, questions, corpus, tmp_path):
    file, out = questions("asked.jsonl", "Which town has nine mills?", "Which town has two?"), tmp_path / "out"
    flags = [*small, "--checkpoint", exported, "--data", file, "--retrieval.corpus", corpus, "--out", out]
    evaluate.main([str(flag) for flag in flags])
    (part,) = (out / "trajectories").iterdir()
    assert {one.trajectory.problem.question for one in read_trajectories(part)} == {
        "Which town has nine mills?",
        "Which town has two?",
    }


def test_an_export_holds_the_weights_of_the_run(small, finished, exported, tmp_path, capsys, refused, untouched):
    again = tmp_path / "again"
    export_hf.main([*small, "--checkpoint", str(finished), "--out", str(again)])
    assert f"{again}: float32 weights, config and tokenizer" in capsys.readouterr().out
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (again, exported))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        np.testing.assert_array_equal(tensor, theirs[name])
    assert json.loads((again / "config.json").read_text())["hidden_size"] == 32
    before = untouched(again)
    assert "is not empty" in refused(export_hf.main, ["--checkpoint", finished, "--out", again])
    assert untouched(again) == before


@pytest.mark.parametrize("kind", ["finished", "exported"])
def test_asking_a_model(kind, small, request, tmp_path, capsys):
    folder, file = request.getfixturevalue(kind), tmp_path / "x.json"
    flags = [*(small if kind == "exported" else []), "--checkpoint", str(folder), "--json", str(file)]
    ask.main([*flags, "--out", str(tmp_path / "out"), "Who lives in Girstead?"])
    said = capsys.readouterr().out
    assert "question  Who lives in Girstead?" in said
    assert "turn 1" in said
    assert "stopped" in said
    told = json.loads(file.read_text())
    assert told["question"] == "Who lives in Girstead?"
    assert len(told["turns"]) == 1
    assert told == json.loads((tmp_path / "out" / "answer.json").read_text())


HOP = make_world(WorldConfig()).test[0]  # "Which country does the city where X was born belong to?"


def a_person_types(monkeypatch, *replies: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(reply + "\n\n" for reply in replies)))


def test_a_person_is_the_policy(monkeypatch, tmp_path, capsys):
    """A whole MemSearcher trajectory: a search in the embedded world, a memory, and an answer from it."""
    person, city = HOP.metadata["supporting_titles"]
    (country,) = HOP.golden_answers
    call = '<tool_call>{"name": "wikipedia_search", "arguments": {"query": "%s"}}</tool_call>'
    a_person_types(
        monkeypatch,
        f"Where was that?</think>\n{call % person}",
        f"<memory>{person} was born in {city}.</memory>",
        f"So I look for the city.</think>\n{call % city}",
        f"<memory>{person} was born in {city}, which belongs to {country}.</memory>",
        f"The memory says it.</think>\n\\boxed{{{country}}}",
    )
    ask.main(["--config", "nano", "--human", "--json", str(tmp_path / "x.json"), HOP.question])
    told = json.loads((tmp_path / "x.json").read_text())
    assert (told["stop"], told["answer"]) == ("answered", country)
    first, second, third = told["turns"]
    assert f"{person}'s" in first["observation"]
    assert city in second["memory"]
    assert country in second["observation"]
    assert third["memory"] == second["new_memory"]
    said = capsys.readouterr().out
    assert said.index("Think inside <think>") < said.index("turn 1") < said.index("turn 2") < said.index("turn 3")
    assert "memory rewritten" in said
    assert re.search(rf"answer +{country}", said)
    assert re.search(r"memory tokens +\d", said)


def test_a_person_with_the_whole_history(monkeypatch, capsys):
    person = HOP.metadata["supporting_titles"][0]
    call = '<tool_call>{"name": "wikipedia_search", "arguments": {"query": "%s", "top_n": 1}}</tool_call>'
    a_person_types(monkeypatch, f"Look.</think>\n{call % person}", "I know.</think>\n\\boxed{Here}")
    ask.main(
        ["--config", "nano", "--human", "--agent.workflow", "react", "--agent.prompts", "brief_react", HOP.question]
    )
    said = capsys.readouterr().out
    assert "(top 1)" in said
    assert "turn 2" in said
    assert "answered" in said
    assert "memory" not in said


def test_a_person_who_says_nothing(monkeypatch, capsys):
    a_person_types(monkeypatch)
    ask.main(["--config", "nano", "--human", HOP.question])
    assert "no_answer" in capsys.readouterr().out


def test_ctrl_c_is_short(monkeypatch, capsys):
    def interrupted(argv):
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as stop:
        cli.run(interrupted)
    assert stop.value.code == 130
    assert capsys.readouterr().err == "stopped\n"


def test_a_reader_that_leaves_is_no_error():
    """As in `... --help | head -1`."""
    with subprocess.Popen(
        [sys.executable, tpu_train.__file__, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_a_wrong_flag_is_one_line_and_nothing_else():
    done = subprocess.run([sys.executable, tpu_train.__file__, "--rl.stepz", "3"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (
        2,
        "",
        "error: no setting '--rl.stepz': did you mean --rl.steps?\n",
    )
