"""launch/report.py: the page of a run, its output file, and one-line errors."""

import json
import shutil

import pytest

from memsearcher_jax.launch import report
from memsearcher_jax.logs.metrics import METRICS_FILE
from tests.samples import scored, write_shard


@pytest.fixture
def evaluated(tmp_path):
    """The folder of an evaluation of three questions."""
    write_shard(tmp_path / "ev", [scored(id=f"q{number}") for number in range(3)])
    (tmp_path / "ev" / "results.json").write_text(json.dumps({"metrics": {"exact_match": 1.0}}))
    return tmp_path / "ev"


def test_the_page_of_a_training_run(finished, tmp_path, capsys, snapshot):
    before = snapshot(finished)
    report.main([str(finished), "--out", str(tmp_path / "new" / "page.html")])
    assert f"{tmp_path}/new/page.html: 16 of 16 trajectories" in capsys.readouterr().out
    page = (tmp_path / "new" / "page.html").read_text(encoding="utf-8")
    assert "Training run with 2 steps. 16 trajectories." in page
    assert snapshot(finished) == before


def test_the_default_output_is_in_the_run_folder(evaluated, capsys):
    report.main([str(evaluated), "--compare", str(evaluated), "--max_trajectories", "2"])
    assert f"{evaluated}/report.html: 2 of 3 trajectories" in capsys.readouterr().out
    assert "compared with (ev) 2. 3 trajectories." in (evaluated / "report.html").read_text(encoding="utf-8")
    report.main([str(evaluated), "--follow"])  # it has ended: the page is written once
    assert "3 of 3" in capsys.readouterr().out
    assert 'http-equiv="refresh"' not in (evaluated / "report.html").read_text(encoding="utf-8")


def test_the_page_of_a_running_job_reloads_until_the_run_has_ended(finished, tmp_path, monkeypatch):
    run, page = tmp_path / "run", tmp_path / "run" / "report.html"
    shutil.copytree(finished, run)
    (run / "results.json").unlink(missing_ok=True)
    pages = []

    def sleep(seconds):
        pages.append(page.read_text(encoding="utf-8"))
        if len(pages) == 2:
            first, *_ = (run / METRICS_FILE).read_text().splitlines()
            with (run / METRICS_FILE).open("a") as file:
                file.write(json.dumps(json.loads(first) | {"step": 2}) + "\n")
        if len(pages) == 3:
            (run / "results.json").write_text('{"steps": 3}')

    monkeypatch.setattr(report.time, "sleep", sleep)
    report.main([str(run), "--follow"])
    reload = '<meta http-equiv="refresh" content="30">'
    assert [reload in text for text in pages] == [True] * 3
    assert ["with 3 steps" in text for text in pages] == [False, False, True]
    last = page.read_text(encoding="utf-8")
    assert reload not in last and "with 3 steps" in last
