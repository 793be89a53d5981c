"""The passages that an answer is in, as its sources."""

from __future__ import annotations

import re
import unicodedata

from memsearcher_jax.types import Outcome, Passage

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_UNSPACED = (
    "\u0e00-\u0eff"  # Thai, Lao
    "\u1000-\u109f\u1780-\u17ff"  # Burmese, Khmer
    "\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff"  # Japanese kana
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Chinese characters
)
"""Ranges of the scripts whose words have no spaces between them, after NFKC."""
_UNSPACED_CHARACTER = re.compile(f"[{_UNSPACED}]")
_SPACED_LETTER = rf"[^\W{_UNSPACED}]"


def sources_of(outcome: Outcome) -> tuple[list[Passage], int]:
    """The passages that contain the answer, in the order they were found, and how many were found.

    The answer must be whole words there. In scripts without spaces between words, it may begin and end anywhere.
    Case, articles, punctuation of any script, and full and half width do not matter.
    """
    found = {passage.id: passage for passage in outcome.passages}
    answer = _plain(outcome.answer)
    if not answer:
        return [], len(found)
    before = "" if _UNSPACED_CHARACTER.match(answer[0]) else f"(?<!{_SPACED_LETTER})"
    after = "" if _UNSPACED_CHARACTER.match(answer[-1]) else f"(?!{_SPACED_LETTER})"
    pattern = re.compile(before + re.escape(answer) + after)
    return [passage for passage in found.values() if pattern.search(_plain(passage.contents))], len(found)


def _plain(text: str) -> str:
    """Lower case, without punctuation and English articles, with single spaces."""
    characters = unicodedata.normalize("NFKC", text).lower()
    kept = "".join(character for character in characters if not unicodedata.category(character).startswith("P"))
    return " ".join(_ARTICLES.sub(" ", kept).split())
