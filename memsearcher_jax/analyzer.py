"""The words of a text, for every index and encoder that compares words.

Case, accents and the forms of a character (NFC, NFD, full width) make no difference. Words are separated by spaces and
punctuation, underscores included: `_Kestrel_` in Markdown and `open_valve` in programs have their words. Scripts
without spaces between words become single characters and pairs of them, and so does Korean, whose words carry their
particles.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from itertools import pairwise

VERSION = 3  # of the words; an index of another version is refused
SPACELESS = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Burmese, Khmer
    "\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff"  # kana
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Chinese characters
)
"""Characters, for a class of a regular expression, of the scripts without spaces."""

NO_LETTERS = {"\xad": "", "\u0640": ""}
"""The soft hyphen, and the tatweel, which stretches an Arabic word."""

_PAIRED = SPACELESS + "\uac00-\ud7af"  # and Korean
_INDIC = "\u0900-\u0963\u0966-\u0dff"  # with vowel signs, which are no word characters to `re`
_RUN = re.compile(rf"[{_PAIRED}]+|(?:[^\W_{_PAIRED}]|[{_INDIC}])+")
_ASCII_WORD = re.compile(r"[^\W_]+")
_NON_ASCII = re.compile(r"[^\x00-\x7f]+")
_IS_PAIRED = re.compile(f"[{_PAIRED}]")
_LETTERS = str.maketrans({"ł": "l", "ø": "o", "đ": "d", "ð": "d", "ı": "i", "æ": "ae", "œ": "oe"} | NO_LETTERS)
"""Letters that Unicode does not decompose, as in Lucene's ASCIIFoldingFilter."""
_MARKS_OF_LETTERS = (0, 7, 8, 9)  # combining classes: no mark; nukta, kana voicing and virama make other letters


def fold(text: str) -> str:
    """Remove case, accents and compatibility forms."""
    lowered = text.lower()
    return lowered if lowered.isascii() else _NON_ASCII.sub(lambda run: _fold(run.group()), lowered)


@lru_cache(100_000)
def _fold(run: str) -> str:
    decomposed = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", run).casefold())
    kept = "".join(c for c in decomposed if unicodedata.combining(c) in _MARKS_OF_LETTERS)
    return unicodedata.normalize("NFC", kept).translate(_LETTERS).lower()


def words(text: str) -> list[str]:
    """The words in order; of a script without spaces, each character and each pair of neighbours."""
    folded = fold(text)
    if folded.isascii():
        return _ASCII_WORD.findall(folded)
    runs = _RUN.findall(folded)
    if not _IS_PAIRED.search(folded):
        return runs
    found = list[str]()
    for run in runs:
        if _IS_PAIRED.match(run):
            found += run
            found += map("".join, pairwise(run))
        else:
            found.append(run)
    return found
