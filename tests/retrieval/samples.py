"""Vectors and corpora for the tests of indexes."""

import tempfile
from pathlib import Path

import numpy as np

from memsearcher_jax.retrieval.corpus import store_corpus


def clustered(rows, size=32, clusters=50, spread=0.5, seed=0):
    """Unit vectors around common centres, like those of a trained encoder."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(99).standard_normal((clusters, size))
    vectors = centres[rng.integers(clusters, size=rows)] + spread * rng.standard_normal((rows, size))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def make_corpus(source):
    """The corpus of these passages or of a file, whose files have no names any more."""
    with tempfile.TemporaryDirectory() as folder:
        return store_corpus(source if isinstance(source, Path) else list(source), Path(folder))
