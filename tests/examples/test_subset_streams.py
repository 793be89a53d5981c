"""The stratified subset of streams, and the file that training reads."""

import json
from collections import Counter

import pytest

from examples.warmstart import subset_streams
from memsearcher_jax.data.readers import read_problems
from memsearcher_jax.runs.run_dir import located
from memsearcher_jax.types import Problem, Stream, StreamQuestion

TOKENIZER = str(located("package:tiny"))
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
    subset = subset_streams.draw(problems, words)
    assert (len(problems), len(subset)) == (4_139, 562)
    kept = Counter(problem.stream.source.partition("_")[0] for problem in subset)
    full = dict.fromkeys(("squad", "hotpotqa", "booksum", "icl"), 100)
    assert kept == full | {"perltqa": 27, "lme": 45, "pubmed-rct": 90}
    order = {problem.id: row for row, problem in enumerate(problems)}
    assert [order[problem.id] for problem in subset] == sorted(order[problem.id] for problem in subset)


def test_a_draw_depends_on_the_seed_and_the_streams_of_its_source_alone():
    def squad(counts, seed):
        return [p.id for p in subset_streams.draw(streams(counts), words, seed) if p.stream.source == "squad"]

    alone = squad({"squad": 150}, 1)
    assert alone == squad({"booksum": 30, "squad": 150}, 1) != squad({"squad": 150}, 2)


def test_a_subset_is_written_without_long_streams(tmp_path, capsys):
    """Six streams of two sources; the last of each is long."""
    rows = [
        {
            "instance_id": str(n),
            "data_source": source,
            "chunks": ["word " * (30_001 if n == 2 else 5)],
            "questions_and_answers": [{"question": "Who?", "answer": "Ann"}],
        }
        for source in ("squad", "booksum")
        for n in range(3)
    ]
    file, out = tmp_path / "full.jsonl", tmp_path / "subset.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    subset_streams.main([str(file), "--tokenizer", TOKENIZER, "--out", str(out)])
    subset = read_problems(out)
    assert [problem for problem in read_problems(file) if not problem.id.endswith("2")] == subset
    assert "4 of 6 streams (2 of squad, 2 of booksum)" in capsys.readouterr().out
    file.write_text(json.dumps({"context": "A text.", "question": "Who?", "answers": ["Ann"]}))
    with pytest.raises(SystemExit):
        subset_streams.main([str(file), "--tokenizer", TOKENIZER, "--out", str(tmp_path / "of a question")])
    assert "problem 'full/1' is a question" in capsys.readouterr().err
