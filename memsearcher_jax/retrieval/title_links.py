"""Links from a passage to the passages whose titles it mentions.

A mention is a run of words that does not begin with a lowercase letter and equals the title of a passage, with or
without the title's suffix in parentheses: "Lianna" matches "Lianna (film)". The folder contains a 64-bit key per title
and the first passage with that title, 16 bytes per title, memory-mapped.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from memsearcher_jax.analyzer import fold
from memsearcher_jax.retrieval.builder.build_dir import open_derived, save_array
from memsearcher_jax.retrieval.corpus import Corpus
from memsearcher_jax.types import plain_title

KIND = "title links"
MAX_TITLE_WORDS = 8  # longer titles are never linked
MAX_WORDS = 256  # words of a passage that are searched for titles: a corpus may contain long pages

_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class TitleLinks:
    key_K: np.ndarray  # uint64, sorted
    row_K: np.ndarray  # int64, the first passage with each title

    def linked_rows(self, contents: str) -> np.ndarray:
        """Return the int64 rows to which a passage links, except its own title.

        Longer titles come first, since they are more specific. Of overlapping mentions the first counts, and the
        longest of those that begin at the same word.
        """
        title, _, body = contents.partition("\n")
        own_rows = self._rows(list(title_keys(title))).tolist()
        words = list(islice(_words(body), MAX_WORDS))
        starts = [start for start, word in enumerate(words) if not word[0].islower()]
        lengths = range(1, MAX_TITLE_WORDS + 1)
        spans = [(start, -length) for start in starts for length in lengths if start + length <= len(words)]
        rows = self._rows([_key(words[start : start - minus_length]) for start, minus_length in spans])
        order: dict[int, tuple[int, int]] = {}
        end = 0
        for (start, minus_length), row in sorted(zip(spans, rows.tolist(), strict=True)):
            if row >= 0 and start >= end:
                end = start - minus_length
                if row not in own_rows:
                    order.setdefault(row, (minus_length, start))
        return np.array(sorted(order, key=order.__getitem__), np.int64)

    def _rows(self, keys: list[int]) -> np.ndarray:
        """The row of the title with each key; -1 without one."""
        place_S, end_S = (np.searchsorted(self.key_K, np.array(keys, np.uint64), side) for side in ("left", "right"))
        found_S, row_S = end_S > place_S, np.full(len(keys), -1)
        row_S[found_S] = self.row_K[place_S[found_S]]
        return row_S


def title_keys(title: str) -> dict[int, bool]:
    """The keys of the title and of the title without its suffix, and whether the suffix was removed.

    There is no key of an empty or too long title.
    """
    keys: dict[int, bool] = {}
    for text, suffix_removed in ((title, False), (plain_title(title.strip('" ')), True)):
        words = list(_words(text))
        if 0 < len(words) <= MAX_TITLE_WORDS:
            keys.setdefault(_key(words), suffix_removed)
    return keys


def open_title_links(corpus: Corpus, directory: Path) -> TitleLinks:
    """Open the folder, and build it first if it does not exist. Raises as `open_derived` does."""

    def build(staging: Path) -> None:
        keys, rows, without_suffix = array("Q"), array("q"), array("b")
        for row, passage in enumerate(corpus):
            for key, suffix_removed in title_keys(passage.title).items():
                keys.append(key)
                rows.append(row)
                without_suffix.append(suffix_removed)
        key_K, row_K = np.frombuffer(keys, np.uint64), np.frombuffer(rows, np.int64)
        # An exact title has priority over one whose suffix was removed; then the first row.
        order = np.lexsort((row_K, np.frombuffer(without_suffix, np.int8), key_K))
        key_K, first = np.unique(key_K[order], return_index=True)
        save_array(staging / "keys.npy", key_K)
        save_array(staging / "rows.npy", row_K[order][first])

    def load(folder: Path) -> TitleLinks:
        links = TitleLinks(*(np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("keys", "rows")))
        if len(links.key_K) != len(links.row_K):
            raise ValueError(f"{len(links.key_K)} keys and {len(links.row_K)} rows")
        return links

    return open_derived(directory, KIND, corpus.checksum, build, load)


def _words(text: str) -> Iterator[str]:
    """The words as written, since capitals distinguish names."""
    return (match.group() for match in _WORD.finditer(unicodedata.normalize("NFC", text)))


def _key(words: Sequence[str]) -> int:
    """64 bits, the same in every process: collisions are rare among a hundred million titles."""
    return int.from_bytes(hashlib.blake2b(fold(" ".join(words)).encode(), digest_size=8).digest())
