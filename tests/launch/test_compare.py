"""launch/compare.py: pairs by id, metrics computed by hand, and folders that cannot be compared."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from memsearcher_jax.launch import compare
from memsearcher_jax.types import Context, Problem, Query, StopReason, Stream, StreamQuestion, Turn
from tests.samples import scored, write_shard


def question(number, correct, *, turns=2, memory="", tokens=100, **changes):
    """A trajectory of `turns` turns, each a context of `tokens` tokens; all but the last search and write a memory."""
    rewrite = f"<memory>{memory}</memory>" if memory else ""
    searching = Turn("", "...", queries=(Query("x", 5),), observation="Ada of the Mill", rewrite=rewrite)
    done = (*[replace(searching, new_memory=memory)] * (turns - 1), Turn(memory, "..."))
    context = Context((1,) * tokens, (0.0,) * tokens, (True,) * tokens)
    named = {"id": f"q{number}", "question": f"Who is number {number}?", "counts": {"memory_cuts": 1}}
    named |= {"metadata": {"supporting_titles": ["Mill"], "hops": 1}, "contexts": (context,) * turns}
    scores = {"exact_match": float(correct), "f1": 1.0 if correct else 0.25}
    return scored(correct, done, scores=scores, **named, **changes)


def write(folder: Path, *shards, **results) -> Path:
    """A folder as launch/evaluate.py leaves it."""
    for number, shard in enumerate(shards):
        write_shard(folder, shard, number)
    defaults = {"checkpoint": f"/w/{folder.name}", "step": 7, "questions": sum(map(len, shards)), "metrics": {}}
    (folder / "weights.json").write_text("{}")
    (folder / "results.json").write_text(json.dumps(defaults | results, indent=2))
    return folder


@pytest.fixture
def cwd(tmp_path, monkeypatch) -> Path:
    """The current directory, with two evaluations: of q0 to q11 and of q2 to q13, in another order."""
    monkeypatch.chdir(tmp_path)
    write(Path("a"), [question(n, n < 4) for n in range(8)], [question(n, False) for n in range(8, 12)])
    write(Path("b"), [question(n, n > 2, turns=3, memory="Ada of the Mill") for n in reversed(range(2, 14))])
    return tmp_path


def run(*argv):
    compare.main([str(word) for word in (*argv, "--json", "x.json")])
    return json.loads(Path("x.json").read_text())


def test_questions_are_paired_by_id(cwd, capsys):
    result = run("a", "b")
    assert (result["shared"], result["second"]["not_shared"]) == (10, ["q13", "q12"])
    first = {"folder": "a", "checkpoint": "/w/a", "step": 7, "questions": 12, "not_shared": ["q0", "q1"]}
    assert result["first"] == first
    assert [question["id"] for question in result["lost"]] == ["q2"]
    assert [question["id"] for question in result["won"]] == ["q4", "q5", "q6", "q7", "q8", "q9", "q10", "q11"]
    scores = {"exact_match": 0.0, "f1": 0.25, "reward": 0.0}
    assert result["won"][0]["first"] == {"answer": "Ada", "stop": "answered", "scores": scores}
    output, lines = capsys.readouterr().out, ("A  a: /w/a, step 7", "questions: 10 shared of 12 and 12")
    assert all(line in output for line in (*lines, "won by B in exact_match: 8", "lost by B in exact_match: 1"))


def test_metrics_equal_hand_computed_values(cwd):
    metrics = run("a", "b")["metrics"]
    exact = metrics["exact_match"]
    assert (exact["count"], exact["first"], exact["second"]) == (10, 0.2, 0.9)
    assert (exact["wins"], exact["losses"]) == (8, 1)
    assert exact["difference"]["mean"] == pytest.approx(0.7)
    assert 0.2 <= exact["difference"]["low"] < 0.7 < exact["difference"]["high"] <= 1.0
    assert exact["p_value"] == pytest.approx(2 * (1 + 9) / 2**9)  # McNemar: 8 to 1
    assert metrics["f1"]["difference"]["mean"] == pytest.approx(0.75 * 0.7)
    assert metrics["f1"]["p_value"] == exact["p_value"]
    turns = metrics["turns"]
    assert (turns["first"], turns["second"]) == (2.0, 3.0)
    assert turns["difference"] == {"mean": 1.0, "low": 1.0, "high": 1.0}
    assert turns["p_value"] == pytest.approx(2 / 2**10)
    assert metrics["searches"]["difference"]["mean"] == 1.0
    assert metrics["tokens_per_turn"]["first"] == metrics["mean_peak_context_tokens"]["second"] == 100.0
    assert metrics["memory_cuts"]["second"] == metrics["answered"]["first"] == 1.0
    assert metrics["supporting/shown"]["first"] == 1.0
    assert not {"golden/held", "memory/copied"} & metrics.keys(), "in `a` no turn writes a memory"
    same = run("b", "b")["metrics"]
    assert same["golden/held"]["first"] == same["memory/copied"]["second"] == 1.0
    write(Path("c"), [question(n, True, memory="Ada" if n < 5 else "") for n in range(12)])
    held = run("c", "b")["metrics"]["supporting/held"]
    assert (held["count"], held["first"], held["second"]) == (3, 0.0, 1.0)


def test_streams_are_compared_where_both_have_a_score(cwd, refused):
    def stream(number, accuracy, text="text", **counts):
        problem = Problem.of_stream(f"s{number}", Stream("squad", (text,), (StreamQuestion("Who?", "Ada"),)))
        outcome = {"stop": StopReason.STREAM_READ, "scores": {"accuracy": accuracy}, "counts": counts}
        if math.isnan(accuracy):
            outcome |= {"stop": StopReason.CONTEXT_FULL, "scores": {}}
        return scored(turns=(), problem=problem, reward=accuracy, answer="", **outcome)

    write(Path("c"), [stream(0, math.nan), stream(1, 0.5), stream(2, 0.5, calls_failed=3)])
    write(Path("d"), [stream(0, 1.0, calls_failed=6), stream(1, 1.0), stream(2, 0.25)])
    result = run("c", "d")
    metrics = result["metrics"]
    assert (result["by"], result["shared"]) == ("accuracy", 3)
    assert (metrics["accuracy"]["count"], metrics["turns"]["count"]) == (2, 3)
    assert (metrics["calls_failed"]["first"], metrics["calls_failed"]["second"]) == (1, 2), "0 where there is none"
    assert ([one["id"] for one in result["won"]], [one["id"] for one in result["lost"]]) == (["s1"], ["s2"])
    write(Path("e"), [stream(0, math.nan)])
    assert "c and e have no score in common" in refused(compare.main, ["c", "e"])
    write(Path("f"), [stream(1, 0.5, "another text")])
    assert "or its golden answers or texts differ" in refused(compare.main, ["c", "f"])


def test_settings_that_differ_are_listed(cwd, capsys):
    for folder, seed in (("a", 0), ("b", 1)):
        settings = {"seed": seed, "agent": {"workflow": "memsearcher"}}
        (Path(folder) / "run.json").write_text(json.dumps(settings))
        (Path(folder) / "inputs.json").write_text(json.dumps({"hashes": {"file": "f"}, "program": [folder]}))
    program = {"first": ["a"], "second": ["b"]}
    assert run("a", "b")["settings"] == {"program": program, "seed": {"first": 0, "second": 1}}
    assert "setting that differs" in capsys.readouterr().out
    assert run("a", "a")["settings"] == {} and "setting that differs" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("shards", "results", "line"),
    [
        ([range(3)], {"questions": 5}, "x is damaged: results.json counts 5 questions, but there are trajectories"),
        ([range(3), range(3)], {}, "x is damaged: results.json counts 6 questions, but there are trajectories of 3"),
        ([range(90, 93)], {}, "a (questions q0, q1, …) and x (questions q90, q91, …) share no question"),
        ([], {}, "x holds no evaluation: name a folder that launch/evaluate.py wrote"),
    ],
)
def test_folders_that_cannot_be_compared(shards, results, line, cwd, refused):
    Path("x").mkdir()
    if shards:
        write(Path("x"), *([question(n, True) for n in numbers] for numbers in shards), **results)
    assert line in refused(compare.main, ["a", "x", "--json", "y.json"])
    assert not Path("y.json").exists()


def test_evaluations_that_are_unfinished_or_of_other_answers_are_not_compared(cwd, refused):
    write(Path("x"), [question(n, True, golden=("Bob",)) for n in range(3)])
    line = "question 'q0' is 'Who is number 0?' in a and 'Who is number 0?' in x, or its golden answers or"
    assert line in refused(compare.main, ["a", "x"])
    Path("x/results.json").unlink()
    assert "x is no finished evaluation: run launch/evaluate.py --resume --out x" in refused(compare.main, ["a", "x"])
