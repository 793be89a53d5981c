import json
import shutil
from functools import partial

import numpy as np
import pytest

from memsearcher_jax.agent.types import Passage
from memsearcher_jax.retrieval import approximate, index
from memsearcher_jax.retrieval.build import build
from memsearcher_jax.retrieval.corpus import corpus_of
from memsearcher_jax.retrieval.encode import fit_hashing
from memsearcher_jax.retrieval.index import ExactIndex, IndexConfig, open_index

CORPUS = corpus_of(Passage(f"p{row}", f'"Title {row}"\nThe passage of number {row}.') for row in range(40))
ENCODER = fit_hashing(CORPUS.texts(0, 40), 32)
CONFIG = IndexConfig(encoder=ENCODER.name, batch=16)


def clustered(rows, size=32, clusters=50, spread=0.5, seed=0):
    """Unit vectors around common centres: what a trained encoder's look like to an index."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(99).standard_normal((clusters, size))
    vectors = centres[rng.integers(clusters, size=rows)] + spread * rng.standard_normal((rows, size))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def test_exact_search_is_a_sort():
    vectors, queries = clustered(300), clustered(20, seed=1)
    scores = queries @ vectors.T
    ids, found = ExactIndex(vectors).search(queries, 7)
    np.testing.assert_array_equal(ids, np.argsort(-scores, axis=1, kind="stable")[:, :7])
    np.testing.assert_allclose(found, -np.sort(-scores, axis=1)[:, :7], rtol=1e-6)


def test_blocks_change_nothing(monkeypatch):
    """Vectors and queries both in many blocks; equal vectors keep the order of their rows."""
    vectors = np.concatenate([clustered(90), clustered(90)])
    queries = clustered(20, seed=1)
    expected = ExactIndex(vectors).search(queries, 6)
    monkeypatch.setattr(index, "EXACT_FLOATS", 32 * 11)
    monkeypatch.setattr(index, "EXACT_SCORES", 11 * 3)
    for found, whole in zip(ExactIndex(vectors).search(queries, 6), expected, strict=True):
        np.testing.assert_allclose(found, whole, rtol=1e-6)
    ids, _ = expected
    assert (ids[:, 1] == ids[:, 0] + 90).all()


@pytest.mark.parametrize("make", [ExactIndex, approximate.scan])
def test_more_results_than_rows(make):
    vectors = clustered(6)
    ids, scores = make(vectors).search(vectors, 50)
    assert ids.shape == scores.shape == (6, 6)
    assert all(set(row) == set(range(6)) for row in ids)
    assert np.isfinite(scores).all()


@pytest.mark.parametrize("make", [ExactIndex, approximate.scan])
def test_no_queries(make):
    ids, scores = make(clustered(6)).search(np.zeros((0, 32), np.float32), 3)
    assert ids.shape == scores.shape == (0, 3)


@pytest.mark.parametrize("kind", ["scann", "exact"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
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
    np.testing.assert_allclose(scores[:, 0], 1.0, atol=6e-3)
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
    for name in ("embeddings/000000.npy", "contents.bin", "contents.offset.npy", "encoder.npz", "manifest.json"):
        folder = tmp_path / name.replace("/", "-")
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
