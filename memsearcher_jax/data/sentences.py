"""Words and sentences of a text, and its division into passages of whole sentences."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

import sentencex

from memsearcher_jax.analyzer import SPACELESS
from memsearcher_jax.types import encodable

ENGLISH = "en"
MAX_WORD_CHARS = 100
# In a script without spaces between words each character counts as a word, and so does its punctuation.
_CHARACTER = SPACELESS + "\u3001-\u303f\uff01-\uff60"
WORD = re.compile(rf"[{_CHARACTER}]|[^\s{_CHARACTER}]{{1,{MAX_WORD_CHARS}}}")
"""What counts as a word. Longer runs of characters, such as encoded data, are several words."""
_LINE = re.compile(r".+")

Span = tuple[int, int]
"""(start, end) of a part of a text, in characters."""


def split_text(text: str, max_words: int, language: str = ENGLISH) -> Iterator[Span]:
    """The spans of consecutive passages of at most `max_words` words, without the space around them.

    A passage ends where a sentence ends. A longer sentence is cut at the end of a line, as in a table or a program, and
    a longer line within. `language` is an ISO 639 code, by which abbreviations are told from the ends of sentences.
    """
    start = end = words = 0
    for unit in _units(text, max_words, language):
        if words + len(unit) > max_words:
            yield start, end
            words = 0
        if not words:
            start = unit[0][0]
        end = unit[-1][1]
        words += len(unit)
    if words:
        yield start, end


def _units(text: str, max_words: int, language: str) -> Iterator[list[Span]]:
    """The parts that are not divided further: for each of them its words, 1 to `max_words`."""
    boundaries = sentencex.get_sentence_boundaries  # pyright: ignore[reportAttributeAccessIssue] (it is compiled)
    # "?" for halves of surrogate pairs, which sentencex does not take, leaves the offsets as they are.
    for sentence in boundaries(language, encodable(text)):
        words = _words(text, sentence["start_index"], sentence["end_index"])
        if len(words) <= max_words:
            if words:
                yield words
            continue
        for line in _LINE.finditer(text, sentence["start_index"], sentence["end_index"]):
            words = _words(text, *line.span())
            while words:
                end = _last_cut(text, words, max_words)
                yield words[:end]
                words = words[end:]


def _last_cut(text: str, words: list[Span], max_words: int) -> int:
    """How many of the words of a line go into one part, at most `max_words`.

    In a script without spaces between words a line is cut at a space or behind punctuation, if there is any in the
    second half of the part, and never before a mark that belongs to the letter in front of it.
    """
    if len(words) <= max_words:
        return len(words)
    for end in range(max_words, max_words // 2, -1):
        last = text[words[end - 1][1] - 1]
        is_apart = words[end - 1][1] < words[end][0]
        if is_apart or unicodedata.category(last).startswith("P"):
            return end
    end = max_words
    while end > 1 and unicodedata.category(text[words[end][0]]).startswith("M"):
        end -= 1
    return end


def _words(text: str, start: int, end: int) -> list[Span]:
    return [word.span() for word in WORD.finditer(text, start, end)]
