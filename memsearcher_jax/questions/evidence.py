"""What questions are made of: a passage, or two or three passages each of which names what the next is about."""

from __future__ import annotations

import hashlib
import posixpath
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

from memsearcher_jax import analyzer
from memsearcher_jax.data.documents import TITLE_SEPARATOR
from memsearcher_jax.types import Passage, plain_title

SPLITS = {"train": 0.8, "tune": 0.1, "test": 0.1}
"""The share of the titles that each split may use. No split shares a title, nor so a passage, with another."""
MIN_WORDS = 15  # of the text of a passage that a question is made of
MIN_NAME_CHARS = 4
MAX_TOPICS = 3  # passages of different documents with one heading, such as "Usage": more of them are about no name
MAX_MENTIONS = 25  # passages that mention a name; a word that more of them have is no name
MAX_JOINS = 3  # passages that one passage is joined with
LINK = re.compile(r"\]\(<?([^)#\s>]+)")  # the file that a link of Markdown leads to


@dataclass(frozen=True)
class CorpusPassage:
    passage: Passage
    source: str  # the document; the title where the corpus names none

    @property
    def text(self) -> str:
        return self.passage.contents.partition("\n")[2]


@dataclass(frozen=True)
class Evidence:
    """The passages that a question needs, in the order in which a reader finds them."""

    passages: tuple[Passage, ...]
    split: str

    @property
    def hops(self) -> int:
        return len(self.passages)

    @property
    def key(self) -> str:
        """Names the evidence by its texts, so that a corpus that is built again keeps its questions."""
        texts = "\0".join(passage.contents for passage in self.passages)
        return hashlib.sha256(texts.encode()).hexdigest()[:16]


def split_of(passage: Passage) -> str:
    """The split that may use a passage, by a hash of the words of its title."""
    title = " ".join(analyzer.words(passage.title))
    digest = hashlib.sha256(title.encode()).digest()
    place = int.from_bytes(digest[:8]) / 2**64
    for split, share in SPLITS.items():
        if place < share:
            return split
        place -= share
    return "test"


def candidates(corpus: Sequence[CorpusPassage], hops: Sequence[int], seed: int) -> Iterator[Evidence]:
    """Evidence of each number of hops in turn, in random order, until all is used."""
    usable = [row for row, entry in enumerate(corpus) if len(entry.text.split()) >= MIN_WORDS]
    joins = _joins(corpus, usable)
    chains: dict[int, list[tuple[int, ...]]] = {1: [(row,) for row in usable], 2: [], 3: []}
    for first, seconds in joins.items():
        for second in seconds:
            chains[2].append((first, second))
            for third in joins.get(second, ()):
                titles = {corpus[row].passage.title for row in (first, second, third)}
                if len(titles) == 3:
                    chains[3].append((first, second, third))
    by_hops = list[list[Evidence]]()
    for number in hops:
        evidence = list[Evidence]()
        for rows in chains[number]:
            passages = tuple(corpus[row].passage for row in rows)
            splits = {split_of(passage) for passage in passages}
            if len(splits) == 1:
                evidence.append(Evidence(passages, splits.pop()))
        random.Random(f"{seed}/{number}").shuffle(evidence)
        by_hops.append(evidence)
    for evidence in chain.from_iterable(zip_longest(*by_hops)):
        if evidence is not None:
            yield evidence


def _joins(corpus: Sequence[CorpusPassage], usable: Sequence[int]) -> dict[int, list[int]]:
    """For a passage those that it leads to: by a link, or because it mentions what they are about."""
    topics = _topics(corpus, usable)
    first_of_source: dict[str, int] = {}
    for row in usable:
        first_of_source.setdefault(corpus[row].source, row)
    mentions: dict[tuple[str, ...], list[int]] = defaultdict(list)
    linked: dict[int, list[int]] = defaultdict(list)
    names_by_word: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for name in topics:
        names_by_word[name[0]].append(name)
    for row in usable:
        entry = corpus[row]
        for target in LINK.findall(entry.text):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(entry.source), target))
            if path != entry.source and path in first_of_source:
                linked[row].append(first_of_source[path])
        words = analyzer.words(entry.text)
        for place, word in enumerate(words):
            for name in names_by_word.get(word, ()):
                if tuple(words[place : place + len(name)]) == name and row not in mentions[name][-1:]:
                    mentions[name].append(row)
    joins: dict[int, list[int]] = {row: list(targets) for row, targets in linked.items()}
    for name, rows in mentions.items():
        if len(rows) > MAX_MENTIONS:
            continue
        for row in rows:
            for target in topics[name]:
                if corpus[target].passage.title != corpus[row].passage.title:
                    joins.setdefault(row, []).append(target)
    return {row: list(dict.fromkeys(targets))[:MAX_JOINS] for row, targets in sorted(joins.items())}


def _topics(corpus: Sequence[CorpusPassage], usable: Sequence[int]) -> Mapping[tuple[str, ...], list[int]]:
    """The words of each name that a title ends with or begins with, and the first passages about it."""
    rows_by_name: dict[tuple[str, ...], dict[str, int]] = defaultdict(dict)
    for row in usable:
        parts = plain_title(corpus[row].passage.title).split(TITLE_SEPARATOR)
        for part in {parts[0], parts[-1]}:
            name = tuple(analyzer.words(part))
            if sum(map(len, name)) >= MIN_NAME_CHARS:
                rows_by_name[name].setdefault(corpus[row].passage.title, row)
    topics = {}
    for name, rows_by_title in rows_by_name.items():
        rows = list(rows_by_title.values())
        if len({corpus[row].source for row in rows}) <= MAX_TOPICS:
            topics[name] = rows
    return topics
