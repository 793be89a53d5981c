"""Streams: the published layouts, what is wrong with a row, and those that are made from a seed."""

import json
import re
from dataclasses import replace

import pyarrow as pa
import pytest
from pyarrow import parquet

from memsearcher_jax.agent.memalpha_reward import question_score
from memsearcher_jax.agent.types import Problem, Stream, StreamQuestion
from memsearcher_jax.data import problems
from memsearcher_jax.data.problems import DataConfig
from memsearcher_jax.data.questions import read_questions
from memsearcher_jax.data.stream_world import KINDS, StreamConfig, make_streams
from memsearcher_jax.jsonl import MalformedRow

SMALL = StreamConfig(train_streams=6, test_streams=4, test_chunks=(10, 40), questions=8)


def row(**changes):
    """A row as Memalpha publishes it."""
    asked = [{"question": "Who sailed?", "answer": "Ann"}, {"question": "Which class?", "answer": "3"}]
    return {
        "instance_id": "squad_0",
        "prompt": "shown to nobody",
        "chunks": json.dumps(["Ann sailed.", "Bob stayed."]),
        "questions_and_answers": json.dumps(asked),
        "data_source": "squad",
        "metadata": json.dumps({"source": "not this one"}),
        "num_chunks": 2,
        "num_questions": 2,
    } | changes


def written(tmp_path, *rows):
    path = tmp_path / "streams.parquet"
    parquet.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def test_memalpha_rows(tmp_path):
    one, two = read_questions(written(tmp_path, row(), row(instance_id="squad_1")))
    assert (one.id, two.id) == ("squad/squad_0", "squad/squad_1")
    assert one.question == "2 chunks of squad, 2 questions"
    assert Stream.of(one) == Stream(
        "squad",
        ("Ann sailed.", "Bob stayed."),
        (StreamQuestion("Who sailed?", "Ann"), StreamQuestion("Which class?", "3")),
    )


def test_memory_agent_bench_rows_have_lists_of_answers(tmp_path):
    asked = [{"question": "Who?", "answer": ["Ann", "Anne"]}, {"question": "Which?", "answer": [3]}]
    (one,) = read_questions(
        written(tmp_path, row(data_source="ruler_qa1_197K", questions_and_answers=json.dumps(asked)))
    )
    questions = Stream.of(one).questions
    assert [question.answer for question in questions] == [["Ann", "Anne"], [3]]
    assert question_score("ruler_qa1_197K", "It was Anne.", questions[0].answer) == 1.0


def test_the_same_rows_in_lines_of_json(tmp_path):
    path = tmp_path / "streams.jsonl"
    plain = row(chunks=["Ann sailed.", "Bob stayed."])
    path.write_text(json.dumps(plain) + "\n")
    assert read_questions(path) == read_questions(written(tmp_path, row()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunks": "[]"}, 'field "chunks" must be a list with at least one entry'),
        ({"chunks": "[1]"}, 'field "chunks" must be a list of texts'),
        ({"chunks": '["a", " "]'}, 'field "chunks" must be a list of texts, none of them empty'),
        ({"chunks": "["}, 'field "chunks" is no JSON'),
        ({"questions_and_answers": None}, 'field "questions_and_answers" must be a list'),
        ({"questions_and_answers": '[{"question": "q"}]'}, "has a question and an answer"),
        ({"questions_and_answers": '[{"question": "q", "answer": null}]'}, "its answer a text or a list of texts"),
        ({"questions_and_answers": '[{"question": "q", "answer": []}]'}, "its answer a text or a list of texts"),
        ({"questions_and_answers": '["q"]'}, "has a question and an answer"),
        ({"num_chunks": 3}, 'field "num_chunks" is 3, but there are 2'),
        ({"num_questions": 1}, 'field "num_questions" is 1, but there are 2'),
        ({"data_source": ""}, 'field "data_source" is empty'),
        ({"instance_id": None}, 'field "id" must be text'),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path, changes, message):
    good, bad = row(instance_id="good"), row(**changes)
    path = written(tmp_path, good, bad)
    with pytest.raises(MalformedRow, match=re.escape(message)) as caught:
        read_questions(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    left_out = []
    assert [one.id for one in read_questions(path, left_out.append)] == ["squad/good"]
    assert len(left_out) == 1


def test_streams_are_stored_and_come_back(tmp_path):
    path = written(tmp_path, row())
    config = DataConfig(train=(str(path),), test=(str(path),))
    loaded = problems.load(config, tmp_path / "data")
    assert list(loaded.train) == list(loaded.test) == read_questions(path)
    made = problems.load(DataConfig(made="streams", streams=SMALL), tmp_path / "data")
    assert {"train": tuple(made.train), "test": tuple(made.test)} == make_streams(SMALL)


def test_half_a_surrogate_pair_is_mended(tmp_path):
    (one,) = read_questions(written(tmp_path, row(chunks='["half \\ud800 pair", "b"]')))
    assert Stream.of(one).chunks[0] == "half ? pair"


def test_budgets_are_checked_before_a_run():
    streams = make_streams(SMALL)["test"]

    def count(text):
        return len(text.split())

    problems.check_streams(streams, count, chunk=100, question=20)
    with pytest.raises(
        ValueError, match=r'stream "test_0" has a chunk of \d+ tokens and the budget is 20: raise memalpha'
    ):
        problems.check_streams(streams, count, chunk=20, question=20)
    with pytest.raises(
        ValueError, match=r"has a question of \d+ tokens and the budget is 5: raise agent.question_tokens"
    ):
        problems.check_streams(streams, count, chunk=100, question=5)
    with pytest.raises(ValueError, match="is no stream of chunks"):
        problems.check_streams([Problem("q", "who?", ("a",))], count, chunk=9, question=9)


def test_made_streams_are_the_same_for_a_seed_and_others_for_another():
    assert make_streams(SMALL) == make_streams(SMALL)
    assert make_streams(replace(SMALL, seed=1))["test"] != make_streams(SMALL)["test"]


def test_made_streams_have_the_lengths_and_kinds_that_were_asked_for():
    made = make_streams(SMALL)
    assert [len(Stream.of(one).chunks) for one in made["train"]] == [10] * 6
    assert [len(Stream.of(one).chunks) for one in made["test"]] == [10, 40, 10, 40]
    for one in (*made["train"], *made["test"]):
        kinds = [question.kind for question in Stream.of(one).questions]
        assert {kind: kinds.count(kind) for kind in KINDS} == dict.fromkeys(KINDS, 2)


def test_the_answer_of_every_question_stands_in_one_chunk_and_nowhere_else():
    asked = {"person": "does (.*) work for", "event": "did (.*) meet", "fact": "made (.*)\\?", "rule": "about (.*)\\?"}
    everything = [(split, one, Stream.of(one)) for split, several in make_streams(SMALL).items() for one in several]
    where = {}
    for split, problem, stream in everything:
        for question in stream.questions:
            subject = re.search(asked[question.kind], question.text)[1]
            assert where.setdefault(subject, split) == split, "asked in both splits"
            holding = [
                (other.id, chunk) for _, other, those in everything for chunk in those.chunks if subject in chunk
            ]
            assert [identity for identity, _ in holding] == [problem.id]
            assert question_score(stream.source, holding[0][1], question.answer) == 1.0
    assert len(where) == 10 * 8


def test_no_name_is_shared_by_the_splits():
    """Answers included, but for dates and the words of the language."""
    words = {
        split: {
            word
            for one in several
            for chunk in Stream.of(one).chunks
            for word in re.findall(r"(?!The )[A-Z]\w+ [A-Z]\w+", chunk)
        }
        for split, several in make_streams(SMALL).items()
    }
    assert words["train"] and not words["train"] & words["test"]


def test_a_long_stream_at_the_defaults():
    made = make_streams(StreamConfig(train_streams=2))
    assert max(len(Stream.of(one).chunks) for one in made["test"]) == 200
    assert len(made["test"]) == 12


def test_the_days_of_long_streams_are_those_of_short_ones():
    """Else only long ones would come to the summer, and to the next year."""

    def months(config, split):
        days = [chunk.split(".")[0].split() for one in make_streams(config)[split] for chunk in Stream.of(one).chunks]
        return {(month, year) for _, month, year in days}

    config = replace(SMALL, train_streams=150, test_streams=20, test_chunks=(130,), span=730)
    assert len(months(config, "train")) == 24
    assert months(config, "test") <= months(config, "train")
    assert months(SMALL, "train") == {("January", "2030")}


def test_more_questions_than_sentences():
    with pytest.raises(ValueError, match=r"data.streams.questions is 50, but a stream of 10 chunks has 40 sentences"):
        make_streams(replace(SMALL, questions=50))
