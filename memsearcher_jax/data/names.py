"""Names that no encyclopedia holds, built from syllables: pronounceable, of a recognisable kind, never used twice.

They are as short as names get, and the syllables of a first name, a surname and a place differ: with a token for each
syllable a person is two tokens, and a policy of a million weights can learn to copy them without a slip.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

ONSETS = ["b", "d", "f", "g", "h", "j", "k", "l", "m", "n", "p", "r", "s", "t", "v", "w", "z"]
VOWELS = ["a", "e", "i", "o", "u"]
WOMEN_ENDINGS = ["ia", "ea", "oa", "ua"]
MEN_CODA = "s"
SURNAME_CODAS = ["l", "n", "r"]
PLACE_CODAS = ["d", "k"]
TOWN_ENDINGS = ["ford", "haven", "burg", "mouth", "stead"]
LAND_ENDINGS = ["ia", "land", "mark"]
TRADES = ["Mills", "Press", "Lines", "Foods", "Motors", "Glass"]
THINGS = ["Lantern", "Garden", "Bridge", "Winter", "Orchard", "Letter", "Harbour", "Mirror"]
TRIES = 30  # draws of the shortest names before they count as used up


@dataclass
class Names:
    """Draws names from `rng`; the one object of this room that changes, so that no draw can repeat another."""

    rng: random.Random
    syllables: int = 1  # of the shortest; more where a name must not be found inside another word
    used: set[str] = field(default_factory=set)

    def town(self) -> str:
        return self._unused(lambda syllables: self._place(syllables) + self.rng.choice(TOWN_ENDINGS))

    def land(self) -> str:
        return self._unused(lambda syllables: self._place(syllables) + self.rng.choice(LAND_ENDINGS))

    def firm(self) -> str:
        return self._unused(lambda syllables: f"{self._place(syllables)} {self.rng.choice(TRADES)}")

    def film(self) -> str:
        return self._unused(lambda syllables: f"The {self.rng.choice(THINGS)} of {self._place(syllables)}")

    def surname(self) -> str:
        return self._unused(lambda syllables: self._stem(syllables, SURNAME_CODAS))

    def person(self, surname: str, woman: bool) -> str:
        """A full name; first names recur, as they do among people, women's end in a vowel and men's in s."""
        return self._unused(lambda syllables: f"{self._first_name(syllables, woman)} {surname}")

    def _first_name(self, syllables: int, woman: bool) -> str:
        before = "".join(self._syllable(SURNAME_CODAS) for _ in range(syllables - 1))
        last = self.rng.choice(ONSETS) + self.rng.choice(WOMEN_ENDINGS) if woman else self._syllable([MEN_CODA])
        return (before + last).capitalize()

    def _place(self, syllables: int) -> str:
        return self._stem(syllables, PLACE_CODAS)

    def _stem(self, syllables: int, codas: list[str]) -> str:
        return "".join(self._syllable(codas) for _ in range(syllables)).capitalize()

    def _syllable(self, codas: list[str]) -> str:
        return self.rng.choice(ONSETS) + self.rng.choice(VOWELS) + self.rng.choice(codas)

    def _unused(self, draw: Callable[[int], str]) -> str:
        """Draw until the name is new, with more syllables where short names have run out."""
        for syllables in itertools.count(self.syllables):
            for _ in range(TRIES):
                name = draw(syllables)
                if name not in self.used:
                    self.used.add(name)
                    return name
        raise AssertionError("unreachable: names of enough syllables never run out")
