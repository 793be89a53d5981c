"""One form for passages, answers and queries, so that a text is found and matched however its file spells it.

Files of all kinds write the same words in several ways: decomposed accents (file names of macOS, PDF), soft hyphens and
invisible break points (HTML), ligatures and positional forms of letters (PDF), letters of full width (East Asian text),
and the Arabic tatweel, which only stretches a word. Language models write none of these.
"""

from __future__ import annotations

import re
import unicodedata

from memsearcher_jax.types import encodable

INVISIBLE = re.compile("[\xad\u0640\u200b\u2060\ufeff]")
"""Soft hyphen, tatweel, zero-width space, word joiner, byte order mark. A zero-width joiner is part of a spelling."""
FORMS_OF_LETTERS = re.compile(
    "["
    "\u0132\u0133"  # the Dutch ij
    "\ufb00-\ufb06\ufb13-\ufb17"  # Latin and Armenian ligatures
    "\ufb1d-\ufb4f\ufb50-\ufdff\ufe70-\ufefc"  # Hebrew and Arabic letters by position, and their ligatures
    "\uff10-\uff19\uff21-\uff3a\uff41-\uff5a"  # digits and Latin letters of full width; Chinese punctuation stays
    "\uff66-\uff9f\uffa0-\uffdc"  # katakana and Korean letters of half width
    "\U0001d400-\U0001d7ff"  # bold, italic and other letters of mathematics
    "]+"
)
"""Characters that are another one's ligature or form. Exponents and fractions are not: 10² is not 102."""


def canonical(text: str) -> str:
    """The text in composed Unicode (NFC) with plain letters and without invisible characters; spaces are unchanged.

    A lone surrogate, which UTF-8 cannot represent, becomes "?". The function is idempotent.
    """
    if text.isascii():
        return text
    plain = FORMS_OF_LETTERS.sub(_plain_letters, encodable(text))
    return unicodedata.normalize("NFC", INVISIBLE.sub("", plain))


def _plain_letters(run: re.Match[str]) -> str:
    return unicodedata.normalize("NFKC", run.group())
