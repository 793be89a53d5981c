"""BM25 over the items of one store: selects what an answering model sees of a memory.

Okapi BM25 as rank_bm25 computes it, k1 = 1.5, b = 0.75: a word that more than half of the texts hold has a negative
inverse document frequency (Robertson's, log((N - n + 0.5) / (n + 0.5))) and gets a quarter of the mean over all words
instead. In small stores that mean may be negative too, so scores below 0 occur. Trotman, Puurula and Burgess, 2014.
bm25s has no such variant.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from memsearcher_jax.agent.memalpha.memory import Item, Memory, Store

K1 = 1.5
B = 0.75
EPSILON = 0.25
TOP_K = 20


@dataclass(frozen=True)
class BM25Index:
    """The words of the indexed texts."""

    lengths: list[int]  # words of each text
    postings: dict[str, list[tuple[int, int]]]  # by word: (position of a text, occurrences there)
    idf: dict[str, float]

    @classmethod
    def build(cls, texts: Sequence[str]) -> BM25Index:
        counts = [Counter(tokenize(text)) for text in texts]
        postings = defaultdict[str, list[tuple[int, int]]](list)
        for position, count in enumerate(counts):
            for word, occurrences in count.items():
                postings[word].append((position, occurrences))
        numbers = {word: len(found) for word, found in postings.items()}
        idf = {word: math.log(len(texts) - number + 0.5) - math.log(number + 0.5) for word, number in numbers.items()}
        total = 0.0
        for value in idf.values():  # not `fsum` or `sum`: scores are those of the original bit for bit
            total += value
        replacement = EPSILON * total / max(1, len(idf))
        idf = {word: value if value >= 0 else replacement for word, value in idf.items()}
        return cls([count.total() for count in counts], postings, idf)

    def rank(self, query: str, *, top_k: int | None = TOP_K, min_score: float | None = None) -> list[tuple[int, float]]:
        """(position, score) of the best texts, all with None, best first; texts with equal scores keep their order.

        Texts with score 0 take part unless `min_score` excludes them. A query without words finds nothing. A word that
        the query repeats counts each time. Where no text holds a word of the query, every score is 0.
        """
        words = tokenize(query)
        if not words:
            return []
        scores = [0.0] * len(self.lengths)
        mean_length = sum(self.lengths) / max(1, len(self.lengths))
        for word in words:
            for position, occurrences in self.postings.get(word, ()):
                norm = K1 * (1 - B + B * self.lengths[position] / mean_length)
                scores[position] += self.idf[word] * (occurrences * (K1 + 1) / (occurrences + norm))
        eligible = [position for position, score in enumerate(scores) if min_score is None or score >= min_score]
        ranked = sorted(eligible, key=scores.__getitem__, reverse=True)
        return [(position, scores[position]) for position in ranked[:top_k]]


def tokenize(text: str) -> list[str]:
    """Lower-case runs of letters, digits and underscores; text without spaces, such as Chinese, is one word."""
    return re.findall(r"\w+", text.lower())


def search(
    memory: Memory, store: Store, query: str, *, top_k: int | None = TOP_K, min_score: float | None = None
) -> tuple[tuple[Item, float], ...]:
    """The best items of one store with their scores. For several queries, build one `BM25Index`."""
    items = memory.items(store)
    ranked = BM25Index.build([item.text for item in items]).rank(query, top_k=top_k, min_score=min_score)
    return tuple((items[position], score) for position, score in ranked)
