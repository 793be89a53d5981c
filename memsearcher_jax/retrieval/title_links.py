"""Links from a passage to the passages whose titles it mentions.

A mention is a run of words that does not begin with a lowercase letter and equals the title of a passage, with or
without the title's suffix in parentheses: "Lianna" matches "Lianna (film)". The folder contains a 64-bit key per title
and the first passage with that title, 16 bytes per title, memory-mapped.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from memsearcher_jax.retrieval.builder.build_dir import open_derived, save_array
from memsearcher_jax.retrieval.corpus import Corpus
from memsearcher_jax.retrieval.hashing_encoder import fold
from memsearcher_jax.types import plain_title

KIND = "title links"
MAX_TITLE_WORDS = 8  # longer titles are never linked
MAX_WORDS = 256  # words of a passage that are searched for titles: a corpus may contain long pages
FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that the product keeps all bits

_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class TitleLinks:
    """The titles of a corpus."""

    key_K: np.ndarray  # uint64, sorted
    row_K: np.ndarray  # int64, the first passage with each title

    def linked_rows(self, contents: str) -> np.ndarray:
        """Return the int64 rows to which a passage links, except its own title.

        Longer titles come first, since they are more specific. Of overlapping mentions the first counts, and the
        longest of those that begin at the same word.
        """
        title, _, body = contents.partition("\n")
        own_rows = self._rows(np.array(list(title_keys(title)), np.uint64)).tolist()
        start_S, length_S, key_S = _text_runs(body)
        row_S = self._rows(key_S)
        matches = np.stack([start_S, -length_S, row_S], axis=1)[row_S >= 0].tolist()
        order: dict[int, tuple[int, int]] = {}
        end = 0
        for start, minus_length, row in sorted(matches):
            if start >= end:
                end = start - minus_length
                if row not in own_rows:
                    order.setdefault(row, (minus_length, start))
        return np.array(sorted(order, key=order.__getitem__), np.int64)

    def _rows(self, key_S: np.ndarray) -> np.ndarray:
        """The row of the title with each key; -1 without one."""
        if not len(self.key_K):
            return np.full(len(key_S), -1)
        place_S = np.minimum(np.searchsorted(self.key_K, key_S), len(self.key_K) - 1)
        return np.where(self.key_K[place_S] == key_S, self.row_K[place_S], -1)


def title_keys(title: str) -> dict[int, bool]:
    """The keys of the title and of the title without its suffix, and whether the suffix was removed.

    There is no key of an empty or too long title.
    """
    keys: dict[int, bool] = {}
    for text, suffix_removed in ((title, False), (plain_title(title.strip('" ')), True)):
        words = _WORD.findall(text)
        if 0 < len(words) <= MAX_TITLE_WORDS:
            keys.setdefault(int(_keys(words)[len(words) - 1][0]), suffix_removed)
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


def _text_runs(text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(start_S, length_S, key_S) of every run of words that could be a title; start and length count words."""
    words = [match.group() for match in islice(_WORD.finditer(text), MAX_WORDS)]
    capital_W = np.array([not word[0].islower() for word in words], bool)
    starts, lengths, keys = [], [], []
    for length, key_S in enumerate(_keys(words), start=1):
        start_S = np.flatnonzero(capital_W[: len(key_S)])
        starts.append(start_S)
        lengths.append(np.full(len(start_S), length))
        keys.append(key_S[start_S])
    return np.concatenate(starts), np.concatenate(lengths), np.concatenate(keys)


def _keys(words: Sequence[str]) -> list[np.ndarray]:
    """For each length up to MAX_TITLE_WORDS, the uint64 keys of all runs of that many words.

    A polynomial hash of the words' 64-bit hashes: the keys of a length follow from those of the previous one. Keys are
    the same in every process, and collisions are rare among a hundred million titles.
    """
    digests = [hashlib.blake2b(fold(word).lower().encode(), digest_size=8).digest() for word in words]
    word_W = np.array([int.from_bytes(digest) for digest in digests], np.uint64)
    keys = [word_W]
    for length in range(2, MAX_TITLE_WORDS + 1):
        keys.append(keys[-1][: max(len(words) - length + 1, 0)] * FACTOR + word_W[length - 1 :])
    return keys
