"""A small run that is trained and exported once, and fixtures for tests of commands."""

import contextlib
import json
import logging
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from examples.warmstart.record import play
from memsearcher_jax.launch import evaluate, export_hf, tpu_train
from memsearcher_jax.rl import setup, state
from memsearcher_jax.runs import load_weights
from tests.support import SMALL_RUN

SCRIPTED = "--config tiny_warmstart --model.path package:tiny --retrieval.index_type exact"


@pytest.fixture(scope="session")
def small() -> list[str]:
    return SMALL_RUN.split()


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Path:
    """A run of two steps. Read-only: a test that modifies it must copy it."""
    out = tmp_path_factory.mktemp("finished") / "run"
    tpu_train.main([*SMALL_RUN.split(), "--out", str(out), "--json", str(out.with_suffix(".json"))])
    return out


@pytest.fixture(scope="session")
def exported(finished, tmp_path_factory) -> Path:
    """The weights of the run as a Hugging Face folder. Read-only: a test that modifies it must copy it."""
    out = tmp_path_factory.mktemp("exported") / "hf"
    export_hf.main(["--checkpoint", str(finished), "--out", str(out)])
    return out


@pytest.fixture(scope="session")
def evaluated(finished, tmp_path_factory) -> Path:
    """An evaluation of the run, with .json, .out and .err files next to it.

    Read-only: a test that modifies it must copy it.
    """
    out = tmp_path_factory.mktemp("evaluated") / "evaluation"
    with (
        out.with_suffix(".out").open("w") as stdout,
        out.with_suffix(".err").open("w") as stderr,
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        evaluate.main(["--checkpoint", str(finished), "--out", str(out), "--json", str(out.with_suffix(".json"))])
    return out


@pytest.fixture
def snapshot():
    """The content of every file in a folder, to compare before and after a command; empty folders have none."""

    def contents(folder: Path) -> dict[str, bytes]:
        return {
            str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
            for path in folder.rglob("*")
            if path.is_file() or not any(path.iterdir())
        }

    return contents


@pytest.fixture(autouse=True)
def quiet():
    """Hides messages of absl, as `cli.run` does."""
    logging.getLogger("absl").setLevel(logging.ERROR)


@pytest.fixture
def questions(tmp_path):
    """Writes a JSONL file of questions, each with one answer."""

    def write(name: str, *texts: str) -> Path:
        file = tmp_path / name
        rows = [{"id": f"q{row}", "question": text, "golden_answers": ["Ada"]} for row, text in enumerate(texts)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return file

    return write


@pytest.fixture
def corpus(tmp_path):
    """A JSONL file of twenty passages."""
    file = tmp_path / "corpus.jsonl"
    rows = [{"id": str(row), "contents": f'"Town {row}"\nTown {row} has {row} mills.'} for row in range(20)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


class ScriptedDriver:
    """In place of `rl.rollout.RolloutDriver`: a scripted policy, with the real workflow, searches and token ids."""

    def __init__(self, evaluated, make_policy):
        self.evaluated, self.make_policy = evaluated, make_policy

    def trajectory(self, job, ended):
        return ended

    def run(self, jobs, params, key, on_end):
        """Ends trajectories one after the other; all log-probabilities are 0."""
        for job in jobs:
            on_end(job, play(self.evaluated, job.problem, self.make_policy(job.problem)))


@pytest.fixture(scope="session")
def scripted_into():
    """Runs launch/evaluate.py into a folder with a scripted policy for each problem; returns its results, or None."""

    def run(folder, make_script, *flags):
        def make_driver(run, *, evaluation):
            return ScriptedDriver(replace(run, agent=setup.evaluation_agent(run)), make_script)

        settings = [] if "--resume" in flags else SCRIPTED.split()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(setup, "make_driver", make_driver)
            patch.setattr(state, "initial_params", lambda run, step=None: {})
            patch.setattr(setup, "publish", lambda run, params: params)
            patch.setattr(load_weights, "check_weights", lambda folder, model: None)  # they are not read
            evaluate.main([*settings, "--out", str(folder), *map(str, flags)])
        results = folder / "results.json"
        return json.loads(results.read_text()) if results.is_file() else None

    return run


@pytest.fixture
def scripted(scripted_into, tmp_path):
    """As `scripted_into`, into a folder of the test; returns the results, or None, and the folder."""

    def run(make_script, *flags, out="out"):
        return scripted_into(tmp_path / out, make_script, *flags), tmp_path / out

    return run


@pytest.fixture
def fake_program(tmp_path, monkeypatch):
    """Makes a program that records its arguments and its input the only one on PATH; returns the file it writes."""
    programs, recorded = tmp_path / "programs", tmp_path / "recorded.json"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))

    def install(name, status=0):
        text = "sys.stdin.read()" if name == "kubectl" else "''"
        source = f"import json, sys\njson.dump([sys.argv[1:], {text}], open({str(recorded)!r}, 'w'))\n"
        (programs / name).write_text(f"#!{sys.executable}\n{source}sys.exit({status})\n")
        (programs / name).chmod(0o755)
        return recorded

    return install
