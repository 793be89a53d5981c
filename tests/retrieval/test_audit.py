"""Does the corpus hold the answer?"""

import json

import pytest

from memsearcher_jax.launch import build_index
from memsearcher_jax.retrieval.audit import audit, oracle_query, summarize
from memsearcher_jax.retrieval.config import RetrievalConfig
from memsearcher_jax.retrieval.search import open_searcher
from memsearcher_jax.types import Passage, Problem
from tests.retrieval.samples import make_corpus

PASSAGES = [
    Passage("0", '"Oslo"\nThe capital of Norway is Oslo.'),
    Passage("1", '"Ibsen"\nHenrik Ibsen wrote Peer Gynt.'),
    Passage("2", '"東京"\n東京は日本の首都。'),
]


def problem(id, question, answers, titles=()):
    return Problem(id, question, tuple(answers), {"supporting_titles": list(titles)} if titles else {})


PROBLEMS = [
    problem("whole words", "Who wrote Peer Gynt?", ["A henrik  IBSEN!"], ["Ibsen"]),
    problem("part of a word", "What is it?", ["Norw", "Os"]),
    problem("missing title", "Where is Oslo?", ["Norway"], ["Oslo", "Norway"]),
    problem("yes", "Is Oslo in Norway?", ["yes"], ["Oslo"]),
    problem("no spaces", "日本の首都は?", ["日本"]),
]


def searcher(tmp_path, passages):
    return open_searcher(RetrievalConfig(method="bm25"), tmp_path / "index", passages)


def test_answers_and_titles_are_found(tmp_path):
    found = audit(PROBLEMS, searcher(tmp_path, PASSAGES), PASSAGES)
    assert [one.answers["corpus"] for one in found] == [1, 0, 1, None, 1]
    assert [one.missing_titles for one in found] == [(), (), ("Norway",), (), ()]
    assert [one.is_hopeless for one in found] == [False, True, True, False, False]
    assert found[0].answers == dict.fromkeys(found[0].answers, 1) and found[3].answers["oracle@5"] is None
    assert found[2].titles["oracle@5"] == 0.5
    assert found[2].row()["reasons"] == ["no passage has the title 'Norway'"]
    numbers = summarize(found)
    assert (numbers["questions"], numbers["with_titles"], numbers["hopeless"]) == (5, 3, 2)
    assert numbers["answers"]["corpus"] == 3 / 4 and numbers["titles"]["corpus"] == pytest.approx(2.5 / 3)
    assert oracle_query(PROBLEMS[2]) == "Oslo Norway Norway"


def test_of_a_service_only_the_results_are_known(tmp_path):
    found = audit(PROBLEMS, searcher(tmp_path, PASSAGES), None)
    assert not any(one.is_hopeless for one in found)
    numbers = summarize(found)
    assert numbers["answers"]["corpus"] is numbers["titles"]["corpus"] is None


BY_HAND = {
    "nq": {
        **dict.fromkeys(("test_135", "test_2884", "test_3500", "test_457", "test_231", "test_3284"), True),
        **dict.fromkeys(("test_718", "test_3210", "test_885", "test_3593"), False),
    },
    "hotpotqa": {
        **dict.fromkeys(("dev_1213", "dev_2966", "dev_5315", "dev_4494"), True),
        **dict.fromkeys(("dev_1242", "dev_3415", "dev_5831", "dev_132", "dev_1665", "dev_3759"), False),
    },
}
"""Twenty questions of benchmarks, searched for by hand in the 9,002 passages."""


def test_twenty_questions_that_were_checked_by_hand(shared, tmp_path):
    problems, expected = [], []
    for name, checked in BY_HAND.items():
        file = next((shared / "data" / "benchmarks" / name).glob("*.jsonl"))
        rows = {row["id"]: row for row in map(json.loads, file.read_text().splitlines())}
        problems += [problem(id, rows[id]["question"], rows[id]["golden_answers"]) for id in checked]
        expected += checked.values()
    corpus = make_corpus(shared / "data" / "wiki_mini" / "corpus.jsonl")
    found = audit(problems, searcher(tmp_path, PASSAGES), corpus)
    assert [one.answers["corpus"] for one in found] == expected


def test_the_command_writes_what_training_leaves_out(tmp_path, capsys):
    questions = [
        {"id": one.id, "question": one.question, "golden_answers": one.golden_answers, "metadata": one.metadata}
        for one in PROBLEMS
    ]
    corpus = [{"id": passage.id, "contents": passage.contents} for passage in PASSAGES]
    for name, rows in (("q.jsonl", questions), ("corpus.jsonl", corpus)):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--retrieval.corpus", str(tmp_path / "corpus.jsonl"), "--retrieval.method", "bm25", "--out", str(tmp_path)]
    with (tmp_path / "q.jsonl").open("a") as file:
        file.write('{"id": "malformed"}\n')
    build_index.main(["--audit", str(tmp_path / "q.jsonl"), "--data.malformed", "skip", *flags])
    rows = [json.loads(line) for line in (tmp_path / "hopeless.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == ["part of a word", "missing title"]
    output, errors = capsys.readouterr()
    assert "questions  question          5         2    75.0" in output and "--data.exclude" in output
    assert "skipped 1 malformed rows" in errors


def test_the_synthetic_encyclopedia_answers_its_questions(tmp_path, capsys):
    flags = ["--retrieval.method", "bm25", "--data.objectives", "2"]  # of which the audit makes single questions
    build_index.main(["--audit", "test", *flags, "--out", str(tmp_path)])
    assert (tmp_path / "hopeless.jsonl").read_text() == ""
    assert "questions  oracle          120         0   100.0" in capsys.readouterr().out
