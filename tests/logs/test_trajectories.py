"""Trajectories on disk: exact round trip, atomic writes, errors."""

import gzip
import json
import math
from dataclasses import make_dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memsearcher_jax.logs.atomic_write import atomic_write
from memsearcher_jax.logs.trajectories import (
    compress_trajectories,
    decode_trajectory,
    encode_trajectory,
    failure,
    read_trajectories,
    step_path,
)
from memsearcher_jax.types import (
    Context,
    Outcome,
    Passage,
    Problem,
    Query,
    ScoredTrajectory,
    SearchResult,
    StopReason,
    Trajectory,
    Turn,
)
from tests import samples

# A model can write lone surrogates and line separators, which break careless writers.
text = st.text() | st.sampled_from(["\ud800", "a\u2028b\x85c\r\n", "\x1b[31m", "<|im_end|>"])
number = st.floats(allow_nan=False)


def several(one):
    return st.lists(one, max_size=2).map(tuple)


queries, passages = several(st.builds(Query, text, st.integers())), several(st.builds(Passage, text, text, number))
results = several(st.builds(SearchResult, passages, text))
turns = st.builds(Turn, text, text, several(text), queries, results, text, text, text)
columns = st.lists(
    st.tuples(st.integers(0, 152_063), st.floats(allow_nan=False, width=32), st.booleans()), max_size=5
).map(lambda tokens: tuple(zip(*tokens, strict=True)) if tokens else ((),) * 3)
contexts = st.builds(lambda columns, version: Context(*columns, version), columns, st.integers(0, 9))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | text, lambda inner: st.lists(inner) | st.dictionaries(text, inner)
)
trajectories = st.builds(
    Trajectory,
    problem=st.builds(Problem, text, text, several(text), st.dictionaries(text, json_values, max_size=2)),
    rollout=st.integers(0, 9),
    outcome=st.builds(
        Outcome,
        st.sampled_from(StopReason),
        text,
        several(turns),
        st.dictionaries(text, st.integers() | st.booleans() | number, max_size=2),
        text,
    ),
    contexts=several(contexts),
    transcript=text,
)
scored = st.builds(
    ScoredTrajectory, trajectories, number, text, st.dictionaries(text, number, max_size=2), st.lists(number).map(tuple)
)


def simple(**changes):
    context = Context((1, 2), (0.0, -0.5), (False, True))
    return samples.scored(turns=(), contexts=(context,), transcript="text", **changes)


@settings(max_examples=60, deadline=None)
@given(st.lists(scored, max_size=3))
def test_round_trip(tmp_path_factory, records):
    path = tmp_path_factory.mktemp("round") / "step.jsonl.gz"
    atomic_write(path, compress_trajectories(records))
    assert list(read_trajectories(path)) == records


def test_the_file_is_strict_json_lines_with_the_documented_fields(tmp_path):
    path = step_path(tmp_path, 12)
    atomic_write(path, compress_trajectories([simple(scores={"kl": math.nan}), simple()]))
    assert path == tmp_path / "trajectories" / "step_000012.jsonl.gz"
    first, second = gzip.decompress(path.read_bytes()).decode("ascii").splitlines()
    record = json.loads(first, parse_constant=pytest.fail)
    assert record["scores"] == {"kl": "NaN"}
    assert compress_trajectories([simple()]) == compress_trajectories([simple()])
    assert record["contexts"] == [{"ids": [1, 2], "logprobs": [0.0, -0.5], "sampled": [0, 1], "version": 0}]
    assert record["outcome"]["stop"] == "answered"
    fields = "problem rollout reward reason scores context_rewards outcome contexts transcript"
    assert set(json.loads(second)) == set(fields.split())


def test_fields_that_only_a_workflows_outcome_has_are_not_stored():
    one = simple()
    kind = make_dataclass("OwnOutcome", [("memory", str, "core")], bases=(Outcome,), frozen=True)
    outcome = kind(**vars(one.trajectory.outcome))
    line = encode_trajectory(replace(one, trajectory=replace(one.trajectory, outcome=outcome)))
    assert decode_trajectory("line 1", line) == one


def test_metadata_that_json_cannot_represent_raises(tmp_path):
    with pytest.raises(ValueError, match="problem 'q1' cannot be written as JSON"):
        atomic_write(tmp_path / "x.gz", compress_trajectories([simple(metadata={"set": {1}})]))
    assert not list(tmp_path.iterdir())


def test_damaged_files_raise(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    with pytest.raises(FileNotFoundError, match="no such file"):
        list(read_trajectories(path))
    path.write_bytes(b"plain text")
    with pytest.raises(ValueError, match="damaged after line 0"):
        list(read_trajectories(path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: record.pop("outcome"), ":1: not a trajectory: trajectory: .* missing .* 'outcome'"),
        (lambda record: record["outcome"].update(stop="tired"), "outcome: stop: 'tired'"),
        (lambda record: record["problem"].update(id=["q1"]), r"problem: id: \['q1'\] is no text"),
        (lambda record: record["problem"].update(metadata=None), "metadata: None is no object"),
        (lambda record: record["problem"].update(golden_answers="Ada"), "golden_answers: 'Ada' is no list"),
        (lambda record: record["contexts"][0].update(ids=[1, 2.5]), "ids: 2.5 is no whole number"),
        (lambda record: record["contexts"][0]["ids"].append(3), "differ in length"),
        (lambda record: record["contexts"][0].update(kept=[0.0]), "not a trajectory: .*'kept'"),
        (lambda record: record.update(reward="much"), "'much' is not a number"),
    ],
)
def test_an_invalid_line_raises(tmp_path, change, message):
    path = tmp_path / "x.jsonl.gz"
    atomic_write(path, compress_trajectories([simple()]))
    record = json.loads(gzip.decompress(path.read_bytes()))
    change(record)
    path.write_bytes(gzip.compress(json.dumps(record).encode()))
    with pytest.raises(ValueError, match=message):
        list(read_trajectories(path))


@pytest.mark.parametrize(
    ("searches", "expected"),
    [
        ({"a": ["A"], "b": ["B"]}, "misread"),
        ({"a": ["A"]}, "answered_early"),
        ({"a": ["A"], "b": ["C"]}, "page_not_found"),
        ({}, "answered_early"),
    ],
)
def test_why_an_answer_is_wrong(searches, expected):
    turns = ()
    for query, titles in searches.items():
        found = SearchResult(tuple(Passage("1", f'"{title}"\ntext') for title in titles))
        turns += (Turn("", "", queries=(Query(query, 1),), results=(found,)),)

    def wrong(turns=turns, stop=StopReason.ANSWERED, exact_match=0.0):
        titles, scores = {"supporting_titles": ["a", "B"]}, {"exact_match": exact_match}
        return samples.scored(turns=turns, metadata=titles, scores=scores, stop=stop)

    assert failure(wrong()) == expected
    assert failure(wrong(exact_match=1.0)) == ""
    assert failure(wrong(stop=StopReason.MAX_TURNS)) == "no_answer"
    assert failure(wrong(turns=turns + turns)) == ("repeated_search" if turns else expected)
    assert failure(wrong(stop=StopReason.FAULT)) == ""
