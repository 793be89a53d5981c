"""The words of a text, for every index and encoder that compares words.

Case, accents and the forms of a character (NFC, NFD, full width) make no difference. Words are separated by spaces and
punctuation. Scripts without spaces between words become single characters and pairs of them, and so does Korean, whose
words carry their particles.
"""

from __future__ import annotations

import re
import unicodedata
from itertools import pairwise

VERSION = 2  # of the words; an index of another version is refused
SPACELESS = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Burmese, Khmer
    "\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff"  # kana
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Chinese characters
)
"""Characters, for a class of a regular expression, of the scripts without spaces."""

_HANGUL = "\uac00-\ud7af"
_INDIC = "\u0900-\u0963\u0966-\u0dff"  # with vowel signs, which are no word characters to `re`
_RUN = re.compile(rf"(?P<spaceless>[{SPACELESS}{_HANGUL}]+)|(?:[^\W{SPACELESS}{_HANGUL}]|[{_INDIC}])+")
_LETTERS = str.maketrans(
    {"ł": "l", "ø": "o", "đ": "d", "ð": "d", "ı": "i", "þ": "th", "æ": "ae", "œ": "oe", "\xad": ""}
)
"""Letters that Unicode does not decompose, as in Lucene's ASCIIFoldingFilter, and the soft hyphen."""
_MARKS_OF_LETTERS = (0, 7, 8, 9)  # combining classes: no mark; nukta, kana voicing and virama make other letters


def fold(text: str) -> str:
    """Remove case, accents and compatibility forms."""
    if text.isascii():
        return text.lower()
    decomposed = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).casefold())
    kept = "".join(c for c in decomposed if unicodedata.combining(c) in _MARKS_OF_LETTERS)
    return unicodedata.normalize("NFC", kept).translate(_LETTERS)


def words(text: str) -> list[str]:
    """The words in order; of a script without spaces, each character and each pair of neighbours."""
    found: list[str] = []
    for run in _RUN.finditer(fold(text)):
        word = run.group()
        if run["spaceless"]:
            found += [*word, *map("".join, pairwise(word))]
        else:
            found.append(word)
    return found
