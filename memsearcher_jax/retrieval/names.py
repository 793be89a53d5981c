"""From a passage to the passages that it names by their titles, as a reader follows a link.

A name is a run of words that begins with no small letter and reads like the title of a passage, with or without what
the title adds in brackets: "Lianna" for "Lianna (film)". Kept is a number for each title and the first passage that
bears it, 16 bytes a title, in files that are mapped into memory.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from memsearcher_jax.retrieval.corpus import Corpus
from memsearcher_jax.retrieval.index import MANIFEST
from memsearcher_jax.retrieval.workplace import save_array, whole_folder, write_json

FORMAT = 1  # of the folder; raised when an older reader would misread a newer one
LONGEST = 8  # words of a name
FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no bit of a word is lost
READ = 256  # words of a passage that are looked through: a corpus may hold whole pages, and a search must be quick

_WORD = re.compile(r"\w+")
_ADDED = re.compile(r"\s*\([^()]*\)\s*$")


@dataclass(frozen=True)
class Names:
    """The titles of a corpus."""

    key_K: np.ndarray  # uint64, sorted: the names
    row_K: np.ndarray  # int64, the first passage of each

    def named(self, contents: str) -> np.ndarray:
        """int64 rows that a passage names, longest names first, since they are the most telling; not its own title.

        Of names that overlap the one that begins first is read, and the longest of those that begin there.
        """
        title, _, body = contents.partition("\n")
        own = {row for _, _, row in self._rows(*_whole(title))}
        place_of: dict[int, tuple[int, int]] = {}
        end = 0
        for start, length, row in sorted(self._rows(*_runs(body)), key=lambda one: (one[0], -one[1])):
            if start >= end:
                end = start + length
                if row not in own:
                    place_of.setdefault(row, (-length, start))
        return np.array(sorted(place_of, key=place_of.__getitem__), np.int64)

    def _rows(self, start_S: np.ndarray, length_S: np.ndarray, key_S: np.ndarray) -> list[tuple[int, int, int]]:
        """(start, length, row) of those runs whose key is a title's."""
        if not len(self.key_K):
            return []  # every title is too long to be a name
        place_S = np.minimum(np.searchsorted(self.key_K, key_S), len(self.key_K) - 1)
        known = np.flatnonzero(self.key_K[place_S] == key_S)
        columns = (start_S[known], length_S[known], self.row_K[place_S[known]])
        return list(zip(*(column.tolist() for column in columns), strict=True))


def keys_of(title: str) -> list[int]:
    """The title as a name, then without what it adds in brackets; none if that is no word, or too long to be found."""
    return _whole(title)[2].tolist()


def open_names(corpus: Corpus, directory: Path) -> Names:
    """Open the folder; build it first if it is not there.

    Raises:
      ValueError: one line that says why the folder cannot serve this corpus, and the way out.
    """
    if not directory.exists():
        build(corpus, directory)
    try:
        manifest = json.loads((directory / MANIFEST).read_bytes())
        if manifest["format"] != FORMAT:
            raise ValueError(f"format {manifest['format']}, this version reads {FORMAT}")
        key_K, row_K = (np.load(directory / f"{name}.npy", mmap_mode="r") for name in ("keys", "rows"))
        if len(key_K) != len(row_K):
            raise ValueError(f"{len(key_K)} keys and {len(row_K)} rows")
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{directory}: holds no names that can be read ({error}); delete it to build anew") from error
    if manifest["checksum"] != corpus.checksum:
        raise ValueError(f"{directory}: was built from another corpus (checksum differs); delete it to build anew")
    return Names(key_K, row_K)


def build(corpus: Corpus, directory: Path) -> None:
    """Write the folder, beside its place and then renamed."""
    keys, rows, added = array("Q"), array("q"), array("b")
    for row in range(len(corpus)):
        for number, key in enumerate(keys_of(corpus.passage(row).title)):
            keys.append(key)
            rows.append(row)
            added.append(number)
    key_K, row_K = np.frombuffer(keys, np.uint64), np.frombuffer(rows, np.int64)
    # A passage that is called so comes before one that is called so and more; then the first.
    order = np.lexsort((row_K, np.frombuffer(added, np.int8), key_K))
    key_K, row_K = key_K[order], row_K[order]
    first = np.append(True, key_K[1:] != key_K[:-1]) if len(key_K) else np.zeros(0, bool)
    with whole_folder(directory) as beside:
        for name, column_K in (("keys", key_K[first]), ("rows", row_K[first])):
            with (beside / f"{name}.npy").open("wb") as file:
                save_array(file, column_K)
        write_json(beside / MANIFEST, {"format": FORMAT, "checksum": corpus.checksum, "passages": len(corpus)})


def _runs(text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Start, length (both in words) and key of every run of words that could be a name."""
    words = [match.group() for match in islice(_WORD.finditer(text), READ)]
    capital_W = np.array([not word[0].islower() for word in words], bool)
    starts, lengths, keys = [], [], []
    for length, key_S in enumerate(_keys(words), start=1):
        start_S = np.flatnonzero(capital_W[: len(key_S)])
        starts.append(start_S)
        lengths.append(np.full(len(start_S), length))
        keys.append(key_S[start_S])
    return np.concatenate(starts), np.concatenate(lengths), np.concatenate(keys)


def _whole(title: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As `_runs`, the title itself, and without what it adds in brackets."""
    variants = dict.fromkeys(tuple(_WORD.findall(text)) for text in (title, _ADDED.sub("", title.strip('" '))))
    variants = [words for words in variants if 0 < len(words) <= LONGEST]
    keys = [_keys(words)[len(words) - 1][0] for words in variants]
    return np.zeros(len(keys), int), np.array([len(words) for words in variants], int), np.array(keys, np.uint64)


def _keys(words: Sequence[str]) -> list[np.ndarray]:
    """For each length up to LONGEST the keys of the runs of so many words, uint64, the same in every process.

    A polynomial in the words' own 64 bits, so that a run costs one step more than the run that is a word shorter.
    Among a hundred million names two hardly ever share a key.
    """
    word_W = np.array([int.from_bytes(hashlib.blake2b(_plain(word), digest_size=8).digest()) for word in words], "u8")
    keys = [word_W]
    for length in range(2, LONGEST + 1):
        keys.append(keys[-1][: max(len(words) - length + 1, 0)] * FACTOR + word_W[length - 1 :])
    return keys


def _plain(word: str) -> bytes:
    """Without case and accents."""
    if not word.isascii():
        word = "".join(c for c in unicodedata.normalize("NFKD", word.casefold()) if not unicodedata.combining(c))
    return word.lower().encode()
