"""Two evaluations side by side: pairs by id, numbers known by hand, and folders that cannot be compared."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import compare
import evaluate
import pytest

from memsearcher_jax.agent.types import Context, Outcome, Problem, Query, Stop, Trajectory, Turn
from memsearcher_jax.report.trajectories import Scored, write_trajectories


def question(number, right, *, answer="Ada", stop=Stop.ANSWERED, turns=2, memory="", tokens=100, golden="Ada"):
    """A trajectory of `turns` turns, each a context of `tokens` tokens; all but the last search and remember."""
    problem = Problem(f"q{number}", f"Who is number {number}?", (golden,), {"supporting_titles": ["Mill"], "hops": 1})
    rewrite = f"<memory>{memory}</memory>" if memory else ""
    searching = Turn("", "...", queries=(Query("x", 5),), observation="Ada of the Mill", rewrite=rewrite)
    searching = replace(searching, new_memory=memory)
    done = (*[searching] * (turns - 1), Turn(memory, "..."))
    context = Context((1,) * tokens, (0.0,) * tokens, (True,) * tokens)
    outcome = Outcome(stop, answer if stop is Stop.ANSWERED else "", done, {"memory_cuts": 1})
    scores = {"exact_match": float(right), "f1": 1.0 if right else 0.25}
    return Scored(Trajectory(problem, 0, outcome, (context,) * turns, ""), float(right), "", scores)


def write(folder: Path, *parts, **results) -> Path:
    """A folder as launch/evaluate.py leaves it."""
    for number, part in enumerate(parts):
        write_trajectories(folder / "trajectories" / f"part_{number:04d}.jsonl.gz", part)
    results = {"checkpoint": f"/w/{folder.name}", "step": 7, "questions": sum(map(len, parts)), "metrics": {}} | results
    (folder / "weights.json").write_text("{}")
    (folder / "results.json").write_text(json.dumps(results, indent=2))
    return folder


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A folder to stand in, with two evaluations: of q0 to q11 and of q2 to q13, in another order."""
    monkeypatch.chdir(tmp_path)
    write(Path("a"), [question(n, n < 4) for n in range(8)], [question(n, False) for n in range(8, 12)])
    write(Path("b"), [question(n, n > 2, turns=3, memory="Ada of the Mill") for n in reversed(range(2, 14))])
    return tmp_path


def run(*argv):
    compare.main([str(word) for word in (*argv, "--json", "x.json")])
    return json.loads(Path("x.json").read_text())


def test_questions_are_paired_by_id(place, capsys):
    result = run("a", "b")
    assert result["shared"] == 10
    assert result["first"]["not_shared"] == ["q0", "q1"]
    assert result["second"]["not_shared"] == ["q13", "q12"]
    assert result["first"] | {"not_shared": 0} == {
        "folder": "a", "checkpoint": "/w/a", "step": 7, "questions": 12, "not_shared": 0,
    }  # fmt: skip
    assert [one["id"] for one in result["lost"]] == ["q2"]
    assert [one["id"] for one in result["won"]] == ["q4", "q5", "q6", "q7", "q8", "q9", "q10", "q11"]
    assert result["won"][0]["first"] == {
        "answer": "Ada", "stop": "answered", "scores": {"exact_match": 0.0, "f1": 0.25, "reward": 0.0},
    }  # fmt: skip
    said = capsys.readouterr().out
    assert "A  a: /w/a, step 7" in said
    assert "questions: 10 shared of 12 and 12" in said
    assert "won by B in exact_match: 8" in said
    assert "lost by B in exact_match: 1" in said


def test_the_numbers_of_hand(place):
    metrics = run("a", "b")["metrics"]
    exact = metrics["exact_match"]
    assert (exact["count"], exact["first"], exact["second"]) == (10, 0.2, 0.9)
    assert (exact["wins"], exact["losses"], exact["exact"]) == (8, 1, True)
    assert exact["difference"]["mean"] == pytest.approx(0.7)
    assert 0.2 <= exact["difference"]["low"] < 0.7 < exact["difference"]["high"] <= 1.0
    assert exact["p_value"] == pytest.approx(2 * (1 + 9) / 2**9)  # McNemar: 8 to 1
    assert metrics["f1"]["difference"]["mean"] == pytest.approx(0.75 * 0.7)
    assert metrics["f1"]["p_value"] == exact["p_value"]  # one size of difference throughout
    turns = metrics["turns"]
    assert (turns["first"], turns["second"]) == (2.0, 3.0)
    assert turns["difference"] == {"mean": 1.0, "low": 1.0, "high": 1.0}
    assert turns["p_value"] == pytest.approx(2 / 2**10)
    assert metrics["searches"]["difference"]["mean"] == 1.0
    assert metrics["tokens_per_turn"]["first"] == metrics["peak_context_tokens"]["second"] == 100.0
    assert metrics["memory_cuts"]["second"] == metrics["answered"]["first"] == 1.0
    assert metrics["supporting/shown"]["first"] == 1.0


def test_a_metric_that_only_one_side_has_is_not_compared(place):
    """In `a` no turn remembers, so there is nothing to hold against the memories of `b`."""
    assert not {"golden/held", "memory/copied"} & run("a", "b")["metrics"].keys()
    kept = run("b", "b")["metrics"]
    assert kept["golden/held"]["first"] == kept["memory/copied"]["second"] == 1.0


def test_a_metric_is_compared_where_both_questions_have_it(place):
    write(Path("c"), [question(n, True, memory="Ada" if n < 5 else "") for n in range(12)])
    held = run("c", "b")["metrics"]["supporting/held"]
    assert (held["count"], held["first"], held["second"]) == (3, 0.0, 1.0)


def test_an_evaluation_against_itself(place, capsys):
    result = run("a", "a")
    assert result["won"] == result["lost"] == []
    assert {one["p_value"] for one in result["metrics"].values()} == {1.0}
    assert all(one["difference"] == {"mean": 0.0, "low": 0.0, "high": 0.0} for one in result["metrics"].values())
    assert "won by B in exact_match: 0" in capsys.readouterr().out


def test_swapped_runs_swap_all(place):
    forth, back = run("a", "b"), run("b", "a")
    assert [one["id"] for one in forth["won"]] == [one["id"] for one in reversed(back["lost"])]
    for name, paired in forth["metrics"].items():
        assert back["metrics"][name]["difference"]["mean"] == pytest.approx(-paired["difference"]["mean"])
        assert back["metrics"][name]["p_value"] == pytest.approx(paired["p_value"], abs=0.01)


def test_resampling_is_seeded(place):
    write(Path("c"), [question(n, n % 3 == 0, tokens=90 + n * n) for n in range(12)])
    write(Path("d"), [question(n, n % 2 == 0, tokens=150 - 7 * n) for n in range(12)])
    assert run("c", "d") == run("c", "d")
    first, other = (run("c", "d", "--seed", seed)["metrics"]["tokens_per_turn"]["difference"] for seed in (0, 1))
    assert first["low"] != other["low"]
    assert first["low"] == pytest.approx(other["low"], rel=0.2)


def test_won_by_another_score(place):
    close = [question(n, False) for n in range(12)]
    close[3] = replace(close[3], scores=close[3].scores | {"f1": 0.9})
    result = run(write(Path("c"), [question(n, False) for n in range(12)]), write(Path("d"), close), "--by", "f1")
    assert [one["id"] for one in result["won"]] == ["q3"]
    assert result["by"] == "f1"


def test_what_is_printed_of_the_questions(place, capsys):
    compare.main(["a", "b", "--show", "2"])
    said = capsys.readouterr().out
    assert "Who is number 5?" in said
    assert "Who is number 6?" not in said
    assert "… 6 more: --show 8, or --json FILE for all" in said


def test_outside_text_is_shown_as_text(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    answer = "[red]x[/] \x1b[31m \ud800"
    write(Path("a"), [question(1, False, answer=answer)])
    write(Path("b"), [question(1, True, stop=Stop.MAX_TURNS)])
    result = run("a", "b")
    assert result["won"][0]["first"]["answer"] == "[red]x[/] \x1b[31m ?"
    said = capsys.readouterr().out
    assert "[red]x[/]" in said
    assert "\x1b" not in said
    assert "max_turns" in said


def broken(place, case):
    """Makes a folder `x` that cannot be compared with `a`."""
    folder = Path("x")
    some = [question(n, True) for n in range(3)]
    if case == "empty":
        folder.mkdir()
    elif case == "not ended":
        (write(folder, some) / "results.json").unlink()
    elif case == "no JSON":
        (write(folder, some) / "results.json").write_text("{")
    elif case == "part lost":
        write(folder, some, some[:0], questions=5)
    elif case == "twice":
        write(folder, some, some)
    elif case == "cut off":
        (part,) = (write(folder, some) / "trajectories").iterdir()
        part.write_bytes(part.read_bytes()[:-9])
    elif case == "others":
        write(folder, [question(n, True) for n in range(90, 93)])
    elif case == "other texts":
        write(folder, [question(n, True, golden="Bob") for n in range(3)])
    elif case == "not a number":
        write(folder, [replace(some[0], reward=math.nan)])
    elif case == "titles":
        trajectory = some[0].trajectory
        problem = replace(trajectory.problem, metadata={"supporting_titles": "Mill"})
        write(folder, [replace(some[0], trajectory=replace(trajectory, problem=problem))])


@pytest.mark.parametrize(
    ("case", "line"),
    [
        ("absent", "x: no such folder"),
        ("empty", "x holds no evaluation: there is no results.json in it; launch/evaluate.py makes one"),
        ("not ended", "x has not ended: go on with launch/evaluate.py --resume --out x"),
        ("no JSON", "x/results.json: not JSON"),
        ("part lost", "x is damaged: results.json counts 5 questions, its trajectories are of 3; evaluate again"),
        ("twice", "part_0001.jsonl.gz: question 'q0' was asked before"),
        ("cut off", "part_0000.jsonl.gz: compressed data is damaged"),
        ("others", "share no question (one asks q0, q1, …; the other q90, q91, …)"),
        ("other texts", "question 'q0' is 'Who is number 0?' in a and 'Who is number 0?' in x, or its golden answers"),
        ("not a number", "part_0000.jsonl.gz: reward of question 'q0' is nan"),
        ("titles", "problem 'q0': metadata.supporting_titles must be a list of titles"),
    ],
)
def test_folders_that_cannot_be_compared(case, line, place, refused, untouched):
    broken(place, case)
    before = untouched(place)
    assert line in refused(compare.main, ["a", "x", "--json", "y.json"])
    if case not in ("others", "other texts"):  # where the two are at odds, the first to be read is named first
        assert line in refused(compare.main, ["x", "a"])
    assert untouched(place) == before


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("a", "the following arguments are required: RUN_B"),
        ("a b c", "unrecognized arguments: c"),
        ("a b --rl.steps 3", "unrecognized arguments: --rl.steps 3"),
        ("a b --by turns", "--by turns: no score of both evaluations; choose one of exact_match, f1, reward"),
        ("a b --show many", "invalid int value: 'many'"),
        ("a b --show -1", "--show -1: it must be at least 0"),
        ("a b --seed -1", "--seed -1: it must be at least 0"),
        ("a b --json a", "--json a is a folder: name a file"),
        ("a b --json a/results.json/x", "--json a/results.json/x cannot be written (File exists): name another"),
    ],
)
def test_flags_that_cannot_be_read(flags, line, place, refused, untouched):
    before = untouched(place)
    assert line in refused(compare.main, flags.split())
    assert untouched(place) == before


def test_help_explains_every_flag_and_loads_no_jax():
    program = "import sys, compare\ntry:\n    compare.main(['--help'])\nfinally:\n    assert 'jax' not in sys.modules"
    folder = Path(compare.__file__).parent
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in ("RUN_A", "RUN_B", "--by", "--show", "--seed", "--json"))


def test_evaluations_that_the_command_made(finished, tmp_path, capsys):
    """Equal weights and settings give equal answers, one turn less gives other ones to pair."""
    for name, flags in (("one", []), ("other", ["--evaluation.max_turns", "1"])):
        evaluate.main(["--checkpoint", str(finished), "--out", str(tmp_path / name), *flags])
    results = json.loads((tmp_path / "one" / "results.json").read_text())["metrics"]
    compare.main([*(str(tmp_path / name) for name in ("one", "other")), "--json", str(tmp_path / "x.json")])
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["shared"] == 4
    for name in ("exact_match", "f1", "reward", "turns", "searches", "answered"):
        assert found["metrics"][name]["first"] == pytest.approx(results.get(name, results["stop/answered"]))
    assert found["metrics"]["turns"]["second"] <= 1.0
    assert "questions: 4 shared of 4 and 4" in capsys.readouterr().out
