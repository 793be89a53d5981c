import gzip
import json
import subprocess
import sys
from dataclasses import replace
from datetime import date

import pyarrow as pa
import pytest
from pyarrow import parquet

from memsearcher_jax.canonical import canonical
from memsearcher_jax.data.benchmarks import BENCHMARKS, resolve
from memsearcher_jax.data.config import DataConfig
from memsearcher_jax.data.problems import load
from memsearcher_jax.data.readers import read_problems
from memsearcher_jax.data.synthetic.encyclopedia import EncyclopediaConfig, make_encyclopedia
from memsearcher_jax.rl.setup import select_test_problems
from memsearcher_jax.types import Problem

SMALL = EncyclopediaConfig(train_people=16, test_people=16, other_people=0, train_questions=12, test_questions=6)


def row(**changes):
    fields = {"id": "q0", "question": "Who?", "golden_answers": ["Ann", "Änn"]} | changes
    return json.dumps({name: value for name, value in fields.items() if value is not ...}).encode() + b"\n"


def test_reads_rows_with_and_without_metadata(tmp_path):
    content = row() + b"\n" + row(id=1, question="誰?\u2028", metadata={"hops": 2}) + row(id="2", metadata=None)
    (tmp_path / "q.jsonl").write_bytes(content)
    assert read_problems(tmp_path / "q.jsonl") == [
        Problem("q0", "Who?", ("Ann", "Änn")),
        Problem("1", "誰?\u2028", ("Ann", "Änn"), {"hops": 2}),
        Problem("2", "Who?", ("Ann", "Änn")),
    ]


MALFORMED = [
    (row()[:-9], "not JSON"),
    (b"3\n", "a JSON object is needed, found int"),
    (row(question="  "), 'field "question" is empty'),
    (row(golden_answers=[]), 'field "golden_answers" must be a list with at least one answer'),
    (row(golden_answers="['Ann']"), 'field "golden_answers" is not JSON'),
    (row(golden_answers=["Ann", 3]), 'field "golden_answers" must be text, found int'),
    (row(metadata=["x"]), 'field "metadata" must be an object, found list'),
    (row(metadata={"a": [float("nan")]}), 'field "metadata": Out of range float values'),
    (row(metadata={"a": 1}).replace(b'"a": 1', b'"a": ' + b"[" * 50_000), "not JSON that can be read ("),
    (row(metadata={"supporting_titles": 5}), "field \"metadata\": problem 'q0': metadata.supporting_titles must be a"),
    (row(id="first"), 'id "first" occurs twice'),
]


@pytest.mark.parametrize(("line", "message"), MALFORMED)
def test_malformed_row_is_an_error_or_skipped(tmp_path, line, message):
    path = tmp_path / "q.jsonl"
    path.write_bytes(row(id="first") + line.rstrip(b"\n") + b"\n" + row(id="last"))
    with pytest.raises(ValueError) as caught:
        read_problems(path)
    assert str(caught.value).startswith(f"{path}:2: {message}")
    assert "\n" not in str(caught.value)
    skipped = []
    assert [problem.id for problem in read_problems(path, skipped.append)] == ["first", "last"]
    assert skipped == [str(caught.value)]


def test_file_without_usable_rows_is_an_error(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_bytes(b"\n\n")
    with pytest.raises(ValueError, match="holds no questions"):
        read_problems(empty)
    empty.write_bytes(b"{\n")
    with pytest.raises(ValueError, match="holds no questions"):
        read_problems(empty, on_malformed=lambda message: None)


def test_load_concatenates_files_and_counts_skipped_rows(tmp_path):
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_bytes(row(id="0") + b"{\n")
    second.write_bytes(row(id="0", question="Why?") + row(id="1"))
    config = DataConfig(train=(str(first), str(second)), malformed="skip")
    problems = load(config, tmp_path / "data")
    assert [(p.id, p.question) for p in problems.train] == [("0", "Who?"), ("0", "Why?"), ("1", "Who?")]
    assert list(problems.test) == []
    again = load(config, tmp_path / "data")
    assert list(again.train) == list(problems.train) and again.skipped == problems.skipped
    assert len(again.skipped) == 1 and again.skipped[0].startswith(f"{first}:2: not JSON")
    with pytest.raises(ValueError, match=r"a\.jsonl:2: not JSON"):
        load(DataConfig(train=(str(first),)), tmp_path / "data")


def test_load_without_files_generates_the_encyclopedia(tmp_path):
    config = DataConfig(encyclopedia=SMALL)
    assert config.is_synthetic and not DataConfig(test=("x",)).is_synthetic
    problems, encyclopedia = load(config, tmp_path), make_encyclopedia(SMALL)
    assert (tuple(problems.train), tuple(problems.test)) == (encyclopedia.train, encyclopedia.test)


@pytest.mark.parametrize("name", [name for name, one in BENCHMARKS.items() if one.in_paper])
def test_load_benchmark_by_name(shared, tmp_path, name):
    root = shared / "data" / "benchmarks"
    (path,) = (root / name).glob("*.jsonl")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    problems = load(DataConfig(test=(name,), root=str(root)), tmp_path / "data").test
    assert len(problems) == (75 if name == "bamboogle" else 300)
    assert [(p.id, p.question, list(p.golden_answers), p.metadata) for p in problems] == [
        (f"{name}/{r['id']}", r["question"], [canonical(answer) for answer in r["golden_answers"]], {"source": name})
        for r in rows
    ]
    as_file = load(DataConfig(test=(str(path),)), tmp_path / "data").test
    assert [p.id for p in as_file] == [r["id"] for r in rows], "a file keeps its ids"


def test_questions_are_joined(tmp_path):
    """Those at equal distances; what is left over is not asked."""
    file = tmp_path / "q.jsonl"
    file.write_bytes(b"".join(row(id=str(n), question=f"{n}?", golden_answers=[f"a{n}", "b"]) for n in range(5)))
    config = DataConfig(train=(str(file),), test=(str(file),), objectives=2)
    problems = load(config, tmp_path / "data")
    assert [(one.id, one.question) for one in problems.train] == [("0; 2", "0?; 2?"), ("1; 3", "1?; 3?")]
    assert list(problems.test) == list(problems.train)
    assert problems.train[0].golden == (("a0", "b"), ("a2", "b"))
    assert problems.train[0].golden_answers == ("a0; a2",)


@pytest.fixture
def flashrag(tmp_path):
    """A folder of benchmarks. As in the published files, ids repeat between them."""
    for name, split, count in (("nq", "train", 5), ("hotpotqa", "train", 3), ("nq", "test", 2), ("nq", "dev", 1)):
        folder = tmp_path / "flashrag" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{split}.jsonl").write_bytes(b"".join(row(id=f"{split}_{n}") for n in range(count)))
    (tmp_path / "flashrag" / "hotpotqa" / "dev.jsonl.gz").write_bytes(gzip.compress(row(id="dev_0")))
    return tmp_path / "flashrag"


def test_the_training_data_of_the_paper(flashrag, tmp_path):
    config = DataConfig(train=("nq", "hotpotqa"), test=("nq", "hotpotqa", "nq:dev"), root=str(flashrag))
    problems = load(config, tmp_path / "data")
    train = [f"nq/train_{n}" for n in range(5)] + [f"hotpotqa/train_{n}" for n in range(3)]
    assert [p.id for p in problems.train] == train
    assert [p.id for p in problems.test] == ["nq/test_0", "nq/test_1", "hotpotqa/dev_0", "nq/dev_0"]


@pytest.mark.parametrize(
    ("entry", "split", "message"),
    [
        ("popqa", "train", "data.train popqa: popqa has no split train with answers, only test"),
        ("hotpotqa:test", "test", "hotpotqa has no split test with answers, only train, dev"),
        ("nq:", "test", "nq/test.jsonl: no such file"),
        ("musique", "test", "musique/dev.jsonl: no such file.*RUC-NLPIR/FlashRAG_datasets.*licence: CC BY 4.0"),
        (
            "longmemeval",
            "test",
            r"s_cleaned.json: no such file \(nor longmemeval_s.json\).*xiaowu0162/.*licence: MIT",
        ),
        ("longmemeval:x", "test", "longmemeval has no split x with answers, only oracle, m, s"),
    ],
)
def test_unresolvable_entry_names_the_problem(tmp_path, entry, split, message):
    with pytest.raises((ValueError, OSError), match=message):
        resolve(entry, split, str(tmp_path))


def search_r1(**changes):
    """A row as written by Search-R1."""
    fields = {
        "id": "train_0",
        "question": "Who?",
        "golden_answers": ["Ann"],
        "data_source": "nq",
        "prompt": [{"role": "user", "content": "Answer the given question. Question: Who?"}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": ["Ann", "Änn"]}},
        "extra_info": {"index": 0, "split": "train"},
    }
    return {name: value for name, value in (fields | changes).items() if value is not ...}


def test_reads_search_r1_parquet(tmp_path):
    path = tmp_path / "train.parquet"
    last = search_r1(id="train_1", question="誰?", golden_answers=None)
    rows = [search_r1(), search_r1(data_source="hotpotqa"), last]
    parquet.write_table(pa.Table.from_pylist(rows), path)
    expected = [
        Problem("nq/train_0", "Who?", ("Ann",), {"source": "nq"}),
        Problem("hotpotqa/train_0", "Who?", ("Ann",), {"source": "hotpotqa"}),
        Problem("nq/train_1", "誰?", ("Ann", "Änn"), {"source": "nq"}),
    ]
    assert read_problems(path) == expected
    assert list(load(DataConfig(train=(str(path),)), tmp_path / "data").train) == expected


@pytest.mark.parametrize(
    ("changes", "id"),
    [
        ({"data_source": ..., "prompt": ...}, "train_0"),
        ({"reward_model": {"ground_truth": ["Ann"]}}, "nq/train_0"),
        ({"reward_model": {"ground_truth": "Ann"}}, "nq/train_0"),
        ({"reward_model": {"ground_truth": {"target": "Ann"}}}, "nq/train_0"),
        ({"golden_answers": '[ "Ann"]'}, "nq/train_0"),  # as tables hold a list
        # The files of the original MemSearcher have no ids, and Search-R1 asks for none.
        ({"id": ..., "extra_info": {"split": "dev", "index": 0}}, "nq/dev_0"),
        ({"id": ..., "extra_info": {"index": 7}}, "nq/7"),
        ({"id": ..., "extra_info": None}, "nq/1"),
    ],
)
def test_reads_parquet_rows_of_others(tmp_path, changes, id):
    path = tmp_path / "train.parquet"
    answer = {"golden_answers": ..., "reward_model": {"ground_truth": {"target": ["Ann"]}}}
    parquet.write_table(pa.Table.from_pylist([search_r1(**answer | changes)]), path)
    assert read_problems(path) == [Problem(id, "Who?", ("Ann",), {"source": "nq"} if "/" in id else {})]


def test_reads_multi_hop_questions_as_their_benchmarks_publish_them(tmp_path):
    paragraphs = [{"title": title, "is_supporting": title == "Y"} for title in "XYZ"]
    rows = [
        {"_id": "a", "supporting_facts": [["X &amp; X", 0], ["X &amp; X", 1]], "context": [["X", ["…"]]]},
        {"id": "b", "supporting_facts": {"title": ["X"], "sent_id": [0]}, "context": "[]"},
        {"id": "c", "answer_aliases": ["A\u0308nn"], "paragraphs": paragraphs, "context": [["X", ["…"]]]},
        {"id": "d", "supporting_facts": [{"title": "A\u0308", "sent_id": 0}], "paragraphs": json.dumps(paragraphs)},
        {"id": "e", "paragraphs": {name: [one[name] for one in paragraphs] for name in paragraphs[0]}},
    ]
    path = tmp_path / "train.json"
    path.write_text(json.dumps([{"question": "Who?", "answer": "Ann"} | row for row in rows]))
    read = [(one.id, one.golden_answers, one.supporting_titles) for one in read_problems(path)]
    more = [("d", ("Ann",), ("Ä", "Y")), ("e", ("Ann",), ("Y",))]
    assert read == [("a", ("Ann",), ("X & X",)), ("b", ("Ann",), ("X",)), ("c", ("Ann", "Änn"), ("Y",)), *more]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"question": ...}, 'no field "question": it holds the question alone, without a template'),
        ({"id": 1.5}, 'field "id" must be text, found float'),
        ({"golden_answers": None, "reward_model": None}, 'field "golden_answers" must be a list'),
        ({"golden_answers": None, "reward_model": {"ground_truth": 1}}, 'field "reward_model.ground_truth" must be'),
        ({"golden_answers": None, "reward_model": {"ground_truth": " "}}, 'field "reward_model.ground_truth" is empty'),
        ({"golden_answers": ..., "reward_model": ..., "answer": "A", "supporting_facts": ["XY"]}, "supporting_facts"),
        ({"data_source": 3}, 'field "data_source" must be text, found int'),
        ({"metadata": {"day": date(2020, 1, 1)}}, 'field "metadata": Object of type date is not JSON'),
    ],
)
def test_malformed_parquet_row(tmp_path, changes, message):
    path = tmp_path / "train.parquet"
    parquet.write_table(pa.Table.from_pylist([search_r1(**changes)]), path)
    with pytest.raises(ValueError) as caught:
        read_problems(path)
    assert str(caught.value).startswith(f"{path}:1: {message}")


def test_parquet_rows_are_counted_from_one_and_skipped(tmp_path):
    path = tmp_path / "train.parquet"
    rows = [search_r1(id=f"train_{n}", question="" if n == 2 else "Who?") for n in range(4)] + [search_r1()]
    parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    problems = load(DataConfig(train=(str(path),), malformed="skip"), tmp_path / "data")
    assert [p.id for p in problems.train] == ["nq/train_0", "nq/train_1", "nq/train_3"]
    assert problems.skipped == (
        f'{path}:3: field "question" is empty',
        f'{path}:5: id "nq/train_0" occurs twice',
    )


@pytest.mark.parametrize(
    "asked",
    [{name: "Who?"} for name in ("question", "input", "prompt")]
    + [{"prompt": [one]} for one in ("Who?", {"role": "user", "content": "Who?"})],
)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_question_about_a_text(tmp_path, asked, suffix):
    path, text = tmp_path / f"eval_50.{suffix}", {"context": "long", "answers": ["Ann"], "index": 4}
    parquet.write_table(pa.Table.from_pylist([asked | text]), path)
    if suffix == "jsonl":
        path.write_text(json.dumps(asked | text))
    (problem,) = read_problems(path)
    assert (problem.id, problem.question, problem.golden_answers) == ("ruler_hqa_50/4", "Who?", ("Ann",))
    assert problem.stream.chunks == ("long",)


def test_metadata_of_others_do_not_change_what_is_scored(tmp_path):
    (tmp_path / "q.jsonl").write_bytes(row(metadata={"objectives": "nq", "source": ["nq"]}))
    (problem,) = read_problems(tmp_path / "q.jsonl")
    assert problem.golden == ("Ann", "Änn") and problem.metadata == {"source": ["nq"]}
    assert select_test_problems([problem], 1) == [problem]


def test_no_text_of_a_stream_holds_half_of_a_surrogate_pair(tmp_path):
    """No tokenizer takes it, and a judge reads golden answers."""
    asked = [{"question": "\ud800?", "answer": answer} for answer in ("\ud800", ["\ud800", ["\ud800"]], 3)]
    fields = {"instance_id": "1", "data_source": "squad", "chunks": ["\ud800"], "questions_and_answers": asked}
    (tmp_path / "s.jsonl").write_text(json.dumps(fields))
    (problem,) = read_problems(tmp_path / "s.jsonl")
    assert problem.stream.chunks == ("?",) and {one.text for one in problem.stream.questions} == {"??"}
    assert [one.answer for one in problem.stream.questions] == ["?", ["?", ["?"]], 3]


@pytest.mark.parametrize("content", [b"\xef\xbb\xbf" + row() + row(id=1), b" [\n" + row() + b"," + row(id=1) + b"]"])
def test_json_files_hold_lines_or_a_list(tmp_path, content):
    """Hugging Face's datasets writes lines to any name, json.dump a list."""
    (tmp_path / "q.json").write_bytes(content)
    assert [problem.id for problem in read_problems(tmp_path / "q.json")] == ["q0", "1"]


def test_truncated_parquet_file(tmp_path):
    path = tmp_path / "train.parquet"
    parquet.write_table(pa.Table.from_pylist([search_r1()]), path)
    path.write_bytes(path.read_bytes()[:-20])
    for content in (path.read_bytes(), b"", b"PAR1"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"train\.parquet: not a readable parquet file") as caught:
            read_problems(path)
        assert "\n" not in str(caught.value)
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_problems(tmp_path / "none.parquet")


def test_tfds_is_imported_for_files_and_tensorflow_never(tmp_path):
    (tmp_path / "q.jsonl").write_bytes(row())
    code = (
        "import sys; from pathlib import Path; from memsearcher_jax.data import problems;"
        "print('tensorflow_datasets' in sys.modules);"
        "problems.load(problems.DataConfig(), Path('none')).train[0];"
        "print('tensorflow_datasets' in sys.modules);"
        f"problems.load(problems.DataConfig(train=({str(tmp_path / 'q.jsonl')!r},)), Path({str(tmp_path)!r})).train[0];"
        "print('tensorflow_datasets' in sys.modules, 'tensorflow' in sys.modules, 'jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\nFalse\nTrue False False\n", "nothing else may be printed either"


def test_problems_of_a_file_are_left_out_of_training(tmp_path):
    (tmp_path / "q.jsonl").write_bytes(b"".join(row(id=str(number)) for number in range(4)))
    (tmp_path / "hopeless.jsonl").write_text('{"id": "1", "reasons": []}\n{"id": 3}\n')
    files = (str(tmp_path / "q.jsonl"),)
    config = DataConfig(train=files, test=files, exclude=str(tmp_path / "hopeless.jsonl"))
    splits = load(config, tmp_path / "data")
    assert ([one.id for one in splits.train], len(splits.test)) == (["0", "2"], 4)
    generated = load(DataConfig(encyclopedia=SMALL), tmp_path / "data").train
    (tmp_path / "hopeless.jsonl").write_text('{"id": "train_5"}\n')
    left = load(DataConfig(encyclopedia=SMALL, exclude=str(tmp_path / "hopeless.jsonl")), tmp_path / "data").train
    assert [one.id for one in left] == [one.id for one in generated if one.id != "train_5"]
    with pytest.raises(ValueError, match=r"data.exclude .*hopeless.jsonl: none of its 1 ids is a training problem"):
        load(config, tmp_path / "data")
    (tmp_path / "other.jsonl").write_bytes(row(id="1", question="Where?"))
    (tmp_path / "hopeless.jsonl").write_text('{"id": "1"}\n')
    with pytest.raises(ValueError, match="an id is of two questions"):
        load(replace(config, train=(*files, str(tmp_path / "other.jsonl"))), tmp_path / "data")
    for selection in ({"exclude": str(tmp_path / "q.jsonl")}, {"objectives": 5}):
        with pytest.raises(ValueError, match=r"data\.objectives leaves none of 4 problems"):
            load(DataConfig(train=files, **selection), tmp_path / "data")


def test_what_settings_leave_out_has_a_line(tmp_path):
    rows = [{"id": str(number), "question": "Is it so?", "golden_answers": ["yes"]} for number in range(2)]
    rows += [{"id": f"s{number}", "question": "Where?", "golden_answers": [f"Town {number}"]} for number in range(4)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "exclude.jsonl").write_text('{"id": "s0"}\n')
    config = DataConfig(train=(str(tmp_path / "q.jsonl"),), test=(str(tmp_path / "q.jsonl"),), questions="span")
    config = replace(config, exclude=str(tmp_path / "exclude.jsonl"), objectives=2)
    assert load(config, tmp_path / "data").left_out == (
        "data.exclude leaves out 1 of 6 train problems",
        "data.questions span leaves out 2 of 5 train questions, which can be guessed",
        "data.objectives 2 leaves out a rest of 1 train questions",
        "data.questions span leaves out 2 of 6 test questions, which can be guessed",
    )
    assert load(DataConfig(train=(str(tmp_path / "q.jsonl"),)), tmp_path / "data").left_out == ()


def test_each_of_several_files_is_a_source(tmp_path):
    """An evaluation has a row for each; a file alone, a benchmark and a row that names its source are as before."""
    question = {"id": "1", "question": "Where?", "golden_answers": ["There"]}
    for name in ("a/easy.jsonl", "a/hard.v2.jsonl", "b/easy.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        rows = [question, question | {"id": "2", "data_source": "nq"}]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def sources(*names):
        problems = load(DataConfig(test=tuple(str(tmp_path / name) for name in names)), tmp_path / "data").test
        return [problem.metadata.get("source") for problem in problems], [problem.id for problem in problems]

    assert sources("a/easy.jsonl") == ([None, "nq"], ["1", "nq/2"])
    assert sources("a/easy.jsonl", "a/hard.v2.jsonl")[0] == ["easy", "nq", "hard.v2", "nq"]
    assert sources("a/easy.jsonl", "b/easy.jsonl")[0] == ["a/easy", "nq", "b/easy", "nq"]
    assert sources("a/easy.jsonl", "b/easy.jsonl")[1] == ["1", "nq/2"] * 2
