"""Files on a disk that fills up: NumPy's own writing misses some of it, and says little of the rest.

A limit on the size of files, in a process of its own, stands in for a full disk; it cuts a file at any byte.
"""

import subprocess
import sys

import pytest

from memsearcher_jax.retrieval.workplace import disk_full_explained

PROGRAM = """
import resource, signal, sys
from pathlib import Path
import numpy as np
from memsearcher_jax.agent.types import Passage
from memsearcher_jax.retrieval import bm25, names
from memsearcher_jax.retrieval.corpus import corpus_of, save_corpus
from memsearcher_jax.retrieval.vectors import Shards

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
corpus = corpus_of(Passage(str(row), f'"Title {row}"\\nword{row} and word{row % 5}') for row in range(300))

def shards(folder):
    folder.mkdir()
    Shards(folder, 60, 8, "float32", 60).write(0, np.ones((60, 8), np.float32))
    Shards(folder, 60, 8, "float32", 60).missing()

def passages(folder):
    folder.mkdir()
    save_corpus(corpus, folder)

def titles(folder):
    names.build(corpus, folder)
    names.open_names(corpus, folder)

def words(folder):
    bm25.build(corpus, folder)
    bm25.open_bm25(corpus, folder)

save = {"shards": shards, "passages": passages, "titles": titles, "words": words}[sys.argv[1]]
save(Path(sys.argv[2]) / "whole")
largest = max(file.stat().st_size for file in Path(sys.argv[2], "whole").iterdir())
for number, short in enumerate([1, 7, 100, 900, 1_900]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest - short, resource.RLIM_INFINITY))
    try:
        save(Path(sys.argv[2], str(number)))
    except OSError:
        continue
    sys.exit(f"{largest - short} of {largest} bytes pass for all")
"""


@pytest.mark.parametrize("what", ["shards", "passages", "titles", "words"])
def test_a_file_that_was_cut_off_is_an_error_at_once(what, tmp_path):
    done = subprocess.run([sys.executable, "-c", PROGRAM, what, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if what in ("titles", "words"):
        assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_what_is_said_of_a_full_disk(tmp_path):
    for error in (OSError(28, "No space left on device"), OSError("47497 requested and 24560 written")):
        with (
            pytest.raises(OSError, match=r"^\S+: the disk is full; make room and give the same command again"),
            disk_full_explained(tmp_path),
        ):
            raise error
    for error in (OSError(13, "Permission denied"), OSError("other")):
        with pytest.raises(OSError, match=r"Permission denied|other"), disk_full_explained(tmp_path):
            raise error
