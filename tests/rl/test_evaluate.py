"""What is evaluated, how it is shared, and what its numbers are made of."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsearcher_jax.agent.types import Context, Outcome, Problem, Stop, Trajectory, Turn
from memsearcher_jax.config import RunConfig
from memsearcher_jax.report.trajectory_log import TrajectoryLog
from memsearcher_jax.rl import score
from memsearcher_jax.rl.config import EvaluationConfig
from memsearcher_jax.rl.evaluate import PART, Share, missing, questions_of, recorded


def problem(id, source="", question="Who?"):
    return Problem(id, question, ("Ada",), {"source": source} if source else {})


def run_of(*problems, questions=0):
    config = RunConfig(evaluation=EvaluationConfig(questions=questions))
    return SimpleNamespace(config=config, problems=SimpleNamespace(test=problems))


def trajectory(problem, *contexts, turns=1, answer="Ada", stop=Stop.ANSWERED):
    outcome = Outcome(stop, answer, (Turn("", f"know</think>\\boxed{{{answer}}}"),) * turns)
    transcript = f"<|im_start|>assistant\n<think>know</think>\\boxed{{{answer}}}<|im_end|>"
    return Trajectory(problem, 0, outcome, contexts, transcript)


def test_the_first_questions_of_each_benchmark():
    mixed = [problem(f"{source}{n}", source) for source in ("nq", "popqa", "") for n in range(3)]
    assert [one.id for one in questions_of(run_of(*mixed, questions=2))] == ["nq0", "nq1", "popqa0", "popqa1", "0", "1"]
    assert questions_of(run_of(*mixed)) == mixed
    with pytest.raises(ValueError, match="there are no test questions"):
        questions_of(run_of())
    with pytest.raises(ValueError, match='two test questions have the id "q": evaluate the files'):
        questions_of(run_of(problem("q"), problem("q", question="Other?")))


@given(st.integers(0, 50), st.integers(1, 7))
def test_each_question_has_one_host(questions, hosts):
    shares = [Share(host, hosts) for host in range(hosts)]
    problems = [problem(str(number)) for number in range(questions)]
    taken = [job.number for share in shares for job in missing(problems, (), share)]
    assert sorted(taken) == list(range(questions))
    assert [len(missing(problems, (), share)) for share in shares] == [share.count(questions) for share in shares]
    assert [job.problem.id for job in missing(problems, {"0", "2"}, Share())] == [
        one.id for one in problems if one.id not in ("0", "2")
    ]


def test_a_question_that_has_changed_is_refused(tmp_path):
    with TrajectoryLog(tmp_path / PART.format(0)) as log:
        log.append(score.scored(trajectory(problem("q"))))
    assert list(recorded(tmp_path, [problem("q"), problem("r")], Share())) == ["q"]
    for others in ([problem("r")], [problem("q", question="Whom?")], [problem("q", "nq")]):
        with pytest.raises(ValueError, match="question 'q' is not one of these: start another evaluation"):
            recorded(tmp_path, others, Share())


def test_only_the_owner_of_a_file_mends_it(tmp_path):
    """Another host may be writing to it."""
    parts = [tmp_path / PART.format(number) for number in range(2)]
    for part in parts:
        with TrajectoryLog(part) as log:
            log.append(score.scored(trajectory(problem(part.name))))
        part.write_bytes(part.read_bytes() + part.read_bytes()[:9])
    sizes = [part.stat().st_size for part in parts]
    assert len(recorded(tmp_path, [problem(part.name) for part in parts], Share(1, 2))) == 2
    assert [part.stat().st_size for part in parts] == [sizes[0], sizes[1] - 9]


def test_recorded_metrics_of_the_reference(shared):
    """By the names under which an evaluation writes them."""
    names = {"exact_match": "em", "f1": "f1", "cover_exact_match": "acc", "precision": "precision", "recall": "recall"}
    seen = 0
    for line in (shared / "reference/memsearcher/metrics.jsonl").read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        if case["dataset_name"] == "nq" and not any(isinstance(case[name], dict) for name in names.values()):
            ours = score.answer_scores(case["prediction"], case["golden_answers"])
            assert ours == {name: case[theirs] for name, theirs in names.items()}, case["id"]
            seen += 1
    assert seen > 50


def test_who_did_not_answer_scores_nothing():
    right = score.scored(trajectory(problem("q")))
    assert set(right.scores.values()) == {1.0}
    late = score.scored(trajectory(problem("q"), stop=Stop.MAX_TURNS))
    assert late.scores == dict.fromkeys(right.scores, 0.0)


def test_tokens_per_turn_are_those_in_context_when_the_turn_ends():
    """Also of an agent whose turns share one context, which would else look as long as its end at every turn."""
    own = [Context((1,) * tokens, (0.0,) * tokens, (False,) * (tokens - 1) + (True,)) for tokens in (10, 20)]
    sampled = (*[False] * 9, True, *[False] * 29, True)
    whole = Context((1,) * 40, (0.0,) * 40, sampled)
    for contexts, mean, peak in ((own, 15.0, 20.0), ([whole], 25.0, 40.0)):
        numbers = score.summarise([score.scored(trajectory(problem("q"), *contexts, turns=2))])
        assert (numbers["tokens_per_turn"], numbers["peak_context_tokens"]) == (mean, peak)
