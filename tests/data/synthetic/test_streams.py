"""Streams: published file formats, malformed rows, and the synthetic generator."""

import json
import re
from dataclasses import replace

import pyarrow as pa
import pytest
from pyarrow import parquet

from memsearcher_jax.agent.memalpha.reward import question_score
from memsearcher_jax.data import problems
from memsearcher_jax.data.config import DataConfig
from memsearcher_jax.data.readers import read_problems
from memsearcher_jax.data.synthetic.streams import KINDS, SyntheticStreamConfig, make_streams
from memsearcher_jax.jsonl import MalformedRow
from memsearcher_jax.types import Stream, StreamQuestion

SMALL = SyntheticStreamConfig(train_streams=6, test_streams=4, test_chunks=(10, 40), questions=8)


def row(**changes):
    """A row as published by Memalpha."""
    questions = [{"question": "Who sailed?", "answer": "Ann"}, {"question": "Which class?", "answer": "3"}]
    return {
        "instance_id": "squad_0",
        "prompt": "shown to nobody",
        "chunks": json.dumps(["Ann sailed.", "Bob stayed."]),
        "questions_and_answers": json.dumps(questions),
        "data_source": "squad",
        "metadata": json.dumps({"source": "not this one"}),
        "num_chunks": 2,
        "num_questions": 2,
    } | changes


def write_parquet(tmp_path, *rows):
    path = tmp_path / "streams.parquet"
    parquet.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def test_memalpha_rows(tmp_path):
    half = '["half \\ud800 pair", "b"]'
    first, second = read_problems(write_parquet(tmp_path, row(), row(instance_id="squad_1", chunks=half)))
    assert (first.id, second.id) == ("squad/squad_0", "squad/squad_1")
    assert second.stream.chunks == ("half ? pair", "b"), "no lone surrogates"
    assert first.question == "2 chunks of squad, 2 questions"
    assert first.stream == Stream(
        "squad",
        ("Ann sailed.", "Bob stayed."),
        (StreamQuestion("Who sailed?", "Ann"), StreamQuestion("Which class?", "3")),
    )
    lines = tmp_path / "streams.jsonl"
    lines.write_text(json.dumps(row(chunks=["Ann sailed.", "Bob stayed."])) + "\n")
    assert read_problems(lines) == [first]


def test_memory_agent_bench_answers_are_lists(tmp_path):
    entries = [{"question": "Who?", "answer": ["Ann", "Anne"]}, {"question": "Which?", "answer": [3]}]
    (one,) = read_problems(
        write_parquet(tmp_path, row(data_source="ruler_qa1_197K", questions_and_answers=json.dumps(entries)))
    )
    questions = one.stream.questions
    assert [question.answer for question in questions] == [["Ann", "Anne"], [3]]
    assert question_score("ruler_qa1_197K", "It was Anne.", questions[0].answer) == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunks": "[]"}, 'field "chunks" must be a list with at least one entry'),
        ({"chunks": '["a", " "]'}, 'field "chunks" must be a list of texts, none of them empty'),
        ({"chunks": "[" * 50_000}, 'field "chunks" is not JSON'),
        ({"questions_and_answers": None}, 'field "questions_and_answers" must be a list'),
        ({"questions_and_answers": '[{"question": "q"}]'}, "must be a text, and its"),
        ({"questions_and_answers": '[{"question": "q", "answer": null}]'}, 'its "answer" a text or a list of texts'),
        ({"data_source": ""}, 'field "data_source" is empty'),
        ({"instance_id": None}, 'field "instance_id" must be text'),
    ],
)
def test_malformed_row_is_an_error_or_skipped(tmp_path, changes, message):
    good, bad = row(instance_id="good"), row(**changes)
    path = write_parquet(tmp_path, good, bad)
    with pytest.raises(MalformedRow, match=re.escape(message)) as caught:
        read_problems(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    messages = []
    assert [problem.id for problem in read_problems(path, messages.append)] == ["squad/good"]
    assert len(messages) == 1


def test_stored_streams_round_trip(tmp_path):
    path = write_parquet(tmp_path, row())
    config = DataConfig(train=(str(path),), test=(str(path),))
    loaded = problems.load(config, tmp_path / "data")
    assert list(loaded.train) == list(loaded.test) == read_problems(path)
    generated = problems.load(DataConfig(synthetic="streams", streams=SMALL), tmp_path / "data")
    assert {"train": tuple(generated.train), "test": tuple(generated.test)} == make_streams(SMALL)


def test_streams_have_the_configured_lengths_and_kinds():
    made = make_streams(SMALL)
    assert made == make_streams(SMALL) and made["test"] != make_streams(replace(SMALL, seed=1))["test"]
    assert [len(problem.stream.chunks) for problem in made["train"]] == [10] * 6
    assert [len(problem.stream.chunks) for problem in made["test"]] == [10, 40, 10, 40]
    for problem in (*made["train"], *made["test"]):
        kinds = [question.kind for question in problem.stream.questions]
        assert {kind: kinds.count(kind) for kind in KINDS} == dict.fromkeys(KINDS, 2)


def test_every_question_is_answered_by_exactly_one_chunk():
    subjects = {
        "person": "does (.*) work for",
        "event": "did (.*) meet",
        "fact": "made (.*)\\?",
        "rule": "about (.*)\\?",
    }
    streams = [(split, one, one.stream) for split, problems in make_streams(SMALL).items() for one in problems]
    split_of = {}
    for split, problem, stream in streams:
        for question in stream.questions:
            subject = re.search(subjects[question.kind], question.text)[1]
            assert split_of.setdefault(subject, split) == split, "the same subject in both splits"
            matches = [
                (other.id, chunk) for _, other, candidate in streams for chunk in candidate.chunks if subject in chunk
            ]
            assert [identity for identity, _ in matches] == [problem.id]
            assert question_score(stream.source, matches[0][1], question.answer) == 1.0
    assert len(split_of) == 10 * 8


def test_splits_share_no_name():
    """Answers included, dates and ordinary words excluded."""
    names = {
        split: {
            name
            for one in problems
            for chunk in one.stream.chunks
            for name in re.findall(r"(?!The )[A-Z]\w+ [A-Z]\w+", chunk)
        }
        for split, problems in make_streams(SMALL).items()
    }
    assert names["train"] and not names["train"] & names["test"]


def test_short_streams_cover_the_months_of_long_ones():
    """Without span_days, only long streams would reach the summer and the next year."""

    def months(config, split):
        days = [chunk.split(".")[0].split() for one in make_streams(config)[split] for chunk in one.stream.chunks]
        return {(month, year) for _, month, year in days}

    config = replace(SMALL, train_streams=150, test_streams=20, test_chunks=(130,), span_days=730)
    assert len(months(config, "train")) == 24
    assert months(config, "test") <= months(config, "train")
    assert months(SMALL, "train") == {("January", "2030")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"questions": 50}, "data.streams.questions is 50, but a stream of 10 chunks has 40 statements"),
        ({"test_chunks": ()}, "data.streams.test_chunks is empty"),
    ],
)
def test_impossible_streams_are_errors(change, message):
    with pytest.raises(ValueError, match=message):
        make_streams(replace(SMALL, **change))
