import hashlib
import subprocess
import sys

import numpy as np

from memsearcher_jax.retrieval.hashing_encoder import fit_hashing

TEXTS = [
    '"Marie Curie"\nMarie Curie was a physicist who was born in Warsaw.',
    '"Warsaw"\nWarsaw is the capital of Poland, on the river Vistula.',
    '"Vistula"\nThe Vistula is the longest river in Poland.',
    '"Radium"\nRadium is an element which a physicist discovered.',
]


def test_shape_type_and_norm():
    encoder = fit_hashing(TEXTS, 64)
    vectors = encoder([*TEXTS, "", " ?! ", "a"])
    assert vectors.shape == (7, 64)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), [1, 1, 1, 1, 0, 0, 1], atol=1e-6)
    assert encoder([]).shape == (0, 64)


def test_a_common_word_weighs_less_than_a_rare_one():
    encoder = fit_hashing([*TEXTS, *["the river"] * 20], 1024)
    score = encoder(["the", "vistula"]) @ encoder(["the vistula"]).T
    assert score[0, 0] < 0.3 < 0.9 < score[1, 0]


def test_vectors_are_the_same_in_every_process():
    code = (
        "import hashlib; from memsearcher_jax.retrieval.hashing_encoder import fit_hashing;"
        f"texts = {TEXTS!r}; print(hashlib.sha256(fit_hashing(texts, 64)(texts).round(5).tobytes()).hexdigest())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == hashlib.sha256(fit_hashing(TEXTS, 64)(TEXTS).round(5).tobytes()).hexdigest()
