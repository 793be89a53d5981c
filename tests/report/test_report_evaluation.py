"""The numbers of an evaluation: benchmarks, macro averages, the gap, and their intervals."""

import io
import json
import math

import numpy as np
import pytest
from rich.console import Console

from memsearcher_jax.agent.types import Stop
from memsearcher_jax.report.evaluation import SCORES, evaluation_of
from memsearcher_jax.report.evaluation_tables import show_evaluation
from memsearcher_jax.report.intervals import bootstrap_mean
from memsearcher_jax.report.page_facts import Facts


def facts(dataset, value, *, turns=2, tokens=(100, 300), stop=Stop.ANSWERED, **scores):
    every = dict.fromkeys(SCORES, value) | scores
    return Facts(dataset, None, turns, turns - 1, stop, value, every, tokens)


def sample(dataset, right, total):
    return [facts(dataset, float(number < right)) for number in range(total)]


SEVERAL = [*sample("nq", 30, 40), *sample("hotpotqa", 5, 10), *sample("musique", 1, 4), *sample("popqa", 0, 3)]
TRAINED = ("nq", "hotpotqa")


def test_benchmarks_count_the_same_however_many_questions_they_have():
    found = evaluation_of(SEVERAL, trained_on=TRAINED)
    assert {name: one.questions for name, one in found.benchmarks.items()} == {
        **{"nq": 40, "hotpotqa": 10},
        **{"musique": 4, "popqa": 3},
    }
    assert found.macro.scores["f1"].mean == pytest.approx((0.75 + 0.5 + 0.25 + 0.0) / 4)
    assert found.inside.benchmarks == TRAINED
    assert found.outside.benchmarks == ("musique", "popqa")
    assert found.inside.scores["exact_match"].mean == pytest.approx(0.625)
    assert found.outside.scores["exact_match"].mean == pytest.approx(0.125)
    assert found.gap["exact_match"].mean == pytest.approx(0.5)


def test_intervals_are_those_of_a_normal_approximation_where_questions_are_many():
    """Of the gap: variances of independent benchmarks add up, with the squares of their weights."""
    found = evaluation_of(
        [*sample("nq", 300, 1000), *sample("hotpotqa", 500, 1000), *sample("popqa", 200, 1000)], trained_on=TRAINED
    )
    shares = {"nq": 0.3, "hotpotqa": 0.5, "popqa": 0.2}
    error = {name: math.sqrt(share * (1 - share) / 1000) for name, share in shares.items()}
    gap_error = math.sqrt(error["nq"] ** 2 / 4 + error["hotpotqa"] ** 2 / 4 + error["popqa"] ** 2)
    macro_error = math.sqrt(sum(one**2 for one in error.values())) / 3
    for interval, wanted, expected in (
        (found.benchmarks["nq"].scores["recall"], 0.3, error["nq"]),
        (found.macro.scores["recall"], 1 / 3, macro_error),
        (found.gap["recall"], 0.2, gap_error),
    ):
        assert interval.mean == pytest.approx(wanted)
        assert interval.low == pytest.approx(wanted - 1.96 * expected, abs=0.004)
        assert interval.high == pytest.approx(wanted + 1.96 * expected, abs=0.004)


def test_without_two_sides_there_is_no_gap():
    for chosen, trained_on in ((sample("nq", 1, 2), TRAINED), (SEVERAL, ()), (sample("", 1, 2), TRAINED)):
        found = evaluation_of(chosen, trained_on=trained_on)
        assert found.inside is found.outside is found.gap is None


def test_one_benchmark_is_its_own_average_and_unnamed_questions_have_a_name():
    found = evaluation_of(sample("", 3, 8), trained_on=TRAINED, unnamed="world")
    assert list(found.benchmarks) == ["world"]
    assert found.macro.scores == found.benchmarks["world"].scores
    assert found.macro.scores["f1"].mean == 3 / 8


def test_another_benchmark_changes_no_interval_of_this_one():
    alone = evaluation_of(sample("nq", 30, 40), trained_on=TRAINED).benchmarks["nq"]
    assert evaluation_of(SEVERAL, trained_on=TRAINED).benchmarks["nq"] == alone
    assert evaluation_of(SEVERAL, trained_on=TRAINED, seed=1).benchmarks["nq"] != alone


def test_every_score_has_its_own_mean():
    values = {name: (number + 1) / 10 for number, name in enumerate(SCORES)}
    found = evaluation_of([facts("nq", 0.0, **values), facts("nq", 0.0)], trained_on=())
    means = {name: one.mean for name, one in found.benchmarks["nq"].scores.items()}
    assert means == pytest.approx({name: value / 2 for name, value in values.items()})


def test_what_it_took():
    some = [
        facts("nq", 1.0, turns=1, tokens=(100,)),
        facts("nq", 0.0, turns=3, tokens=(100, 400, 200), stop=Stop.MAX_TURNS),
        facts("nq", 1.0, turns=0, tokens=(), stop=Stop.CONTEXT_FULL),
        facts("nq", 0.0, turns=0, tokens=()),
    ]
    found = evaluation_of(some, trained_on=()).benchmarks["nq"]
    assert (found.turns, found.searches) == (1.0, 0.0)
    assert found.tokens_per_turn == 200
    assert (found.mean_peak_context_tokens, found.peak_context_tokens) == (125, 400)
    assert found.stops == {"answered": 0.5, "max_turns": 0.25, "context_full": 0.25}
    assert evaluation_of(some[3:], trained_on=()).benchmarks["nq"].tokens_per_turn == 0.0


def test_it_is_json():
    told = json.loads(json.dumps(evaluation_of(SEVERAL, trained_on=TRAINED).to_json(), allow_nan=False))
    assert told["benchmarks"]["nq"]["scores"]["exact_match"].keys() == {"mean", "low", "high"}
    assert told["gap"]["exact_match"]["mean"] == pytest.approx(0.5)
    assert told["outside"]["benchmarks"] == ["musique", "popqa"]
    assert (told["level"], told["draws"]) == (0.95, 10_000)


def test_what_has_no_numbers():
    with pytest.raises(ValueError, match="without a question"):
        evaluation_of([], trained_on=())
    old = Facts("nq", None, 1, 0, Stop.ANSWERED, 1.0, {"exact_match": 1.0, "f1": 1.0, "cover_exact_match": 1.0}, (1,))
    with pytest.raises(ValueError, match="no precision: it is of another version; evaluate again"):
        evaluation_of([old], trained_on=())


def printed(found, width=80):
    stream = io.StringIO()
    show_evaluation(found, Console(file=stream, width=width))
    return stream.getvalue()


def test_the_table_fits_a_narrow_terminal():
    lines = printed(evaluation_of(SEVERAL, trained_on=TRAINED)).splitlines()
    assert all(len(line) <= 80 for line in lines)
    (nq,) = (number for number, line in enumerate(lines) if line.startswith("nq ") and " 40 " in line)
    assert lines[nq].split() == ["nq", "40", *["75.0"] * 5]
    one = bootstrap_mean([1.0] * 30 + [0.0] * 10, np.random.default_rng(0))
    assert [word.count("–") for word in lines[nq + 1].split()] == [1] * 5
    assert float(lines[nq + 1].split()[0].split("–")[0]) == pytest.approx(100 * one.low, abs=5)
    (gap,) = (line for line in lines if line.startswith("gap"))
    assert gap.split() == ["gap", *["50.0"] * 5]
    (average,) = (line for line in lines if line.startswith("average"))
    assert average.split() == ["average", *["37.5"] * 5]


def test_a_table_of_one_benchmark_has_no_averages():
    said = printed(evaluation_of(sample("", 1, 2), trained_on=TRAINED, unnamed="world"))
    assert "world" in said
    assert not any(word in said for word in ("average", "distribution", "gap"))


def test_why_they_ended_is_told_and_a_hostile_name_stays_text():
    some = [facts("[red]\x1b[2J", 1.0)] * 3 + [facts("[red]\x1b[2J", 0.0, stop=Stop.MAX_TURNS)]
    said = printed(evaluation_of(some, trained_on=()), width=160)
    assert "answered 75.0, max_turns 25.0" in said
    assert "[red]\\x1b[2J" in said
    assert "\x1b[2J" not in said
