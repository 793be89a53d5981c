"""BM25 over the items of one store: what an answering model is shown of a memory.

Okapi BM25 as rank_bm25 computes it, k1 = 1.5, b = 0.75: a word that more than half of the items hold has a negative
inverse document frequency (Robertson's, log((N - n + 0.5) / (n + 0.5))) and gets a quarter of the mean over all words
instead. That mean may be negative too, in small stores; scores below 0 are real. Trotman, Puurula and Burgess, 2014.

An index follows a memory of 130,000 tokens that changes in well under 50 ms and answers a query in as little:
`pytest -m slow -s -n 0 tests/agent/test_memalpha_search.py` prints both times.
"""

from __future__ import annotations

import heapq
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from memsearcher_jax.agent.memalpha_memory import Item, Memory, Store

K1, B, EPSILON = 1.5, 0.75, 0.25
TOP_K = 20

_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Index:
    """The words of N texts, counted. Built by `index`; nothing in it is ever changed."""

    texts: tuple[str, ...] = ()
    counts: tuple[Mapping[str, int], ...] = ()  # one for each text: how often it holds each of its words
    lengths: tuple[int, ...] = ()  # words of each text
    frequencies: Mapping[str, int] = field(default_factory=dict)  # word -> texts that hold it, 1 or more
    mean_idf: float = 0.0  # over all words, before any is replaced


def words(text: str) -> list[str]:
    """Lower-case runs of letters, digits and underscores; text without spaces, such as Chinese, is one word."""
    return _WORD.findall(text.lower())


def index(texts: Sequence[str], previous: Index | None = None) -> Index:
    """An index of `texts`. Only what `previous` does not hold is read; the result is the same without it."""
    previous = previous or Index()
    known = dict(zip(previous.texts, zip(previous.counts, previous.lengths, strict=True), strict=True))
    held, wanted = Counter(previous.texts), Counter(texts)
    fresh = {text: Counter(words(text)) for text in wanted if text not in known}
    known |= {text: (count, count.total()) for text, count in fresh.items()}

    frequencies = dict(previous.frequencies)
    for text, times in (wanted - held).items():
        for word in known[text][0]:
            frequencies[word] = frequencies.get(word, 0) + times
    for text, times in (held - wanted).items():
        for word in known[text][0]:
            frequencies[word] -= times
            if not frequencies[word]:
                del frequencies[word]
    counts, lengths = zip(*(known[text] for text in texts), strict=True) if texts else ((), ())
    return Index(tuple(texts), counts, lengths, frequencies, _mean_idf(frequencies, len(texts)))


def rank(
    held: Index, query: str, *, top_k: int | None = TOP_K, min_score: float | None = None
) -> list[tuple[int, float]]:
    """(position, score) of the best texts, best first, the earlier one first among equals.

    All texts take part, those with score 0 too, unless `min_score` is given; a query without words finds nothing.
    A word that the query repeats counts each time. Where no text holds any word, every score is 0.
    """
    asked = words(query)
    if not asked:
        return []
    weights = [(word, _weight(held, word)) for word in asked if word in held.frequencies]
    scores = _scores(held, weights) if weights else [0.0] * len(held.texts)
    eligible = [position for position, score in enumerate(scores) if min_score is None or score >= min_score]
    # nlargest keeps the order of equals, as a stable sort does
    limit = len(eligible) if top_k is None else top_k
    return [(position, scores[position]) for position in heapq.nlargest(limit, eligible, key=scores.__getitem__)]


def search(
    memory: Memory, store: Store, query: str, *, top_k: int | None = TOP_K, min_score: float | None = None
) -> tuple[tuple[Item, float], ...]:
    """The best items of one store with their scores; for many queries build the `index` once and `rank` each."""
    items = memory.items(store)
    found = rank(index([item.text for item in items]), query, top_k=top_k, min_score=min_score)
    return tuple((items[position], score) for position, score in found)


def _scores(held: Index, weights: Sequence[tuple[str, float]]) -> list[float]:
    mean_length = sum(held.lengths) / len(held.lengths)
    scores = []
    for count, length in zip(held.counts, held.lengths, strict=True):
        norm = K1 * (1 - B + B * length / mean_length)
        score = 0.0
        for word, weight in weights:
            if times := count.get(word):
                score += weight * (times * (K1 + 1) / (times + norm))
        scores.append(score)
    return scores


def _weight(held: Index, word: str) -> float:
    idf = _idf(held.frequencies[word], len(held.texts))
    return idf if idf >= 0 else EPSILON * held.mean_idf


def _idf(frequency: int, total: int) -> float:
    return math.log(total - frequency + 0.5) - math.log(frequency + 0.5)


def _mean_idf(frequencies: Mapping[str, int], total: int) -> float:
    if not frequencies:
        return 0.0
    # fsum, so that the order in which words were first met changes nothing
    shared = Counter(frequencies.values())
    return math.fsum(_idf(frequency, total) * times for frequency, times in shared.items()) / len(frequencies)
