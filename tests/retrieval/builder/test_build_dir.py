"""Folders derived from a corpus, and writing to a full disk, which NumPy does not always report.

A limit on the file size in a subprocess simulates a full disk; it truncates a file at any byte.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from memsearcher_jax.retrieval.bm25 import open_bm25
from memsearcher_jax.retrieval.builder.build_dir import explain_disk_full, write_file
from memsearcher_jax.types import Passage
from tests.retrieval.samples import make_corpus

CORPUS = make_corpus(Passage(str(row), f'"Title {row}"\nword{row} of Title {row + 1}') for row in range(9))


def test_an_index_of_words_is_built_once_moves_and_is_checked(tmp_path):
    open_bm25(CORPUS, tmp_path / "made")
    made = (tmp_path / "made" / "manifest.json").stat().st_mtime_ns
    folder = (tmp_path / "made").rename(tmp_path / "moved")
    open_bm25(CORPUS, folder)
    assert (folder / "manifest.json").stat().st_mtime_ns == made
    with pytest.raises(ValueError, match="was built from another corpus"):
        open_bm25(make_corpus([Passage("0", "Oslo")]), folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    changes = [json.dumps(manifest | change) for change in ({"field": "title"}, {"format": 4})]
    damage = [("manifest.json", content) for content in ("{", "[]", *changes)]
    files = ("vocab.index.json", "data.csc.index.npy")
    for name, content in [*damage, *((name, content) for name in files for content in ("damaged", ""))]:
        damaged = shutil.copytree(folder, tmp_path / "damaged")
        (damaged / name).write_text(content)
        message = r"damaged: is damaged or of another version \(.*\); delete it"
        with pytest.raises(ValueError, match=message) as caught:
            open_bm25(CORPUS, damaged)
        assert "\n" not in str(caught.value)
        shutil.rmtree(damaged)


PROGRAM = """
import resource, signal, sys
from pathlib import Path
import numpy as np
from memsearcher_jax.types import Passage
from memsearcher_jax.retrieval import bm25, scann_index
from memsearcher_jax.retrieval.corpus import store_corpus
from memsearcher_jax.retrieval.vector_files import EmbeddingShards
from tests.retrieval.samples import make_corpus

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
made = [Passage(str(row), f'"Title {row}"\\nword{row} and word{row % 5}') for row in range(300)]
corpus = make_corpus(made)

def shards(folder):
    folder.mkdir()
    EmbeddingShards(folder, 60, 8, "float32").write(0, np.ones((60, 8), np.float32))
    EmbeddingShards(folder, 60, 8, "float32").missing()

def passages(folder):
    folder.mkdir()
    store_corpus(made, folder)

def bm25_index(folder):
    bm25.open_bm25(corpus, folder)

def tree(folder):
    vectors = np.eye(300, 64, dtype=np.float32)
    scann_index.save_tree(scann_index.build_tree(vectors), folder)

unlimited, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
for save in (shards, passages, bm25_index, tree):
    top = Path(sys.argv[1], save.__name__)
    top.mkdir()
    save(top / "whole")
    largest = max(file.stat().st_size for file in (top / "whole").iterdir())
    for number, short in enumerate([1, 7, 100, 900, 1_900]):
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest - short, resource.RLIM_INFINITY))
        try:
            save(top / str(number))
        except OSError:
            continue
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, resource.RLIM_INFINITY))
        sys.exit(f"{save.__name__}: {largest - short} of {largest} bytes were accepted")
"""


def test_hosts_with_the_same_process_id_write_one_file(tmp_path, monkeypatch):
    """The first is about to rename its file when the second writes and renames its own."""
    rename, waiting = Path.rename, [b"second"]

    def interrupted(partial, path):
        if waiting:
            write_file(path, waiting.pop())
        return rename(partial, path)

    monkeypatch.setattr(Path, "rename", interrupted)
    write_file(tmp_path / "file", b"first")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"first")]


def test_a_truncated_file_is_an_error(tmp_path):
    done = subprocess.run([sys.executable, "-c", PROGRAM, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "bm25_index").iterdir()] == ["whole"]


def test_the_error_message_of_a_full_disk(tmp_path):
    for error in (OSError(28, "No space left on device"), OSError("47497 requested and 24560 written")):
        with (
            pytest.raises(OSError, match=r"^\S+: the disk is full; free some space and rerun the command to continue"),
            explain_disk_full(tmp_path),
        ):
            raise error
    for error in (OSError(13, "Permission denied"), OSError("other")):
        with pytest.raises(OSError, match=r"Permission denied|other"), explain_disk_full(tmp_path):
            raise error
