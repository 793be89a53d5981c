"""launch/subset_streams.py: from files to a file that training reads."""

import json

import pytest

from memsearcher_jax.data.readers import read_problems
from memsearcher_jax.launch import subset_streams


@pytest.fixture
def file(tmp_path):
    """Six streams of two sources; the last of each is long."""
    rows = [
        {
            "instance_id": str(n),
            "data_source": source,
            "chunks": ["word " * (500 if n == 2 else 5)],
            "questions_and_answers": [{"question": "Who?", "answer": "Ann"}],
        }
        for source in ("squad", "booksum")
        for n in range(3)
    ]
    path = tmp_path / "full.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_subset_is_written_and_counted(file, tmp_path, shared, capsys):
    out, counts = tmp_path / "subset.jsonl", tmp_path / "counts.json"
    flags = ["--tokenizer", str(shared / "tokenizer" / "qwen2.5"), "--max_tokens", "100", "--per_source", "1"]
    subset_streams.main([str(file), *flags, "--out", str(out), "--json", str(counts)])
    assert sorted(problem.stream.source for problem in read_problems(out)) == ["booksum", "squad"]
    assert json.loads(counts.read_text())["squad"] == {"read": 3, "short": 2, "kept": 1}
    assert "2 of 6 streams" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--per_source 0", "--per_source is 0: it must be at least 1"),
        ("--max_tokens 1", "no stream has at most 1 tokens: raise --max_tokens"),
        ("--out .", "--out . exists: choose another file, or delete it"),
    ],
)
def test_flags_that_keep_nothing_are_refused(file, shared, capsys, flags, message):
    tokenizer = str(shared / "tokenizer" / "qwen2.5")
    with pytest.raises(SystemExit):
        subset_streams.main([str(file), "--tokenizer", tokenizer, *flags.split()])
    assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        subset_streams.main([str(file), str(file), "--tokenizer", tokenizer])
    assert "two of the files have a stream with the same id" in capsys.readouterr().err
