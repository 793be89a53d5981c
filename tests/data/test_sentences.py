"""Texts as passages of whole sentences."""

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from memsearcher_jax.data.sentences import WORD, split_text


def split(text, max_words, **options):
    return [text[start:end] for start, end in split_text(text, max_words, **options)]


@given(st.text(alphabet='ab .!?\n文。é"[1]\U0001f600\u0e01\u0e35', max_size=200), st.integers(1, 8))
def test_passages_hold_all_text_once_in_order(text, max_words):
    passages = split(text, max_words)
    assert "".join("".join(passages).split()) == "".join(text.split())
    assert all(0 < len(WORD.findall(passage)) <= max_words for passage in passages)
    assert all(passage.strip() == passage for passage in passages)


def test_passages_end_where_sentences_end():
    """Behind the mark of a footnote, a closing quote and the full stop of Chinese, but not behind an abbreviation."""
    text = 'He left Almen.[1] Dr. Ward said "No." Then he e.g. slept.'
    assert split(text, 5) == ["He left Almen.[1]", 'Dr. Ward said "No."', "Then he e.g. slept."]
    assert split("東京は首都です。大阪は。", 8) == ["東京は首都です。", "大阪は。"]
    assert split("Am 3. Oktober. Gut so.", 3, language="de") == ["Am 3. Oktober.", "Gut so."]


def test_a_long_sentence_is_cut_at_a_line():
    table = "\n".join(f"| row {number} | value |" for number in range(5))
    assert split(table, 12) == [
        "| row 0 | value |\n| row 1 | value |",
        "| row 2 | value |\n| row 3 | value |",
        "| row 4 | value |",
    ]
    assert split("one two three four five", 2) == ["one two", "three four", "five"]


def test_a_long_sentence_without_spaces_between_words_is_cut_where_it_pauses():
    """Thai has spaces between phrases, and marks that belong to the letter in front of them; Chinese has commas."""
    phrase = "วันนี้อากาศดีมาก"
    assert split(f"{phrase} {phrase} {phrase}", len(phrase) + 5, language="th") == [phrase] * 3
    parts = split(phrase * 9, 7, language="th")
    assert "".join(parts) == phrase * 9
    assert not any(unicodedata.category(part[0]).startswith("M") for part in parts)
    assert split("我们今天去公园，明天去山上，后天回家", 12) == ["我们今天去公园，", "明天去山上，后天回家"]
