"""What a passage names: the reading of names, their order, and the folder that keeps the titles."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsearcher_jax.agent.types import Passage
from memsearcher_jax.retrieval.corpus import corpus_of
from memsearcher_jax.retrieval.names import LONGEST, READ, build, keys_of, open_names

TITLES = [
    "Lianna (film)",  # 0
    "John Sayles",
    "John",
    "Paris (Texas)",
    "Paris",  # 4
    "Paris",
    "film",
    "São Paulo",
    "The Return of the Secaucus 7",
    "A very long title that nobody will ever write out like that",  # 9
    "—",
    "東京",
]


@pytest.fixture(scope="module")
def corpus():
    return corpus_of(Passage(str(row), f'"{title}"\nText of {row}.') for row, title in enumerate(TITLES))


@pytest.fixture(scope="module")
def names(corpus, tmp_path_factory):
    return open_names(corpus, tmp_path_factory.mktemp("names") / "names")


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("was made by John Sayles.", [1]),
        ("John, and not John Sayles", [1, 2]),
        ("Lianna is a film by john sayles", [0]),
        ("PARIS, then Sao  Paulo", [7, 4]),
        ("Paris (Texas) is in Texas", [3]),
        ("John Sayles made The Return of the Secaucus 7 and Lianna", [8, 1, 0]),
        ("A very long title that nobody will ever write out like that", []),
        ("東京 is not Kyoto", [11]),
        ("", []),
        ("\x00\u202e— 7", []),
    ],
)
def test_names_are_read_as_a_reader_would(names, text, rows):
    """Longest first, then in the order of the text; a small letter begins no name; the whole title before a part."""
    assert names.named(f'"Elsewhere"\n{text}').tolist() == rows


def test_a_passage_does_not_name_itself(names):
    assert names.named('"Lianna (film)"\nLianna by John Sayles.').tolist() == [1]
    assert names.named('"Paris"\nParis and John').tolist() == [2]
    assert names.named("no second line: John Sayles").tolist() == []


def test_only_the_beginning_of_a_page_is_read(names):
    assert names.named('"X"\n' + "word " * (READ - 1) + "John Sayles").tolist() == [2]
    assert names.named('"X"\n' + "word " * READ + "John Sayles").tolist() == []


@given(st.text(max_size=300))
def test_any_text_is_read(names, text):
    rows = names.named(text)
    assert rows.dtype == np.int64 and len(set(rows.tolist())) == len(rows)
    assert all(0 <= row < len(TITLES) for row in rows)


@given(st.sampled_from(TITLES), st.sampled_from(TITLES))
def test_every_short_title_is_found_between_other_words(names, one, other):
    found = names.named(f'"Elsewhere"\nwas {one}, with {other}.').tolist()
    for title in (one, other):
        if title[0].isupper() and len(title.split()) <= LONGEST:
            assert title in [TITLES[row] for row in found]


def test_keys_do_not_depend_on_the_process():
    """Python's own hash would."""
    code = "from memsearcher_jax.retrieval.names import keys_of; print(keys_of('Lianna (film)'))"
    found = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert found == [f"{keys_of('Lianna (film)')}\n"] * 2


def test_it_is_built_once_and_refused_where_it_cannot_serve(corpus, tmp_path):
    build(corpus, tmp_path / "names")
    made = (tmp_path / "names" / "keys.npy").stat().st_mtime_ns
    open_names(corpus, tmp_path / "names")
    assert (tmp_path / "names" / "keys.npy").stat().st_mtime_ns == made
    with pytest.raises(ValueError, match="was built from another corpus"):
        open_names(corpus_of([Passage("0", "Oslo")]), tmp_path / "names")
    manifest = json.loads((tmp_path / "names" / "manifest.json").read_text())
    for name, content in [
        ("manifest.json", "{"),
        ("manifest.json", "[]"),
        ("manifest.json", json.dumps(manifest | {"format": 0})),
        ("keys.npy", "spoilt"),
        ("rows.npy", ""),
    ]:
        kept = (tmp_path / "names" / name).read_bytes()
        (tmp_path / "names" / name).write_text(content)
        with pytest.raises(ValueError, match=r"names: holds no names that can be read .* delete it") as refused:
            open_names(corpus, tmp_path / "names")
        assert "\n" not in str(refused.value)
        (tmp_path / "names" / name).write_bytes(kept)


def test_a_corpus_without_a_name(tmp_path):
    names = open_names(corpus_of([Passage("0", '"—"\nJohn')]), tmp_path / "names")
    assert names.named('"Elsewhere"\nJohn').tolist() == []
