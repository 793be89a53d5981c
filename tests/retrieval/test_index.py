import json
import shutil

import numpy as np
import pytest

from memsearcher_jax.retrieval import index, scann_index
from memsearcher_jax.retrieval.builder.index_builder import build_index
from memsearcher_jax.retrieval.config import RetrievalConfig
from memsearcher_jax.retrieval.hashing_encoder import HASHING_NAME as NAME
from memsearcher_jax.retrieval.hashing_encoder import fit_hashing
from memsearcher_jax.retrieval.index import ExactIndex, open_index
from memsearcher_jax.types import Passage
from tests.retrieval.samples import clustered

PASSAGES = [Passage(f"p{row}", f'"Title {row}"\nThe passage of number {row}.') for row in range(40)]
TEXTS = [passage.contents for passage in PASSAGES]
ENCODER = fit_hashing(TEXTS)
CONFIG = RetrievalConfig()


@pytest.mark.parametrize("size", [3, 32, 57, 384])
def test_results_do_not_depend_on_blocks_and_batches(monkeypatch, size):
    """Ids and scores are bit for bit the same, with equal and nearly equal vectors; ties are ordered by row."""
    distinct = clustered(90, size)
    vectors = np.concatenate([distinct, distinct, np.nextafter(distinct, 1), distinct[::-1]])
    queries = np.concatenate([clustered(20, size, seed=1), distinct[:3], np.zeros((1, size), np.float32)])
    exact = ExactIndex(vectors).search(queries, 9)
    ids, scores = map(np.array, zip(*exact, strict=True))
    scores64 = (queries[:, None].astype(np.float64) * vectors).sum(axis=2).astype(np.float32)
    np.testing.assert_array_equal(ids, np.lexsort((np.arange(360) + np.zeros_like(scores64), -scores64))[:, :9])
    np.testing.assert_array_equal(scores, np.take_along_axis(scores64, ids, axis=1))
    for block_rows, batch in [(360, 1), (360, 5), (11, 24), (11, 3), (1, 24), (7, 1), (359, 23)]:
        monkeypatch.setattr(index, "MAX_BLOCK_FLOATS", size * block_rows)
        monkeypatch.setattr(index, "MAX_BLOCK_SCORES", block_rows * batch)
        blocked = ExactIndex(vectors)
        for results in (
            blocked.search(queries, 9),
            [ranking for query in queries for ranking in blocked.search(query[None], 9)],
        ):
            np.testing.assert_array_equal(results, exact)


def test_the_rounding_of_products_does_not_change_results():
    """Products with the largest error that `ExactIndex` allows for give the same ids and scores."""
    vectors, queries = np.concatenate([clustered(200)] * 3), clustered(20, seed=1)
    exact = ExactIndex(vectors).search(queries, 7)
    rng = np.random.default_rng(0)

    class Inexact(np.ndarray):
        def __rmatmul__(self, queries):
            product = queries @ np.asarray(self)
            return product + rng.choice(np.float32([-1, 1]), product.shape) * np.float32(32 * 2.0**-24)

    np.testing.assert_array_equal(ExactIndex(vectors.view(Inexact)).search(queries, 7), exact)


@pytest.mark.parametrize("index_type", ["scann", "exact"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_index_folder_round_trips(tmp_path, index_type, dtype):
    folder = tmp_path / "deep" / "index"
    config = RetrievalConfig(index_type=index_type, embedding_dtype=dtype)
    build_index(config, PASSAGES, folder)
    stored = open_index(folder, encoder=NAME, index_type=index_type)
    assert list(stored.corpus) == PASSAGES
    np.testing.assert_array_equal(stored.encoder_state["idf"], ENCODER.idf_F)
    for row, ((id,), (score,)) in enumerate(stored.index.search(ENCODER(TEXTS), 1)):
        assert id == row and score == pytest.approx(1.0, abs=6e-3)
    assert [path.name for path in folder.parent.iterdir()] == ["index"]


def test_an_index_with_a_tree_can_be_moved(tmp_path, monkeypatch):
    monkeypatch.setattr(scann_index, "MIN_TREE_ROWS", 30)
    build_index(CONFIG, PASSAGES, tmp_path / "here")
    queries = ENCODER(["number 7", "number 31"])
    before = open_index(tmp_path / "here", encoder=NAME).index.search(queries, 5)
    shutil.move(tmp_path / "here", tmp_path / "there")
    moved = open_index(tmp_path / "there", encoder=NAME)
    np.testing.assert_array_equal(before, moved.index.search(queries, 5))
    (tmp_path / "there" / "scann" / "scann_assets.pbtxt").unlink()
    with pytest.raises(ValueError, match=r"is damaged .*scann_assets\.pbtxt"):
        open_index(tmp_path / "there", encoder=NAME)


@pytest.mark.parametrize(
    ("built", "encoder", "message"),
    [
        ({"index_type": "exact"}, "other", f"built with encoder '{NAME}', not 'other'"),
        ({"index_type": "exact"}, NAME, "built for exact search"),
        ({"method": "bm25"}, NAME, "has no vectors: set retrieval.method to bm25"),
    ],
)
def test_an_index_that_was_built_otherwise_is_an_error(tmp_path, built, encoder, message):
    build_index(RetrievalConfig(**built), PASSAGES, tmp_path / "i")
    with pytest.raises(ValueError, match=message):
        open_index(tmp_path / "i", encoder=encoder)
    with pytest.raises(FileExistsError, match="already exists"):
        build_index(CONFIG, PASSAGES, tmp_path / "i")


def test_a_cut_file_and_another_format_are_one_line(tmp_path):
    with pytest.raises(FileNotFoundError, match="not an index folder"):
        open_index(tmp_path, encoder=NAME)
    build_index(CONFIG, PASSAGES, tmp_path / "whole")
    files = sorted(path for path in (tmp_path / "whole").rglob("*") if path.is_file())
    assert len(files) == 4
    for file in files:
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])
        with pytest.raises(ValueError, match=r"is damaged or of another version \(.*\); delete it to re") as error:
            open_index(tmp_path / "whole", encoder=NAME)
        assert "\n" not in str(error.value)
        file.write_bytes(content)
    manifest = json.loads((tmp_path / "whole" / "manifest.json").read_text())
    for edit in ({"format": 99}, {"files": None}, {"files": {"gone": 1}}):
        (tmp_path / "whole" / "manifest.json").write_text(json.dumps(manifest | edit))
        with pytest.raises(ValueError, match="is damaged or of another version"):
            open_index(tmp_path / "whole", encoder=NAME)


def test_offsets_that_do_not_ascend_are_an_error(tmp_path):
    """The size of the file is unchanged."""
    build_index(CONFIG, PASSAGES, tmp_path / "i")
    file = tmp_path / "i" / "passages.arrow"
    ends = np.cumsum([0, *(len(text) for text in TEXTS)])
    file.write_bytes(file.read_bytes().replace(ends.tobytes(), np.where(ends == ends[3], 10_000, ends).tobytes()))
    with pytest.raises(ValueError, match=r"Offset invariant failure"):
        open_index(tmp_path / "i", encoder=NAME)
