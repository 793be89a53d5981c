"""launch/build_index.py: its output, its errors, and that the index can be searched."""

import json
import shlex

import numpy as np
import pytest

from memsearcher_jax.launch import build_index, cli, serve_search
from memsearcher_jax.retrieval import vector_files
from memsearcher_jax.retrieval.corpus import read_passages
from memsearcher_jax.retrieval.hashing_encoder import fit_hashing


@pytest.mark.parametrize(
    "flags", [["--retrieval.index_type", "exact"], ["--config", "qwen7b", "--retrieval.encoder", "hashing"]]
)
def test_the_printed_flags_search_the_index(flags, corpus, tmp_path, capsys):
    out = tmp_path / "it's an index"
    argv = [*flags, "--retrieval.corpus", str(corpus), "--out", str(out), "--json", str(tmp_path / "j")]
    build_index.main([*argv, "--retrieval.max_passage_tokens", "9"])
    output = capsys.readouterr()
    assert output.out.startswith(f"{out}: 20 passages of 1024 dimensions by hashing-3/1024, ")
    assert "embedding: 20/20" in output.err and "passages/s" in output.err
    assert json.loads((tmp_path / "j").read_text())["passages"] == 20
    printed = shlex.split(output.out.partition("; search it with ")[2])
    assert ["--retrieval.index", str(out), "--retrieval.encoder", "hashing"] == printed[:4]
    assert "--retrieval.max_passage_tokens 9" in output.out
    served = cli.parse(serve_search.Serve, ["--config", "qwen7b", *printed])
    (results,) = serve_search.make_searcher(served, tmp_path).search(["Town 13"], 1)
    assert results[0].title == "Town 13"


def test_an_index_is_built_in_shards_from_given_embeddings(corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(vector_files, "SHARD_ROWS", 7)
    texts = [passage.contents for _, passage in read_passages(corpus)]
    np.save(tmp_path / "vectors.npy", fit_hashing(texts)(texts))
    argv = ["--retrieval.corpus", str(corpus), "--embeddings", str(tmp_path / "vectors.npy")]
    argv += ["--out", str(tmp_path / "i"), "--retrieval.index_type", "exact"]
    build_index.main([*argv, "--shard", "1/2"])
    assert "shard 1/2 is done; shard 0/2 finishes the index" in capsys.readouterr().out
    assert not (tmp_path / "i").exists()
    build_index.main([*argv, "--shard", "0/2"])
    assert "20 passages" in capsys.readouterr().out
    assert len(list((tmp_path / "i" / "embeddings").iterdir())) == 3


def test_an_index_that_is_built_again_says_what_it_kept(corpus, tmp_path, capsys):
    out, result = tmp_path / "i", tmp_path / "result.json"
    argv = ["--retrieval.corpus", str(corpus), "--retrieval.method", "bm25", "--out", str(out), "--json", str(result)]
    build_index.main(argv)
    assert "as before" not in capsys.readouterr().out
    with corpus.open("a") as file:
        file.write(json.dumps({"id": "more", "contents": '"More"\nA passage that is new.'}) + "\n")
    build_index.main(argv)
    printed = capsys.readouterr().out
    assert "20 passages are as before, 1 are new, 0 are gone; 0 vectors were copied" in printed
    assert f"{out}: 21 passages for words alone" in printed
    assert json.loads(result.read_text())["kept"] == {"passages": 20, "new": 1, "removed": 0, "vectors": 0}
