"""Vectors on disk: their types, whole or absent, and the files of others, as FAISS itself wrote one."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsearcher_jax.retrieval.vectors import Shards, read_published

DRAWN = np.random.default_rng(0).standard_normal((25, 6)).astype(np.float32)

# faiss.write_index of an IndexFlatIP(2) that holds [[1, 2], [-0.5, 0.25], [3, 4]], written by faiss-cpu 1.15.1
FLAT = bytes.fromhex(
    "4978464902000000030000000000000000001000000000000000100000000000010000000006000000000000000000803f00000040"
    "000000bf0000803e0000404000008040"
)


def shards(directory, dtype="float32", shard_rows=10):
    return Shards(directory, 25, 6, dtype, shard_rows)


def write_all(stored):
    for shard in range(stored.count):
        start, stop = stored.span(shard)
        stored.write(shard, DRAWN[start:stop])
    return stored


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 0), ("float16", 1e-3), ("bfloat16", 4e-3)])
def test_what_was_written_comes_back(tmp_path, dtype, tolerance):
    stored = write_all(shards(tmp_path, dtype))
    assert stored.missing() == []
    np.testing.assert_allclose(stored[:], DRAWN, rtol=tolerance)
    for start, stop in [(0, 1), (9, 11), (8, 25), (24, 40), (3, 3)]:
        np.testing.assert_allclose(stored[start:stop], DRAWN[start:stop], rtol=tolerance)
        assert stored[start:stop].dtype == np.float32


def test_missing_shards_are_named(tmp_path):
    stored = write_all(shards(tmp_path))
    stored.path(1).unlink()
    assert stored.missing() == [1]
    (tmp_path / "000001.partial").write_bytes(b"half of it")
    assert stored.missing() == [1]
    stored.write(1, DRAWN[10:20])
    np.testing.assert_array_equal(stored[:], DRAWN)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["000000.npy", "000001.npy", "000002.npy"]


def test_a_damaged_shard_is_an_error(tmp_path):
    stored = write_all(shards(tmp_path))
    stored.path(2).write_bytes(stored.path(2).read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"000002\.npy: is damaged"):
        stored.missing()
    np.save(stored.path(2), DRAWN[:4])
    with pytest.raises(ValueError, match=r"000002\.npy: holds other vectors than this index"):
        stored.missing()
    np.save(stored.path(2), DRAWN[20:].astype(np.float64))
    with pytest.raises(ValueError, match="holds float64, expected float32"):
        stored.missing()


def test_numbers_beyond_float16_are_refused(tmp_path):
    with pytest.raises(ValueError, match="too large for float16: store these vectors as bfloat16"):
        shards(tmp_path, "float16").write(0, 1e5 * DRAWN[:10])
    shards(tmp_path, "bfloat16").write(0, 1e5 * DRAWN[:10])


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=6, max_size=6))
def test_bfloat16_rounds_to_nearest(tmp_path_factory, row):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    stored = Shards(tmp_path_factory.mktemp("b"), 1, 6, "bfloat16", 1)
    stored.write(0, np.array([row], np.float32))
    np.testing.assert_array_equal(stored[:][0], np.array(row, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_reads_an_array(tmp_path, dtype):
    np.save(tmp_path / "v.npy", DRAWN.astype(dtype))
    np.testing.assert_allclose(read_published(tmp_path / "v.npy"), DRAWN, rtol=1e-3)


def test_reads_a_flat_index(tmp_path):
    (tmp_path / "e5_Flat.index").write_bytes(FLAT)
    found = read_published(tmp_path / "e5_Flat.index")
    np.testing.assert_array_equal(found, [[1, 2], [-0.5, 0.25], [3, 4]])
    assert isinstance(found, np.memmap)


@pytest.mark.parametrize("kind", ["IndexFlatIP", "IndexFlatL2"])
def test_reads_what_faiss_writes(tmp_path, kind):
    faiss = pytest.importorskip("faiss", reason="FAISS is in the extra 'bench'")
    unit = DRAWN / np.linalg.norm(DRAWN, axis=1, keepdims=True)
    index = getattr(faiss, kind)(6)
    index.add(unit)
    faiss.write_index(index, str(tmp_path / "i"))
    np.testing.assert_array_equal(read_published(tmp_path / "i"), unit)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is neither a .npy array nor a flat FAISS index"),
        (b"IwFl" + FLAT[4:], r"is neither a .npy array nor a flat FAISS index \(it begins with b'IwFl'\)"),
        (FLAT[:30], "is cut off"),
        (FLAT[:-1], "has 68 bytes where 3 x 2 vectors need 69; a file that is published in parts must be joined"),
        (FLAT + b"x", "has 70 bytes where 3 x 2 vectors need 69"),
        (FLAT.replace(struct.pack("<?i", True, 0), struct.pack("<?i", True, 1), 1), "its vectors are not of norm 1"),
        (b"\x93NUMPY\x01\x00", "is cut off, or no array"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path, content, message):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_published(tmp_path / "file")
    assert str(caught.value).startswith(str(tmp_path / "file"))


@pytest.mark.parametrize("array", [np.zeros(3), np.zeros((2, 2), int), np.zeros((0, 4)), np.array([["a"]])])
def test_arrays_that_are_no_vectors(tmp_path, array):
    np.save(tmp_path / "v.npy", array)
    with pytest.raises(ValueError, match="expected rows of floating point"):
        read_published(tmp_path / "v.npy")
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_published(tmp_path / "none.npy")
