"""Vectors on disk: their types, missing and damaged shards, and precomputed embeddings."""

import numpy as np
import pytest

from memsearcher_jax.retrieval import vector_files
from memsearcher_jax.retrieval.vector_files import EmbeddingShards, read_embeddings

VECTORS = np.random.default_rng(0).standard_normal((25, 6)).astype(np.float32)

# faiss.write_index of an IndexFlatIP(2) that holds [[1, 2], [-0.5, 0.25], [3, 4]], written by faiss-cpu 1.15.1
FLAT = bytes.fromhex(
    "4978464902000000030000000000000000001000000000000000100000000000010000000006000000000000000000803f00000040"
    "000000bf0000803e0000404000008040"
)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(vector_files, "SHARD_ROWS", 10)


def shards(directory, dtype="float32"):
    return EmbeddingShards(directory, 25, 6, dtype)


def write_all(stored):
    for shard in range(stored.count):
        rows = stored.row_range(shard)
        stored.write(shard, VECTORS[rows.start : rows.stop])
    return stored


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 0), ("float16", 1e-3)])
def test_shards_round_trip(tmp_path, dtype, tolerance):
    stored = write_all(shards(tmp_path, dtype))
    assert stored.missing() == []
    np.testing.assert_allclose(stored.read(), VECTORS, rtol=tolerance)
    assert stored.read().dtype == np.float32


def test_missing_shards(tmp_path):
    stored = write_all(shards(tmp_path))
    stored.path(1).unlink()
    assert stored.missing() == [1]
    stored.write(1, VECTORS[10:20])
    np.testing.assert_array_equal(stored.read(), VECTORS)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["000000.npy", "000001.npy", "000002.npy"]


def test_a_damaged_shard_is_an_error(tmp_path):
    stored = write_all(shards(tmp_path))
    stored.path(2).write_bytes(stored.path(2).read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"000002\.npy: is damaged"):
        stored.missing()
    np.save(stored.path(2), VECTORS[:4])
    with pytest.raises(ValueError, match=r"000002\.npy: contains float32 \(4, 6\), not float32 \(5, 6\); delete it"):
        stored.missing()


def test_float16_overflow_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="too large for float16: store these vectors as float32"):
        shards(tmp_path, "float16").write(0, 1e5 * VECTORS[:10])


@pytest.mark.parametrize("dtype", ["float16", ">f4", "float64"])
def test_reads_npy(tmp_path, dtype):
    np.save(tmp_path / "v.npy", VECTORS.astype(dtype))
    np.testing.assert_allclose(read_embeddings(tmp_path / "v.npy"), VECTORS, rtol=1e-3)


def test_reads_a_flat_index(tmp_path):
    (tmp_path / "e5_Flat.index").write_bytes(FLAT)
    np.testing.assert_array_equal(read_embeddings(tmp_path / "e5_Flat.index"), [[1, 2], [-0.5, 0.25], [3, 4]])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is neither a .npy array nor FAISS's IndexFlatIP"),
        (b"IxF2" + FLAT[4:], r"is neither a .npy array nor FAISS's IndexFlatIP \(it begins with b'IxF2'\)"),
        (FLAT[:30], "is truncated"),
        (FLAT[:-1], "has 68 bytes, but 3 x 2 vectors need 69; join the parts"),
        (FLAT + b"x", "has 70 bytes, but 3 x 2 vectors need 69"),
        (b"\x93NUMPY\x01\x00", "is truncated, or not an array"),
    ],
)
def test_other_files_are_errors(tmp_path, content, message):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_embeddings(tmp_path / "file")
    assert str(caught.value).startswith(str(tmp_path / "file"))
