"""A word-level diff of two memories."""

from __future__ import annotations

import difflib
import re
from typing import Literal

Change = Literal["same", "removed", "added"]


def word_diff(old: str, new: str) -> list[tuple[Change, str]]:
    """Runs of words that were kept, removed or added, in reading order; white space alone is not a change.

    The "same" and "added" runs concatenate to `new`; the "same" and "removed" runs contain exactly the words of `old`.
    """
    old_words = _words(old)
    new_words = _words(new)
    old_stripped = [word.strip() for word in old_words]
    new_stripped = [word.strip() for word in new_words]
    # autojunk would ignore frequent words (the, of) of a long memory and match nothing near them.
    matcher = difflib.SequenceMatcher(None, old_stripped, new_stripped, autojunk=False)
    runs: list[tuple[Change, str]] = []
    for tag, old_start, old_end, new_start, new_end in matcher.get_opcodes():
        if tag in ("delete", "replace"):
            runs.append(("removed", "".join(old_words[old_start:old_end])))
        if tag != "delete":
            runs.append(("same" if tag == "equal" else "added", "".join(new_words[new_start:new_end])))
    return runs


def _words(text: str) -> list[str]:
    """Each word has the white space before it; trailing white space belongs to the last word."""
    return re.findall(r"\s*\S+(?:\s+\Z)?|\A\s+\Z", text)
