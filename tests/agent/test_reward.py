"""Metrics and rewards agree with the recorded reference behaviour; where it raised, ours are named one by one."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsearcher_jax.agent import reward
from memsearcher_jax.agent.config import RewardConfig
from memsearcher_jax.types import Outcome, Problem, StopReason

METRICS = {
    "em": reward.exact_match,
    "f1": reward.token_f1,
    "acc": reward.cover_exact_match,
    "precision": lambda prediction, golden: reward.token_overlap(prediction, golden).precision,
    "recall": lambda prediction, golden: reward.token_overlap(prediction, golden).recall,
}

PROMPT = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>"


def transcript(*replies: str) -> str:
    """A context in which the assistant gave these replies; the first continues an open thought."""
    between = "<|im_end|>\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n"
    return PROMPT + between.join(replies) + "<|im_end|>"


def test_recorded_metrics(recorded):
    for case in recorded("memsearcher/metrics.jsonl"):
        for key, metric in METRICS.items():
            ours = metric(case["prediction"], case["golden_answers"])
            if isinstance(case[key], dict):
                assert case["category"] in {"bad_types", "curatedtrec_regex"}, case["id"]
                assert 0.0 <= ours <= 1.0, case["id"]
            elif case["dataset_name"] == "curatedtrec" and key in {"em", "acc"}:
                # There golden answers are patterns; ours are always texts.
                golden = [reward.normalize(answer) for answer in case["golden_answers"]]
                assert ours == float(reward.normalize(case["prediction"]) in golden), case["id"]
            else:
                assert ours == case[key], (case["id"], key)


def test_recorded_rewards(recorded):
    for case in recorded("memsearcher/reward.jsonl"):
        ours = reward.memsearcher_reward(case["solution_str"], case["ground_truth"])
        if "raises" in case:
            assert case["category"] in {"exception", "exception_impl_specific"}, case["id"]
            assert 0.0 <= ours.value <= 1.0, case["id"]
            continue
        assert ours.value == case["score"], case["id"]
        if case["reason"].startswith("find box error"):
            assert ours.reason.startswith("find box error"), case["id"]
        else:
            assert ours.reason == case["reason"], case["id"]


@pytest.mark.parametrize("stop", [stop for stop in StopReason if stop is not StopReason.ANSWERED])
def test_only_an_answer_is_scored_and_a_fault_of_the_machinery_has_no_reward(stop):
    judged = reward.trajectory_reward(Outcome(stop), transcript(" t </think> \\boxed{x}"), ["x"])
    if stop in (StopReason.SEARCH_FAILED, StopReason.FAULT, StopReason.NOT_FINITE):
        assert math.isnan(judged.value) and judged.reason == f"lost: {stop.value}"
    else:
        assert judged == reward.Reward(0.0, stop.value)


@pytest.mark.parametrize(
    ("replies", "value"),
    [
        ([" t </think> \\boxed{x}"], 1.0),
        ([" t </think> \\boxed{y}"], 0.1),
        ([" \\boxed{x} </think>"], 0.0),
        ([" \\boxed{x} </think> \\boxed{y}"], 0.1),
        ([" \\boxed{x} </think> \\box"], 0.0),
        ([" t \\boxed{x}"], 0.0),
        # Emptying the thought must not repair tags that do not pair up.
        ([" t <think> u </think> \\boxed{x}"], 0.0),
        ([" t </think><tool_call> \\boxed{x}"], 0.0),
        # Whole history: only the last assistant turn answers, every turn has its format checked.
        (
            [' \\boxed{y} </think><tool_call>{"name": 1, "arguments": 2}</tool_call>', "<think> t </think> \\boxed{x}"],
            1.0,
        ),
        ([" t </think><tool_call>{bad}</tool_call>", "<think> t </think> \\boxed{x}"], 0.0),
        ([' t </think><tool_call>{"name": "a", "arguments": ' + "[" * 100_000 + "</tool_call> \\boxed{x}"], 0.0),
    ],
)
def test_trajectory_reward(replies, value):
    assert reward.trajectory_reward(Outcome(StopReason.ANSWERED, "x"), transcript(*replies), ["x"]).value == value


@pytest.mark.parametrize(
    ("settings", "reply", "value"),
    [
        ({}, "\\boxed{new york city}", 0.8),
        ({"metric": "exact_match"}, "\\boxed{new york city}", 0.1),
        ({"metric": "exact_match"}, "\\boxed{The New York}", 1.0),
        ({"metric": "cover_exact_match"}, "\\boxed{new york city}", 1.0),
        ({"wrong_answer": 0.3}, "\\boxed{x}", 0.3),
        ({"wrong_answer": 0.0}, "\\boxed{x}", 0.0),
        ({}, "<tool_call> \\boxed{new york}", 0.0),
        ({"require_format": False}, "<tool_call> \\boxed{new york}", 1.0),
        ({"require_format": False}, "<tool_call> \\boxed{x}", 0.0),
        ({"require_format": False}, "nothing", 0.0),
    ],
)
def test_settings_of_the_answer(settings, reply, value):
    text = transcript(f" t </think> {reply}")
    judged = reward.trajectory_reward(Outcome(StopReason.ANSWERED), text, ["new york"], RewardConfig(**settings))
    assert judged.value == pytest.approx(value)


@pytest.mark.parametrize(
    ("answer", "value"), [("Ada; b", 1.0), ("ada", 0.5), ("b; Ada", 0.0), ("x; B; c", 0.5), (None, 0.0), ("", 0.0)]
)
def test_answers_to_joined_questions_are_scored_one_by_one(answer, value):
    golden = Problem("q", "?; ?", ("Ada; b",), {"objectives": [["Ada"], ["a", "B"]]}).golden
    scores = reward.answer_scores(answer, golden)
    assert scores["exact_match"] == scores["f1"] == value
    settings = RewardConfig(metric="exact_match", wrong_answer=0.0)
    text = transcript(f"t</think>\\boxed{{{answer}}}")
    earned = reward.trajectory_reward(Outcome(StopReason.ANSWERED), text, golden, settings)
    assert earned.value == 2 * value, "the sum over the questions"


@given(st.lists(st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", "\\boxed{x}", "\\boxed ", "x"])))
def test_hiding_thoughts_never_repairs_a_format(bits):
    text = transcript("".join(bits))
    ours, theirs = (
        reward.trajectory_reward(Outcome(StopReason.ANSWERED, "x"), text, ["x"]),
        reward.memsearcher_reward(text, ["x"]),
    )
    if theirs.value == 0.0:
        assert ours.value == 0.0


@given(st.text(), st.lists(st.text(), max_size=3))
def test_metrics_are_bounded_and_ordered(prediction, golden):
    overlap = reward.token_overlap(prediction, golden)
    assert 0.0 <= overlap.f1 <= max(overlap.precision, overlap.recall) <= 1.0
    if reward.exact_match(prediction, golden):
        assert reward.cover_exact_match(prediction, golden) == 1.0


@given(st.text(), st.text())
def test_any_transcript_has_a_reward(text, golden):
    assert 0.0 <= reward.memsearcher_reward(PROMPT + text + "<|im_end|>", [golden]).value <= 1.0
    assert 0.0 <= reward.trajectory_reward(Outcome(StopReason.ANSWERED), text, golden).value <= 1.0
