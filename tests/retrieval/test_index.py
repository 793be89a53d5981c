import json
import shutil
from functools import partial

import numpy as np
import pytest

from memsearcher_jax.retrieval import index, scann_index
from memsearcher_jax.retrieval.builder.index_builder import build_index
from memsearcher_jax.retrieval.corpus import make_corpus
from memsearcher_jax.retrieval.hashing_encoder import fit_hashing
from memsearcher_jax.retrieval.index import ExactIndex, IndexConfig, open_index, verify_index
from memsearcher_jax.types import Passage
from tests.retrieval.vectors import clustered

CORPUS = make_corpus(Passage(f"p{row}", f'"Title {row}"\nThe passage of number {row}.') for row in range(40))
ENCODER = fit_hashing(CORPUS.texts(0, 40), 32)
NAME = "hashed"
CONFIG = IndexConfig(encoder=NAME, batch_size=16)


@pytest.mark.parametrize("size", [3, 32, 57, 384])
def test_results_do_not_depend_on_blocks_and_batches(monkeypatch, size):
    """Ids and scores are bit for bit the same, with equal and nearly equal vectors; ties are ordered by row."""
    distinct = clustered(90, size)
    vectors = np.concatenate([distinct, distinct, np.nextafter(distinct, 1), distinct[::-1]])
    queries = np.concatenate([clustered(20, size, seed=1), distinct[:3], np.zeros((1, size), np.float32)])
    exact = ExactIndex(vectors).search(queries, 9)
    ids, scores = exact
    scores64 = (queries[:, None].astype(np.float64) * vectors).sum(axis=2).astype(np.float32)
    np.testing.assert_array_equal(ids, np.lexsort((np.arange(360) + np.zeros_like(scores64), -scores64))[:, :9])
    np.testing.assert_array_equal(scores, np.take_along_axis(scores64, ids, axis=1))
    for block_rows, batch in [(360, 1), (360, 5), (11, 24), (11, 3), (1, 24), (7, 1), (359, 23)]:
        monkeypatch.setattr(index, "MAX_BLOCK_FLOATS", size * block_rows)
        monkeypatch.setattr(index, "MAX_BLOCK_SCORES", block_rows * batch)
        blocked = ExactIndex(vectors)
        for results in (
            blocked.search(queries, 9),
            map(np.concatenate, zip(*(blocked.search(query[None], 9) for query in queries), strict=True)),
        ):
            for found, expected in zip(results, exact, strict=True):
                np.testing.assert_array_equal(found, expected)


def test_the_rounding_of_products_does_not_change_results():
    """Products with the largest error that `ExactIndex` allows for give the same ids and scores."""
    vectors, queries = np.concatenate([clustered(200)] * 3), clustered(20, seed=1)
    exact = ExactIndex(vectors).search(queries, 7)
    rng = np.random.default_rng(0)

    class Inexact(np.ndarray):
        def __rmatmul__(self, queries):
            product = queries @ np.asarray(self)
            return product + rng.choice(np.float32([-1, 1]), product.shape) * np.float32(32 * 2.0**-24)

    results = ExactIndex(vectors.view(Inexact)).search(queries, 7)
    for found, expected in zip(results, exact, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("index_type", ["scann", "exact"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_index_folder_round_trips(tmp_path, index_type, dtype):
    folder = tmp_path / "deep" / "index"
    config = IndexConfig(encoder=NAME, index_type=index_type, dtype=dtype)
    build_index(CORPUS, ENCODER, folder, config, encoder_state={"idf": ENCODER.idf_F})
    stored = open_index(folder, encoder=NAME, index_type=index_type, checksum=CORPUS.checksum)
    assert stored.corpus.texts(0, 40) == CORPUS.texts(0, 40)
    assert [stored.corpus.ids[row] for row in range(40)] == [CORPUS.ids[row] for row in range(40)]
    np.testing.assert_array_equal(stored.encoder_state["idf"], ENCODER.idf_F)
    vectors = ENCODER(CORPUS.texts(0, 40))
    ids, scores = stored.index.search(vectors, 1)
    assert ids[:, 0].tolist() == list(range(40))
    np.testing.assert_allclose(scores[:, 0], 1.0, atol=6e-3)
    assert [path.name for path in folder.parent.iterdir()] == ["index"]


def test_an_index_with_a_tree_can_be_moved(tmp_path, monkeypatch):
    monkeypatch.setattr(scann_index, "MIN_TREE_ROWS", 30)
    build_index(CORPUS, ENCODER, tmp_path / "here", CONFIG)
    queries = ENCODER(["number 7", "number 31"])
    before = open_index(tmp_path / "here", encoder=NAME).index.search(queries, 5)
    shutil.move(tmp_path / "here", tmp_path / "there")
    moved = open_index(tmp_path / "there", encoder=NAME)
    assert moved.index.settings.recall >= 0.98
    for old, new in zip(before, moved.index.search(queries, 5), strict=True):
        np.testing.assert_array_equal(old, new)


def test_another_corpus_encoder_or_index_type_is_an_error(tmp_path):
    build_index(CORPUS, ENCODER, tmp_path / "i", IndexConfig(encoder=NAME, index_type="exact"))
    changed = make_corpus(Passage(f"p{row}", f"passage {row}") for row in range(40))
    reopen = partial(open_index, tmp_path / "i")
    with pytest.raises(ValueError, match="another corpus"):
        reopen(encoder=NAME, index_type="exact", checksum=changed.checksum)
    with pytest.raises(ValueError, match='built with encoder "hashed", not "other"'):
        reopen(encoder="other", index_type="exact")
    with pytest.raises(ValueError, match="built for exact search"):
        reopen(encoder=NAME, index_type="scann")
    with pytest.raises(FileExistsError, match="already exists"):
        build_index(changed, ENCODER, tmp_path / "i", CONFIG)
    assert reopen(encoder=NAME, index_type="exact").corpus.checksum == CORPUS.checksum


def test_a_missing_or_damaged_index_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="not an index folder"):
        open_index(tmp_path, encoder=NAME)
    for name in ("embeddings/000000.npy", "contents.bin", "contents.offset.npy", "encoder.npz", "manifest.json"):
        folder = tmp_path / name.replace("/", "-")
        build_index(CORPUS, ENCODER, folder, CONFIG, encoder_state={"idf": ENCODER.idf_F})
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])
        with pytest.raises(ValueError, match="is damaged") as caught:
            open_index(folder, encoder=NAME)
        assert "\n" not in str(caught.value)
    folder = tmp_path / "format"
    build_index(CORPUS, ENCODER, folder, CONFIG)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(ValueError, match="format 99, this version reads"):
        open_index(folder, encoder=NAME)


def test_every_change_of_an_index_is_one_line(tmp_path):
    """A flipped byte in any file is found on request; an edited manifest and long vectors when the index is opened."""
    build_index(CORPUS, ENCODER, tmp_path / "whole", CONFIG, encoder_state={"idf": ENCODER.idf_F})
    assert verify_index(tmp_path / "whole") > 0
    for number, path in enumerate(sorted(path for path in (tmp_path / "whole").rglob("*") if path.is_file())):
        copy = shutil.copytree(tmp_path / "whole", tmp_path / str(number))
        content = bytearray(path.read_bytes())
        content[-9] ^= 0x10
        (copy / path.relative_to(tmp_path / "whole")).write_bytes(content)
        with pytest.raises(ValueError, match=r"is damaged or of another version \(.*\); rebuild the index$"):
            verify_index(copy)
    manifest = json.loads((tmp_path / "whole" / "manifest.json").read_text())
    edits = [{name: value} for name in manifest for value in (None, -1, [], {}, "x") if manifest[name] != value]
    for edit in edits:
        (tmp_path / "whole" / "manifest.json").write_text(json.dumps(manifest | edit))
        with pytest.raises(ValueError, match="is damaged or of another version"):
            open_index(tmp_path / "whole", encoder=NAME)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("embeddings/000000.npy", {(3, 4): 1e37}, "a vector is longer than all those that were stored"),
        ("embeddings/000000.npy", {(3, 4): np.nan}, "a vector is longer than all those that were stored"),
        ("embeddings/000000.npy", {(3, 4): np.inf}, "a vector is longer than all those that were stored"),
        ("contents.offset.npy", {3: 10_000}, r"the offsets of contents\.bin do not ascend"),
        ("scann/scann_assets.pbtxt", None, r"is damaged .*scann_assets\.pbtxt"),
    ],
)
def test_damage_is_found_when_the_index_is_opened(tmp_path, monkeypatch, name, change, message):
    """A change of numbers, which keeps the size of the file, or a missing file."""
    if change is None:
        monkeypatch.setattr(scann_index, "MIN_TREE_ROWS", 30)
    build_index(CORPUS, ENCODER, tmp_path / "i", CONFIG)
    path = tmp_path / "i" / name
    if change is None:
        path.unlink()
    else:
        numbers = np.load(path)
        for place, value in change.items():
            numbers[place] = value
        np.save(path, numbers)
    with pytest.raises(ValueError, match=message):
        open_index(tmp_path / "i", encoder=NAME)
