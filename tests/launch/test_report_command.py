"""launch/report.py: the page of a real run, where it is written, and what it refuses in one line."""

import json

import pytest
import report

from memsearcher_jax.agent.types import Context, Outcome, Problem, Stop, Trajectory, Turn
from memsearcher_jax.report.trajectories import Scored, write_trajectories


@pytest.fixture
def evaluated(tmp_path):
    """The folder of an evaluation of three questions."""
    outcome = Outcome(Stop.ANSWERED, "Ada", (Turn("", "\\boxed{Ada}"),))
    problems = [Problem(f"q{number}", "Who?", ("Ada",)) for number in range(3)]
    trajectories = [Trajectory(one, 0, outcome, (Context((1,), (0.0,), (True,)),), "") for one in problems]
    scored = [Scored(one, 1.0, scores={"exact_match": 1.0}) for one in trajectories]
    write_trajectories(tmp_path / "ev" / "trajectories" / "part_0000.jsonl.gz", scored)
    (tmp_path / "ev" / "results.json").write_text(json.dumps({"metrics": {"exact_match": 1.0}}))
    return tmp_path / "ev"


def test_a_training_run_has_its_page(finished, tmp_path, capsys, untouched):
    before = untouched(finished)
    report.main([str(finished), "--out", str(tmp_path / "new" / "page.html")])
    assert f"{tmp_path}/new/page.html: 16 of 16 trajectories" in capsys.readouterr().out
    page = (tmp_path / "new" / "page.html").read_text(encoding="utf-8")
    assert "Training run with 2 steps. 16 trajectories." in page
    assert "<b>Reward</b>" in page
    assert "<caption>Why trajectories ended</caption>" in page
    assert untouched(finished) == before


def test_without_out_the_page_is_in_the_folder(evaluated, capsys):
    report.main([str(evaluated), "--compare", str(evaluated), "--most", "2"])
    assert f"{evaluated}/report.html: 2 of 3 trajectories" in capsys.readouterr().out
    assert "beside (ev) 2. 3 trajectories." in (evaluated / "report.html").read_text(encoding="utf-8")
    report.main([str(evaluated)])
    assert "3 of 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("", "the following arguments are required: RUN"),
        ("none", "none: no such folder"),
        ("empty", "empty holds no run to report on"),
        ("ev --compare none", "none: no such folder"),
        ("ev --out empty", "--out empty is a folder: name a file"),
        ("ev --out ev/results.json", "name a file that ends in .html"),
        ("none --out ev/results.json/page.html", "--out ev/results.json/page.html cannot be written"),
        ("ev --most 0", "at least 1 is needed"),
        ("ev --most few", "invalid int value: 'few'"),
        ("ev --wide", "unrecognized arguments: --wide (--help explains every flag)"),
    ],
)
def test_what_cannot_be_reported(flags, line, evaluated, tmp_path, monkeypatch, refused, untouched):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    before = untouched(tmp_path)
    assert line in refused(report.main, flags.split())
    assert untouched(tmp_path) == before
