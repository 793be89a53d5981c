import json
import shutil
import subprocess
import sys
from functools import partial

import numpy as np
import pytest

from memsearcher_jax.agent.types import Passage
from memsearcher_jax.retrieval import approximate
from memsearcher_jax.retrieval.corpus import corpus_of
from memsearcher_jax.retrieval.encode import fit_hashing
from memsearcher_jax.retrieval.index import ExactIndex, IndexConfig, build, open_index

CORPUS = corpus_of(Passage(f"p{row}", f'"Title {row}"\nThe passage of number {row}.') for row in range(40))
ENCODER = fit_hashing(CORPUS.texts(0, 40), 32)
CONFIG = IndexConfig(encoder=ENCODER.name, batch=16)


def clustered(rows, size=32, clusters=50, spread=0.5, seed=0):
    """Unit vectors around common centres: what a trained encoder's look like to an index."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(99).standard_normal((clusters, size))
    vectors = centres[rng.integers(clusters, size=rows)] + spread * rng.standard_normal((rows, size))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def recall(found_QN, exact_QN):
    return np.mean([len(set(a) & set(b)) / len(b) for a, b in zip(found_QN, exact_QN, strict=True)])


def test_exact_search_is_a_sort():
    vectors, queries = clustered(300), clustered(20, seed=1)
    scores = queries @ vectors.T
    ids, found = ExactIndex(vectors).search(queries, 7)
    np.testing.assert_array_equal(ids, np.argsort(-scores, axis=1, kind="stable")[:, :7])
    np.testing.assert_allclose(found, -np.sort(-scores, axis=1)[:, :7], rtol=1e-6)


def test_scan_agrees_with_exact_search():
    vectors, queries = clustered(500), clustered(50, seed=1)
    ids, scores = approximate.scan(vectors).search(queries, 10)
    exact_ids, exact_scores = ExactIndex(vectors).search(queries, 10)
    assert recall(ids, exact_ids) == 1.0
    np.testing.assert_allclose(scores, exact_scores, atol=1e-5)


def test_tree_keeps_the_recall_it_was_asked_for():
    vectors, queries = clustered(8_000), clustered(200, seed=1)
    index = approximate.build_tree(vectors, clustered(200, seed=2), recall=0.95)
    assert index.settings.leaves_searched < index.settings.leaves, "clustered vectors need no full scan"
    assert index.settings.recall >= 0.95
    ids, scores = index.search(queries, 5)
    exact_ids, _ = ExactIndex(vectors).search(queries, 5)
    assert recall(ids, exact_ids) > 0.92
    np.testing.assert_allclose(scores[:, 0], np.take_along_axis(queries @ vectors.T, ids, 1)[:, 0], atol=1e-4)


@pytest.mark.parametrize("make", [ExactIndex, approximate.scan])
def test_more_results_than_rows(make):
    vectors = clustered(6)
    ids, scores = make(vectors).search(vectors, 50)
    assert ids.shape == scores.shape == (6, 6)
    assert all(set(row) == set(range(6)) for row in ids)
    assert np.isfinite(scores).all()


def test_a_short_result_is_marked():
    """With one leaf searched a tree cannot fill a long result; ScaNN pads it with row 0 and NaN."""
    vectors = clustered(2_000)
    index = approximate.build_tree(vectors, vectors[:10], recall=0.0)
    ids, scores = index.search(vectors[:3], 1_500)
    assert ids.shape == (3, 1_500)
    assert (ids == -1).any()
    np.testing.assert_array_equal(ids == -1, np.isneginf(scores))
    for row in ids:
        found = row[row >= 0]
        assert len(set(found)) == len(found)


@pytest.mark.parametrize("make", [ExactIndex, approximate.scan])
def test_no_queries(make):
    ids, scores = make(clustered(6)).search(np.zeros((0, 32), np.float32), 3)
    assert ids.shape == scores.shape == (0, 3)


@pytest.mark.parametrize("kind", ["scann", "exact"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_folder_gives_back_what_was_built(tmp_path, kind, dtype):
    folder = tmp_path / "deep" / "index"
    config = IndexConfig(encoder=ENCODER.name, kind=kind, dtype=dtype)
    build(CORPUS, ENCODER, folder, config, encoder_state={"idf": ENCODER.idf_F})
    stored = open_index(folder, encoder=ENCODER.name, kind=kind, checksum=CORPUS.checksum)
    assert stored.corpus.texts(0, 40) == CORPUS.texts(0, 40)
    assert [stored.corpus.ids[row] for row in range(40)] == [CORPUS.ids[row] for row in range(40)]
    np.testing.assert_array_equal(stored.encoder_state["idf"], ENCODER.idf_F)
    vectors = ENCODER(CORPUS.texts(0, 40))
    ids, scores = stored.index.search(vectors, 1)
    assert ids[:, 0].tolist() == list(range(40))
    np.testing.assert_allclose(scores[:, 0], 1.0, atol=2e-3)
    assert [path.name for path in folder.parent.iterdir()] == ["index"]


def test_a_folder_with_a_tree_can_be_moved(tmp_path, monkeypatch):
    monkeypatch.setattr(approximate, "SCAN_BELOW", 30)
    build(CORPUS, ENCODER, tmp_path / "here", CONFIG)
    queries = ENCODER(["number 7", "number 31"])
    before = open_index(tmp_path / "here", encoder=ENCODER.name).index.search(queries, 5)
    shutil.move(tmp_path / "here", tmp_path / "there")
    moved = open_index(tmp_path / "there", encoder=ENCODER.name)
    assert moved.index.settings.recall >= 0.98
    for old, new in zip(before, moved.index.search(queries, 5), strict=True):
        np.testing.assert_array_equal(old, new)


def test_refuses_another_corpus_encoder_and_kind(tmp_path):
    build(CORPUS, ENCODER, tmp_path / "i", IndexConfig(encoder=ENCODER.name, kind="exact"))
    changed = corpus_of(Passage(f"p{row}", f"passage {row}") for row in range(40))
    reopen = partial(open_index, tmp_path / "i")
    with pytest.raises(ValueError, match="another corpus"):
        reopen(encoder=ENCODER.name, kind="exact", checksum=changed.checksum)
    with pytest.raises(ValueError, match='built with encoder "hashing-1/32", not "hashing-1/64"'):
        reopen(encoder="hashing-1/64", kind="exact")
    with pytest.raises(ValueError, match="built for exact search"):
        reopen(encoder=ENCODER.name, kind="scann")
    with pytest.raises(FileExistsError, match="exists already"):
        build(changed, ENCODER, tmp_path / "i", CONFIG)
    assert reopen(encoder=ENCODER.name, kind="exact").corpus.checksum == CORPUS.checksum


def test_refuses_what_is_no_index_or_damaged(tmp_path):
    with pytest.raises(FileNotFoundError, match="not an index folder"):
        open_index(tmp_path, encoder=ENCODER.name)
    for name in ("embeddings.npy", "contents.npy", "contents.offset.npy", "encoder.npz", "manifest.json"):
        folder = tmp_path / name
        build(CORPUS, ENCODER, folder, CONFIG, encoder_state={"idf": ENCODER.idf_F})
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])
        with pytest.raises(ValueError, match="is damaged") as caught:
            open_index(folder, encoder=ENCODER.name)
        assert "\n" not in str(caught.value)
    folder = tmp_path / "format"
    build(CORPUS, ENCODER, folder, CONFIG)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(ValueError, match="has format 99"):
        open_index(folder, encoder=ENCODER.name)


def test_damaged_scann_files(tmp_path, monkeypatch):
    monkeypatch.setattr(approximate, "SCAN_BELOW", 30)
    build(CORPUS, ENCODER, tmp_path / "i", CONFIG)
    (tmp_path / "i" / "scann" / "scann_assets.pbtxt").unlink()
    with pytest.raises(ValueError, match="ScaNN cannot read its files"):
        open_index(tmp_path / "i", encoder=ENCODER.name)


def test_a_build_that_stops_half_way_leaves_nothing_that_opens(tmp_path):
    calls = []

    def interrupted(texts):
        calls.append(len(texts))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return ENCODER(texts)

    with pytest.raises(KeyboardInterrupt):
        build(CORPUS, interrupted, tmp_path / "i", CONFIG)
    assert calls == [16, 16]
    assert list(tmp_path.iterdir()) == []
    build(CORPUS, ENCODER, tmp_path / "i", CONFIG)
    assert open_index(tmp_path / "i", encoder=ENCODER.name).manifest["passages"] == 40


def test_a_killed_build_leaves_nothing_that_opens(tmp_path):
    program = (
        "import os, sys; from pathlib import Path; import numpy as np\n"
        "from memsearcher_jax.agent.types import Passage\n"
        "from memsearcher_jax.retrieval.corpus import corpus_of\n"
        "from memsearcher_jax.retrieval.index import IndexConfig, build\n"
        "corpus = corpus_of(Passage(str(row), 'text') for row in range(4))\n"
        "calls = []\n"
        "def killed(texts):\n"
        "    calls.append(texts)\n"
        "    return np.ones((1, 8), np.float32) if len(calls) < 3 else os._exit(9)\n"
        "build(corpus, killed, Path(sys.argv[1]), IndexConfig(encoder='e', batch=1))\n"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path / "i")]).returncode == 9
    (left,) = tmp_path.iterdir()
    assert left.name.endswith(".partial")
    for folder in (left, tmp_path / "i"):
        with pytest.raises(FileNotFoundError, match="not an index folder"):
            open_index(folder, encoder="e")
    build(CORPUS, ENCODER, tmp_path / "i", CONFIG)
    assert open_index(tmp_path / "i", encoder=ENCODER.name).manifest["passages"] == 40


def test_refuses_vectors_that_are_not_finite_or_too_few(tmp_path):
    def spoiled(texts):
        vectors = ENCODER(texts)
        for row, text in enumerate(texts):
            if "number 21." in text:
                vectors[row, 3] = np.nan
        return vectors

    with pytest.raises(ValueError, match='passage "p21" is not finite'):
        build(CORPUS, spoiled, tmp_path / "i", CONFIG)
    with pytest.raises(ValueError, match=r"returned shape \(15, 32\) for 16 texts"):
        build(CORPUS, lambda texts: ENCODER(texts[1:]), tmp_path / "i", CONFIG)
    assert list(tmp_path.iterdir()) == []
