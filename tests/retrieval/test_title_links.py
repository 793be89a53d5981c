"""Which titles a passage mentions, and their order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsearcher_jax.retrieval.corpus import make_corpus
from memsearcher_jax.retrieval.title_links import MAX_TITLE_WORDS, MAX_WORDS, open_title_links
from memsearcher_jax.types import Passage

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
    return make_corpus(Passage(str(row), f'"{title}"\nText of {row}.') for row, title in enumerate(TITLES))


@pytest.fixture(scope="module")
def links(corpus, tmp_path_factory):
    return open_title_links(corpus, tmp_path_factory.mktemp("links") / "links")


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
def test_mentioned_titles_are_linked(links, text, rows):
    """Longest first, then in the order of the text; no mention begins with a lowercase letter; full titles first."""
    assert links.linked_rows(f'"Elsewhere"\n{text}').tolist() == rows


def test_a_passage_does_not_link_to_itself(links):
    assert links.linked_rows('"Lianna (film)"\nLianna by John Sayles.').tolist() == [1]
    assert links.linked_rows('"Paris"\nParis and John').tolist() == [2]
    assert links.linked_rows("no second line: John Sayles").tolist() == []


def test_exact_titles_have_priority(tmp_path):
    """Also over a title that is linked only without its suffix, because it is too long with it."""
    long = " ".join(["Word"] * MAX_TITLE_WORDS)
    passages = [
        Passage(str(row), f'"{title}"\nx') for row, title in enumerate(["Oslo (film)", "Oslo", f"{long} (a)", long])
    ]
    links = open_title_links(make_corpus(passages), tmp_path / "links")
    assert links.linked_rows(f'"Elsewhere"\nOslo. {long}').tolist() == [3, 1]


def test_only_the_first_words_of_a_page_are_searched(links):
    assert links.linked_rows('"X"\n' + "word " * (MAX_WORDS - 1) + "John Sayles").tolist() == [2]
    assert links.linked_rows('"X"\n' + "word " * MAX_WORDS + "John Sayles").tolist() == []


@given(st.text(max_size=300))
def test_any_text_is_accepted(links, text):
    rows = links.linked_rows(text)
    assert rows.dtype == np.int64 and len(set(rows.tolist())) == len(rows)
    assert all(0 <= row < len(TITLES) for row in rows)
