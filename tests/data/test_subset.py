"""The stratified subset of streams."""

import json
from collections import Counter

import pytest

from memsearcher_jax.data.readers import read_problems
from memsearcher_jax.data.subset import SourceCounts, stratified_subset, stream_row
from memsearcher_jax.types import Problem, Stream, StreamQuestion

# Mem-alpha, table 7: streams of each source before and after.
FULL = {"squad": 264, "hotpotqa": 1_966, "perltqa": 27, "lme_train": 45, "pubmed-rct": 90, "booksum": 1_387}
FULL |= {"icl_nlu_8296shot_balance": 180, "icl_trec_coarse_6600shot_balance": 180}


def words(text):
    return len(text.split())


def streams(counts=FULL, chunks=("a b", "c d e")):
    return [
        Problem.of_stream(f"{source}/{n}", Stream(source, chunks, (StreamQuestion("Who?", ["Ann", "An"], "kind"),)))
        for source, count in counts.items()
        for n in range(count)
    ]


def test_the_counts_are_those_of_the_paper():
    problems = streams()
    subset, counts = stratified_subset(problems, 100, 42, 30_000, words)
    assert (len(problems), len(subset)) == (4_139, 562)
    kept = Counter(problem.stream.source.partition("_")[0] for problem in subset)
    assert kept == {
        "squad": 100,
        "hotpotqa": 100,
        "perltqa": 27,
        "lme": 45,
        "pubmed-rct": 90,
        "booksum": 100,
        "icl": 100,
    }
    assert counts["icl_*"] == SourceCounts(360, 360, 100)
    order = {problem.id: row for row, problem in enumerate(problems)}
    assert [order[problem.id] for problem in subset] == sorted(order[problem.id] for problem in subset)


def test_a_draw_depends_on_the_seed_and_the_streams_of_its_source_alone():
    def squad(counts, seed):
        return [p.id for p in stratified_subset(streams(counts), 10, seed, 0, words)[0] if p.stream.source == "squad"]

    alone = squad({"squad": 50}, 1)
    assert alone == squad({"booksum": 30, "squad": 50}, 1) != squad({"squad": 50}, 2)


def test_long_streams_are_left_out_before_the_draw():
    problems = [*streams({"a": 5}), *streams({"b": 5}, chunks=("x " * 6,))]
    subset, counts = stratified_subset(problems, 100, 0, 5, words)
    assert [problem.stream.source for problem in subset] == ["a"] * 5
    assert counts["b"] == SourceCounts(5, 0, 0)


def test_questions_are_refused():
    with pytest.raises(ValueError, match="problem 'q' is a question: give files of streams"):
        stratified_subset([Problem("q", "Who?", ("Ann",))], 1, 0, 0, words)


def test_a_written_row_is_read_back(tmp_path):
    problems = streams({"squad": 2})
    file = tmp_path / "s.jsonl"
    file.write_text("".join(json.dumps(stream_row(problem)) + "\n" for problem in problems))
    assert read_problems(file) == problems
