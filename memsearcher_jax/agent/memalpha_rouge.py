"""ROUGE-L (Lin, 2004) over Porter stems, number for number as the package rouge_score gives it with its stemmer.

That package stems with NLTK's variant of Porter's algorithm (Porter, 1980), so this module does too. Both are written
out here because the agents' room is pure Python, and those packages bring numpy.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_TOKEN = re.compile(r"[a-z0-9]+")


class Rouge(NamedTuple):
    f1: float = 0.0
    precision: float = 0.0
    recall: float = 0.0


def rouge_l(prediction: str, golden: str) -> Rouge:
    """Longest common subsequence of the whole texts."""
    predicted, wanted = tokens(prediction), tokens(golden)
    return _rouge(len(_common(wanted, predicted)), len(predicted), len(wanted))


def rouge_l_sum(prediction: str, golden: str) -> Rouge:
    """The same by lines: each golden line against all predicted ones, every token counted at most once."""
    predicted, wanted = _lines(prediction), _lines(golden)
    left_predicted, left_wanted = _counted(predicted), _counted(wanted)
    lengths = left_predicted.total(), left_wanted.total()
    hits = 0
    for line in wanted:
        for position in sorted({place for other in predicted for place in _common(line, other)}):
            token = line[position]
            if left_predicted[token] > 0 and left_wanted[token] > 0:
                left_predicted[token] -= 1
                left_wanted[token] -= 1
                hits += 1
    return _rouge(hits, *lengths)


def tokens(text: str) -> list[str]:
    """Runs of ASCII letters and digits in lower case; those of more than three characters are stemmed."""
    return [stem(token) if len(token) > 3 else token for token in _TOKEN.findall(text.lower())]


def _rouge(hits: int, predicted: int, wanted: int) -> Rouge:
    if hits == 0:
        return Rouge()
    precision, recall = hits / predicted, hits / wanted
    return Rouge(2 * precision * recall / (precision + recall), precision, recall)


def _lines(text: str) -> list[list[str]]:
    return [tokens(line) for line in text.split("\n")]


def _counted(lines: Iterable[Sequence[str]]) -> Counter[str]:
    return Counter(token for line in lines for token in line)


def _common(wanted: Sequence[str], predicted: Sequence[str]) -> list[int]:
    """Positions in `wanted` of one longest common subsequence; which one matters to `rouge_l_sum`."""
    rows = [[0] * (len(predicted) + 1)]
    for token in wanted:
        above, row = rows[-1], [0]
        for column, other in enumerate(predicted):
            row.append(above[column] + 1 if token == other else max(above[column + 1], row[column]))
        rows.append(row)
    places, line, column = [], len(wanted), len(predicted)
    while line and column:
        if wanted[line - 1] == predicted[column - 1]:
            line, column = line - 1, column - 1
            places.append(line)
        elif rows[line][column - 1] > rows[line - 1][column]:
            column -= 1
        else:
            line -= 1
    return places[::-1]


_IRREGULAR = {
    **{"skies": "sky", "sky": "sky", "dying": "die", "lying": "lie", "tying": "tie", "news": "news"},
    **{"innings": "inning", "inning": "inning", "outings": "outing", "outing": "outing"},
    **{"cannings": "canning", "canning": "canning", "howe": "howe"},
    **{"proceed": "proceed", "exceed": "exceed", "succeed": "succeed"},
}
# (suffix, replacement), tried in this order; the first suffix that fits decides, even where its stem is too short.
_STEP_2 = (
    *(("ational", "ate"), ("tional", "tion"), ("enci", "ence"), ("anci", "ance"), ("izer", "ize"), ("bli", "ble")),
    *(("alli", "al"), ("entli", "ent"), ("eli", "e"), ("ousli", "ous"), ("ization", "ize"), ("ation", "ate")),
    *(("ator", "ate"), ("alism", "al"), ("iveness", "ive"), ("fulness", "ful"), ("ousness", "ous"), ("aliti", "al")),
    *(("iviti", "ive"), ("biliti", "ble"), ("fulli", "ful")),
)
_STEP_3 = (
    *(("icate", "ic"), ("ative", ""), ("alize", "al"), ("iciti", "ic"), ("ical", "ic"), ("ful", ""), ("ness", "")),
)
_STEP_4 = (
    *("al", "ance", "ence", "er", "ic", "able", "ible", "ant", "ement", "ment", "ent", "ion", "ou", "ism", "ate"),
    *("iti", "ous", "ive", "ize"),
)


def stem(word: str) -> str:
    """The stem of a lower-case word by Porter's algorithm in NLTK's variant."""
    if word in _IRREGULAR:
        return _IRREGULAR[word]
    if len(word) <= 2:
        return word
    word = _without_y(_without_past(_without_plural(word)))
    word = _step_2(word)
    word = _replaced(word, _STEP_3)
    word = _step_4(word)
    return _step_5(word)


def _shape(word: str) -> str:
    """`c` for each consonant and `v` for each vowel; y is a vowel after a consonant."""
    shape = ""
    for letter in word:
        vowel = letter in "aeiou" or (letter == "y" and shape.endswith("c"))
        shape += "v" if vowel else "c"
    return shape


def _measure(word: str) -> int:
    """How many times a consonant follows a vowel: Porter's m."""
    return _shape(word).count("vc")


def _short_end(word: str) -> bool:
    """Whether it ends consonant, vowel, consonant other than w, x, y, or (from NLTK) is a vowel and a consonant."""
    shape = _shape(word)
    return (shape.endswith("cvc") and word[-1] not in "wxy") or shape == "vc"


def _replaced(word: str, rules: Sequence[tuple[str, str]]) -> str:
    for suffix, replacement in rules:
        if word.endswith(suffix):
            kept = word.removesuffix(suffix)
            return kept + replacement if _measure(kept) > 0 else word
    return word


def _without_plural(word: str) -> str:
    if word.endswith("ies"):
        return word[:-1] if len(word) == 4 else word[:-2]
    if word.endswith("sses"):
        return word[:-2]
    return word[:-1] if word.endswith("s") and not word.endswith("ss") else word


def _without_past(word: str) -> str:
    if word.endswith("ied"):
        return word[:-1] if len(word) == 4 else word[:-2]
    if word.endswith("eed"):
        return word[:-1] if _measure(word[:-3]) > 0 else word
    suffix = next((end for end in ("ed", "ing") if word.endswith(end) and "v" in _shape(word.removesuffix(end))), None)
    if suffix is None:
        return word
    kept = word.removesuffix(suffix)
    if kept.endswith(("at", "bl", "iz")):
        return kept + "e"
    if len(kept) >= 2 and kept[-1] == kept[-2] and _shape(kept).endswith("c"):
        return kept if kept[-1] in "lsz" else kept[:-1]
    return kept + "e" if _measure(kept) == 1 and _short_end(kept) else kept


def _without_y(word: str) -> str:
    kept = word[:-1]
    return kept + "i" if word.endswith("y") and len(kept) > 1 and _shape(kept).endswith("c") else word


def _step_2(word: str) -> str:
    if word.endswith("alli") and _measure(word[:-4]) > 0:
        return _step_2(word[:-2])
    if word.endswith("logi"):  # the l belongs to the stem, so that short ones such as `geo` work
        return word[:-1] if _measure(word[:-3]) > 0 else word
    return _replaced(word, _STEP_2)


def _step_4(word: str) -> str:
    for suffix in _STEP_4:
        if word.endswith(suffix):
            kept = word.removesuffix(suffix)
            return kept if _measure(kept) > 1 and (suffix != "ion" or kept[-1] in "st") else word
    return word


def _step_5(word: str) -> str:
    if word.endswith("e"):
        kept = word[:-1]
        if _measure(kept) > 1 or (_measure(kept) == 1 and not _short_end(kept)):
            word = kept
    return word[:-1] if word.endswith("ll") and _measure(word[:-1]) > 1 else word
