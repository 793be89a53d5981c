import gzip
import json
import subprocess
import sys

import pytest

from memsearcher_jax.agent.types import Problem
from memsearcher_jax.data.problems import DataConfig, check_questions, load, read_questions
from memsearcher_jax.data.world import WorldConfig, make_world

BENCHMARKS = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
SMALL = WorldConfig(train_people=16, test_people=16, other_people=0, train_questions=12, test_questions=6)


def row(**changes):
    fields = {"id": "q0", "question": "Who?", "golden_answers": ["Ann", "Änn"]} | changes
    return json.dumps({name: value for name, value in fields.items() if value is not ...}).encode() + b"\n"


def test_reads_rows_with_and_without_metadata(tmp_path):
    content = row() + b"\n" + row(id=1, question="誰?\u2028", metadata={"hops": 2}) + row(id="2", metadata=None)
    plain, compressed = tmp_path / "q.jsonl", tmp_path / "q.jsonl.gz"
    plain.write_bytes(content)
    compressed.write_bytes(gzip.compress(content))
    assert (
        read_questions(plain)
        == read_questions(compressed)
        == [
            Problem("q0", "Who?", ("Ann", "Änn")),
            Problem("1", "誰?\u2028", ("Ann", "Änn"), {"hops": 2}),
            Problem("2", "Who?", ("Ann", "Änn")),
        ]
    )


MALFORMED = [
    (row()[:-9], "not JSON"),
    (b"3\n", "a JSON object is needed, found int"),
    (row(id=...), 'no field "id"'),
    (row(id=None), 'field "id" must be text, found NoneType'),
    (row(question=...), 'no field "question"'),
    (row(question="  "), 'field "question" is empty'),
    (row(question=["Who?"]), 'field "question" must be text, found list'),
    (row(golden_answers=...), 'field "golden_answers" must be a list'),
    (row(golden_answers="Ann"), 'field "golden_answers" must be a list'),
    (row(golden_answers=[]), 'field "golden_answers" must be a list with at least one answer'),
    (row(golden_answers=["Ann", 3]), 'field "golden_answers" must be text, found int'),
    (row(metadata=["x"]), 'field "metadata" must be an object, found list'),
    (row(id="first"), 'id "first" occurs twice'),
]


@pytest.mark.parametrize(("line", "message"), MALFORMED)
def test_a_malformed_row_is_refused_or_skipped(tmp_path, line, message):
    path = tmp_path / "q.jsonl"
    path.write_bytes(row(id="first") + line.rstrip(b"\n") + b"\n" + row(id="last"))
    with pytest.raises(ValueError) as caught:
        read_questions(path)
    assert str(caught.value).startswith(f"{path}:2: {message}")
    assert "\n" not in str(caught.value)
    skipped = []
    assert [problem.id for problem in read_questions(path, skipped.append)] == ["first", "last"]
    assert skipped == [str(caught.value)]


def test_files_without_questions(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_bytes(b"\n\n")
    with pytest.raises(ValueError, match="holds no questions"):
        read_questions(empty)
    empty.write_bytes(b"{\n")
    with pytest.raises(ValueError, match="holds no questions"):
        read_questions(empty, skip=lambda line: None)
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_questions(tmp_path / "absent.jsonl")


def test_load_joins_files_and_counts_what_it_skips(tmp_path):
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_bytes(row(id="0") + b"{\n")
    second.write_bytes(row(id="0", question="Why?") + row(id="1"))
    config = DataConfig(train=(str(first), str(second)), malformed="skip")
    problems = load(config, tmp_path / "data")
    assert [(p.id, p.question) for p in problems.train] == [("0", "Who?"), ("0", "Why?"), ("1", "Who?")]
    assert list(problems.test) == []
    assert len(problems.skipped) == 1 and problems.skipped[0].startswith(f"{first}:2: not JSON")
    with pytest.raises(ValueError, match=r"a\.jsonl:2: not JSON"):
        load(DataConfig(train=(str(first),)), tmp_path / "data")


def test_load_reads_a_changed_file_anew(tmp_path):
    path = tmp_path / "q.jsonl"
    for question in ("Who?", "Why?", "Who?"):
        path.write_bytes(row(question=question))
        assert [p.question for p in load(DataConfig(test=(str(path),)), tmp_path / "data").test] == [question]


def test_without_files_it_is_the_embedded_world(tmp_path):
    config = DataConfig(world=SMALL)
    assert config.embedded and not DataConfig(test=("x",)).embedded
    problems, world = load(config, tmp_path), make_world(SMALL)
    assert (tuple(problems.train), tuple(problems.test)) == (world.train, world.test)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_loads_the_benchmarks(shared, tmp_path, name):
    (path,) = (shared / "data" / "benchmarks" / name).glob("*.jsonl")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    problems = load(DataConfig(test=(str(path),)), tmp_path).test
    assert len(problems) == (75 if name == "bamboogle" else 300)
    assert [(p.id, p.question, list(p.golden_answers)) for p in problems] == [
        (r["id"], r["question"], r["golden_answers"]) for r in rows
    ]


def test_question_budget():
    problems = [Problem(name, text, ("x",)) for name, text in (("a", "one"), ("b", "1 2 3 4"), ("c", "1 2 3 4 5"))]

    def words(text):
        return len(text.split())

    check_questions(problems, words, 5)
    with pytest.raises(ValueError, match=r'question "b" has 4 tokens and the budget is 3 \(2 such questions\)'):
        check_questions(problems, words, 3)


def test_no_tensorflow_and_a_light_config(tmp_path):
    code = (
        "import sys; from pathlib import Path; from memsearcher_jax.data import problems;"
        "print('tensorflow_datasets' in sys.modules);"
        f"problems.load(problems.DataConfig(), Path({str(tmp_path)!r})).train[0];"
        "print('tensorflow_datasets' in sys.modules, 'tensorflow' in sys.modules, 'jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\nTrue False False\n", "nothing else may be printed either"
