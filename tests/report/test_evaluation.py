"""Results of an evaluation: benchmarks, macro averages, the gap, and their intervals."""

import io
import json
import math

import numpy as np
import pytest
from rich.console import Console

from memsearcher_jax.report.evaluation import SCORES, show_evaluation, summarize_evaluation
from memsearcher_jax.report.statistics import bootstrap_mean
from memsearcher_jax.types import StopReason, TrajectorySummary


def summary(dataset, value, *, turns=2, tokens=(100, 300), stop=StopReason.ANSWERED, **scores):
    every = dict.fromkeys(SCORES, value) | scores
    return TrajectorySummary(dataset, None, turns, turns - 1, stop, value, every, tokens)


def sample(dataset, correct, total):
    return [summary(dataset, float(number < correct)) for number in range(total)]


SEVERAL = [*sample("nq", 30, 40), *sample("hotpotqa", 5, 10), *sample("musique", 1, 4), *sample("popqa", 0, 3)]
TRAINED = ("nq", "hotpotqa")


def test_benchmarks_have_equal_weight_in_the_averages():
    found = summarize_evaluation(SEVERAL, in_distribution=TRAINED)
    assert {name: one.questions for name, one in found.benchmarks.items()} == {
        **{"nq": 40, "hotpotqa": 10},
        **{"musique": 4, "popqa": 3},
    }
    assert found.macro.scores["f1"].mean == pytest.approx((0.75 + 0.5 + 0.25 + 0.0) / 4)
    assert found.in_distribution.benchmarks == TRAINED
    assert found.out_of_distribution.benchmarks == ("musique", "popqa")
    assert found.in_distribution.scores["exact_match"].mean == pytest.approx(0.625)
    assert found.out_of_distribution.scores["exact_match"].mean == pytest.approx(0.125)
    assert found.gap["exact_match"].mean == pytest.approx(0.5)


def test_intervals_agree_with_the_normal_approximation_for_many_questions():
    """The variances of independent benchmarks add up, with the squares of their weights."""
    found = summarize_evaluation(
        [*sample("nq", 300, 1000), *sample("hotpotqa", 500, 1000), *sample("popqa", 200, 1000)], in_distribution=TRAINED
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


def test_no_gap_without_both_distributions():
    for chosen, trained_on in ((sample("nq", 1, 2), TRAINED), (SEVERAL, ()), (sample("", 1, 2), TRAINED)):
        found = summarize_evaluation(chosen, in_distribution=trained_on)
        assert found.in_distribution is found.out_of_distribution is found.gap is None


def test_a_single_benchmark_is_its_own_average():
    found = summarize_evaluation(sample("", 3, 8), in_distribution=TRAINED, default_dataset="encyclopedia")
    assert list(found.benchmarks) == ["encyclopedia"]
    assert found.macro.scores == found.benchmarks["encyclopedia"].scores
    assert found.macro.scores["f1"].mean == 3 / 8


def test_intervals_do_not_depend_on_the_other_benchmarks():
    alone = summarize_evaluation(sample("nq", 30, 40), in_distribution=TRAINED).benchmarks["nq"]
    assert summarize_evaluation(SEVERAL, in_distribution=TRAINED).benchmarks["nq"] == alone
    assert summarize_evaluation(SEVERAL, in_distribution=TRAINED, seed=1).benchmarks["nq"] != alone


def test_every_score_has_its_own_mean():
    values = {name: (number + 1) / 10 for number, name in enumerate(SCORES)}
    found = summarize_evaluation([summary("nq", 0.0, **values), summary("nq", 0.0)], in_distribution=())
    means = {name: one.mean for name, one in found.benchmarks["nq"].scores.items()}
    assert means == pytest.approx({name: value / 2 for name, value in values.items()})


def test_turns_searches_tokens_and_stop_reasons():
    some = [
        summary("nq", 1.0, turns=1, tokens=(100,)),
        summary("nq", 0.0, turns=3, tokens=(100, 400, 200), stop=StopReason.MAX_TURNS),
        summary("nq", 1.0, turns=0, tokens=(), stop=StopReason.CONTEXT_FULL),
        summary("nq", 0.0, turns=0, tokens=()),
    ]
    found = summarize_evaluation(some, in_distribution=()).benchmarks["nq"]
    assert (found.turns, found.searches) == (1.0, 0.0)
    assert found.tokens_per_turn == 200
    assert (found.mean_peak_context_tokens, found.peak_context_tokens) == (125, 400)
    assert found.stops == {"answered": 0.5, "max_turns": 0.25, "context_full": 0.25}
    assert summarize_evaluation(some[3:], in_distribution=()).benchmarks["nq"].tokens_per_turn == 0.0


def test_json_fields():
    encoded = json.loads(json.dumps(summarize_evaluation(SEVERAL, in_distribution=TRAINED).to_json(), allow_nan=False))
    assert encoded["benchmarks"]["nq"]["scores"]["exact_match"].keys() == {"mean", "low", "high"}
    assert encoded["gap"]["exact_match"]["mean"] == pytest.approx(0.5)
    assert encoded["out_of_distribution"]["benchmarks"] == ["musique", "popqa"]
    assert (encoded["confidence_level"], encoded["n_resamples"]) == (0.95, 10_000)


def test_missing_questions_and_scores_raise():
    with pytest.raises(ValueError, match="has no questions"):
        summarize_evaluation([], in_distribution=())
    old = TrajectorySummary(
        "nq", None, 1, 0, StopReason.ANSWERED, 1.0, {"exact_match": 1.0, "f1": 1.0, "cover_exact_match": 1.0}, (1,)
    )
    with pytest.raises(ValueError, match="no score precision, an older version wrote it: evaluate again"):
        summarize_evaluation([old], in_distribution=())


def printed(found, width=80):
    stream = io.StringIO()
    show_evaluation(found, Console(file=stream, width=width))
    return stream.getvalue()


def test_the_table_fits_a_narrow_terminal():
    lines = printed(summarize_evaluation(SEVERAL, in_distribution=TRAINED)).splitlines()
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
    output = printed(summarize_evaluation(sample("", 1, 2), in_distribution=TRAINED, default_dataset="encyclopedia"))
    assert "encyclopedia" in output
    assert not any(word in output for word in ("average", "distribution", "gap"))


def test_stop_reasons_are_printed_and_untrusted_names_are_escaped():
    some = [summary("[red]\x1b[2J", 1.0)] * 3 + [summary("[red]\x1b[2J", 0.0, stop=StopReason.MAX_TURNS)]
    output = printed(summarize_evaluation(some, in_distribution=()), width=160)
    assert "answered 75.0, max_turns 25.0" in output
    assert "[red]\\x1b[2J" in output
    assert "\x1b[2J" not in output
