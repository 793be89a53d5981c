"""Folders derived from a corpus, and writing to a full disk, which NumPy does not always report.

A limit on the file size in a subprocess simulates a full disk; it truncates a file at any byte.
"""

import json
import shutil
import subprocess
import sys

import pytest

from memsearcher_jax.retrieval.bm25 import open_bm25
from memsearcher_jax.retrieval.builder.build_dir import explain_disk_full
from memsearcher_jax.retrieval.corpus import make_corpus
from memsearcher_jax.retrieval.title_links import open_title_links
from memsearcher_jax.types import Passage

CORPUS = make_corpus(Passage(str(row), f'"Title {row}"\nword{row} of Title {row + 1}') for row in range(9))


@pytest.mark.parametrize(
    ("open_folder", "kind", "files"),
    [
        (open_bm25, "a BM25 index of each passage", ["vocab.index.json", "data.csc.index.npy"]),
        (open_title_links, "title links", ["keys.npy", "rows.npy"]),
    ],
)
def test_a_derived_folder_is_built_once_moves_and_is_checked(open_folder, kind, files, tmp_path):
    open_folder(CORPUS, tmp_path / "made")
    made = (tmp_path / "made" / "manifest.json").stat().st_mtime_ns
    folder = (tmp_path / "made").rename(tmp_path / "moved")
    open_folder(CORPUS, folder)
    assert (folder / "manifest.json").stat().st_mtime_ns == made
    with pytest.raises(ValueError, match="was built from another corpus"):
        open_folder(make_corpus([Passage("0", "Oslo")]), folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    changes = [json.dumps(manifest | change) for change in ({"kind": "other"}, {"format": 4})]
    damage = [("manifest.json", content) for content in ("{", "[]", *changes)]
    for name, content in [*damage, *((name, content) for name in files for content in ("damaged", ""))]:
        damaged = shutil.copytree(folder, tmp_path / "damaged")
        (damaged / name).write_text(content)
        with pytest.raises(ValueError, match=rf"damaged: cannot be read as {kind} \(.*\); delete it") as caught:
            open_folder(CORPUS, damaged)
        assert "\n" not in str(caught.value)
        shutil.rmtree(damaged)


PROGRAM = """
import resource, signal, sys
from pathlib import Path
import numpy as np
from memsearcher_jax.types import Passage
from memsearcher_jax.retrieval import bm25, scann_index, title_links
from memsearcher_jax.retrieval.corpus import make_corpus, save_corpus
from memsearcher_jax.retrieval.vector_files import EmbeddingShards

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
corpus = make_corpus(Passage(str(row), f'"Title {row}"\\nword{row} and word{row % 5}') for row in range(300))

def shards(folder):
    folder.mkdir()
    EmbeddingShards(folder, 60, 8, "float32", 60).write(0, np.ones((60, 8), np.float32))
    EmbeddingShards(folder, 60, 8, "float32", 60).missing()

def passages(folder):
    folder.mkdir()
    save_corpus(corpus, folder)

def titles(folder):
    title_links.open_title_links(corpus, folder)

def bm25_index(folder):
    bm25.open_bm25(corpus, folder)

def tree(folder):
    vectors = np.eye(300, 64, dtype=np.float32)
    scann_index.save_tree(scann_index.build_tree(vectors, scann_index.TreeSettings(4, 2, 4)), folder)

save = {"shards": shards, "passages": passages, "titles": titles, "words": bm25_index, "tree": tree}[sys.argv[1]]
save(Path(sys.argv[2]) / "whole")
largest = max(file.stat().st_size for file in Path(sys.argv[2], "whole").iterdir())
for number, short in enumerate([1, 7, 100, 900, 1_900]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest - short, resource.RLIM_INFINITY))
    try:
        save(Path(sys.argv[2], str(number)))
    except OSError:
        continue
    sys.exit(f"{largest - short} of {largest} bytes were accepted")
"""


@pytest.mark.parametrize("what", ["shards", "passages", "titles", "words", "tree"])
def test_a_truncated_file_is_an_error(what, tmp_path):
    done = subprocess.run([sys.executable, "-c", PROGRAM, what, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if what in ("titles", "words"):
        assert [path.name for path in tmp_path.iterdir()] == ["whole"]


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
