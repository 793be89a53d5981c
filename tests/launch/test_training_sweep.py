"""--sweep of launch/tpu_train.py: a run and an evaluation for each value, resumable."""

import json

import pytest

from memsearcher_jax.launch import sweep, tpu_train
from memsearcher_jax.logs.metrics import read_metrics
from memsearcher_jax.runtime.run_dir import read_run_config


@pytest.mark.slow
def test_every_value_is_trained_and_evaluated_and_a_stopped_sweep_continues(small, tmp_path, capsys, monkeypatch):
    out = tmp_path / "sweep"
    write_sweep = sweep.write_sweep
    monkeypatch.setattr(sweep, "write_sweep", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        tpu_train.main([*small, "--sweep", "reward.wrong_answer=0,0.3", "--out", str(out), "--rl.steps", "1"])
    monkeypatch.setattr(sweep, "write_sweep", write_sweep)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("metrics.jsonl")}
    tpu_train.main(["--resume", "--out", str(out), "--json", str(tmp_path / "x.json")])
    assert {path: path.stat().st_mtime_ns for path in out.rglob("metrics.jsonl")} == before
    table = json.loads((tmp_path / "x.json").read_text())["table"]
    assert [row["value"] for row in table] == ["0", "0.3"]
    for row in table:
        folder = out / f"reward.wrong_answer={row['value']}"
        assert read_run_config(folder).reward.wrong_answer == float(row["value"])
        (step,) = read_metrics(folder / "metrics.jsonl")
        assert row["curve"] == [step["exact_match"]]
        results = json.loads((folder / "test" / "results.json").read_text())
        assert (row["questions"], results["checkpoint"], results["step"]) == (4, str(folder), 1)
    assert "2 evaluations; table and plot in" in capsys.readouterr().out
    assert (out / "sweep.png").is_file()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--sweep rl.credit", "write SETTING=A,B,..."),
        ("--sweep rl.credit=none", "rl.credit is 'none': it must be one of"),
        ("--sweep reward.wrong_answer=2", "reward.wrong_answer is 2.0: it must be"),
        ("--sweep seed=0,1 --data.train q.jsonl --retrieval.corpus c.jsonl", "set data.test to files of questions"),
    ],
)
def test_a_wrong_sweep_is_refused_before_training(tmp_path, capsys, flags, message):
    with pytest.raises(SystemExit):
        tpu_train.main(["--config", "nano", *flags.split(), "--out", str(tmp_path / "out")])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
