"""The command that builds an index: what it prints, what it refuses, and that others search what it wrote."""

import json
from dataclasses import replace

import build_index
import numpy as np
import pytest

from memsearcher_jax.retrieval.config import RetrievalConfig
from memsearcher_jax.retrieval.corpus import read_corpus
from memsearcher_jax.retrieval.encode import fit_hashing
from memsearcher_jax.retrieval.plan import Rates
from memsearcher_jax.retrieval.search import open_searcher

FLAGS = ["--retrieval.encoder_size", "64", "--shard_rows", "7"]


def test_what_it_builds_is_searched_by_a_run(corpus, tmp_path, capsys):
    argv = [*FLAGS, "--retrieval.corpus", str(corpus), "--out", str(tmp_path / "i"), "--json", str(tmp_path / "j")]
    build_index.main(argv)
    said = capsys.readouterr()
    assert said.out.startswith(f"{tmp_path}/i: 20 passages of 64 dimensions by hashing-1/64, exact; search it with")
    assert "embedding 20/20" in said.err
    assert "passages/s" in said.err
    assert json.loads((tmp_path / "j").read_text())["passages"] == 20
    config = RetrievalConfig(index=str(tmp_path / "i"), encoder_size=64)
    assert open_searcher(config, tmp_path / "none", ()).search(["Town 13"], 1)[0][0].title == "Town 13"
    changed = corpus.with_name("changed.jsonl")
    changed.write_text(corpus.read_text().replace("Town 13 has 13", "Town 13 has 14"))
    with pytest.raises(ValueError, match="was built from another corpus"):
        open_searcher(replace(config, corpus=str(changed)), tmp_path / "none", ())


def test_parts_and_published_vectors(corpus, tmp_path, capsys):
    stored = read_corpus(corpus)
    texts = stored.texts(0, 20)
    np.save(tmp_path / "vectors.npy", fit_hashing(texts, 64)(texts))
    argv = [*FLAGS, "--retrieval.corpus", str(corpus), "--embeddings", str(tmp_path / "vectors.npy")]
    argv += ["--out", str(tmp_path / "i"), "--retrieval.kind", "exact", "--retrieval.embedding_dtype", "bfloat16"]
    build_index.main([*argv, "--part", "1/2"])
    assert "part 1 of 2 is done; part 0 finishes the index" in capsys.readouterr().out
    assert not (tmp_path / "i").exists()
    build_index.main([*argv, "--part", "0/2"])
    assert "20 passages" in capsys.readouterr().out
    assert len(list((tmp_path / "i" / "embeddings").iterdir())) == 3


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--out i", "--retrieval.corpus is missing"),
        ("--retrieval.corpus corpus.jsonl", "--out is missing"),
        ("--retrieval.corpus corpus.jsonl --out .", ".: exists already"),
        ("--retrieval.corpus none.jsonl --out i", "none.jsonl: no such file"),
        ("--retrieval.corpus cut.jsonl --out i", "cut.jsonl:1: not JSON"),
        ("--retrieval.corpus twice.jsonl --out i", 'twice.jsonl:21: id "0" is already the id of line 1'),
        ("--retrieval.corpus corpus.jsonl --out i --resume", "--resume: leave it out, the same command goes on"),
        ("--retrieval.corpus corpus.jsonl --out i --part 2", "--part 2: write it as 3/8"),
        ("--retrieval.corpus corpus.jsonl --out i --part 2/2", "part 2 of 2: parts are numbered from 0 to 1"),
        ("--retrieval.corpus corpus.jsonl --out i --shard_rows 0", "--shard_rows and --passages must be at least 1"),
        ("--retrieval.corpus corpus.jsonl --out i --embeddings none.npy", "none.npy: no such file"),
        ("--retrieval.corpus corpus.jsonl --out i --embeddings cut.jsonl", "is neither a .npy array nor a flat FAISS"),
        ("--retrieval.corpus corpus.jsonl --out i --retrieval.encoder none", "no folder none"),
    ],
)
def test_what_cannot_be_built(flags, line, corpus, tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cut.jsonl").write_text('{"id": "a", "cont')
    (tmp_path / "twice.jsonl").write_text(corpus.read_text() + corpus.read_text())
    assert line in refused(build_index.main, flags.split()).replace(f"{tmp_path}/", "")
    assert not (tmp_path / "i").exists()


def test_the_plan_is_printed_with_its_arithmetic(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(build_index.plan, "measure", lambda encode, size: Rates(9_000, 400, 1e11, 1e8, 1e11))
    monkeypatch.setattr("memsearcher_jax.rl.embedder.stand_in", lambda tokens: lambda texts: np.ones((1, 768)))
    build_index.main(["--plan", "--part", "0/8", "--json", str(tmp_path / "plan.json")])
    said = capsys.readouterr().out
    assert "21,015,324 passages of 768 dimensions by an encoder of the shape of e5-base-v2" in said
    assert "21,015,324 / (400.0 passages/s x 8 hosts)" in said
    assert {"GB", "h"} == {line["unit"] for line in json.loads((tmp_path / "plan.json").read_text())["plan"]}
