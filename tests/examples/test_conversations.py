"""Invented conversations in LongMemEval's layout, read, remembered, answered and judged."""

import json

import pytest

from examples.conversations import TYPES, layout
from memsearcher_jax.data.readers import read_problems
from memsearcher_jax.data.synthetic.streams import SyntheticStreamConfig, make_stories
from memsearcher_jax.launch import evaluate
from memsearcher_jax.runs.run_dir import located
from tests.support import chat_completion

CONFIG = SyntheticStreamConfig(seed=7, train_chunks=3, statements=2, filler=1, questions=4)


@pytest.fixture
def file(tmp_path):
    entries = [layout(story, number) for number, story in enumerate(make_stories(CONFIG, 4))]
    (tmp_path / "made.json").write_text(json.dumps(entries))
    return tmp_path / "made.json"


def test_the_layout_is_that_of_longmemeval(file):
    problems = read_problems(file)
    assert [len(problem.stream.chunks) for problem in problems] == [3] * 4
    for problem in problems:
        (question,) = problem.stream.questions
        assert question.kind in TYPES.values() and len(question.evidence) == 1
        assert question.answer in question.evidence[0]
        assert any(question.evidence[0] in chunk for chunk in problem.stream.chunks)


@pytest.mark.slow
def test_an_evaluation_is_judged_by_a_service(file, tmp_path, serving, capsys):
    url, requests = serving(lambda user, times: chat_completion("yes"))
    judge = f"--judge.backend openai --judge.url {url} --judge.model any"
    room = "--agent.question_tokens 48 --memalpha.chunk_tokens 120 --sampling.context_tokens 448 --training.seq_len 448"
    weights = f"--config tiny_memalpha --checkpoint {located('package:tiny_memalpha')} --data {file}"
    evaluate.main([*f"{weights} {judge} {room}".split(), "--out", str(tmp_path / "out")])
    result = json.loads((tmp_path / "out" / "results.json").read_text())["evaluation"]["benchmarks"]["longmemeval"]
    assert result["scores"]["accuracy"]["mean"] == 1.0 and 0 <= result["scores"]["evidence_recall"]["mean"] <= 1
    assert sum(one["streams"] for one in result["types"].values()) == 4
    asked = [body["messages"][-1]["content"] for _, _, body in requests]
    assert sum(user.startswith("Question: The date is ") for user in asked) == 4
    output = capsys.readouterr().out
    assert all(kind in output for kind in result["types"])
