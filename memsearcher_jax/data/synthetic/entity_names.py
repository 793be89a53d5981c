"""Unique pronounceable names, built from syllables.

Names are short, and the syllables of a first name, a surname and a place differ. With one token per syllable a person's
name is two tokens, which a model of a million parameters learns to copy reliably.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

ONSETS = ["b", "d", "f", "g", "h", "j", "k", "l", "m", "n", "p", "r", "s", "t", "v", "w", "z"]
VOWELS = ["a", "e", "i", "o", "u"]
WOMEN_ENDINGS = ["ia", "ea", "oa", "ua"]
MEN_CODAS = ["s"]
SURNAME_CODAS = ["l", "n", "r"]
PLACE_CODAS = ["d", "k"]
TOWN_ENDINGS = ["ford", "haven", "burg", "mouth", "stead"]
COUNTRY_ENDINGS = ["ia", "land", "mark"]
TRADES = ["Mills", "Press", "Lines", "Foods", "Motors", "Glass"]
THINGS = ["Lantern", "Garden", "Bridge", "Winter", "Orchard", "Letter", "Harbour", "Mirror"]
ATTEMPTS = 30  # draws of one length before a syllable is added


def named_random(seed: int, *names: str) -> random.Random:
    """A generator per purpose, so that a change to one does not affect the others.

    `random.Random` seeds from a string by SHA-512, which unlike `hash()` is the same in every process.
    """
    return random.Random("/".join((str(seed), *names)))


@dataclass
class NameGenerator:
    """Draws names from `rng` and never returns the same name twice."""

    rng: random.Random
    used: set[str] = field(default_factory=set)

    def town(self) -> str:
        return self._unused(lambda syllables: self._place(syllables) + self.rng.choice(TOWN_ENDINGS))

    def country(self) -> str:
        return self._unused(lambda syllables: self._place(syllables) + self.rng.choice(COUNTRY_ENDINGS))

    def firm(self) -> str:
        return self._unused(lambda syllables: f"{self._place(syllables)} {self.rng.choice(TRADES)}")

    def film(self) -> str:
        return self._unused(lambda syllables: f"The {self.rng.choice(THINGS)} of {self._place(syllables)}")

    def surname(self) -> str:
        return self._unused(lambda syllables: self._stem(syllables, SURNAME_CODAS))

    def person(self, surname: str, woman: bool) -> str:
        """A full name. First names can repeat; women's end in a vowel and men's in s."""
        return self._unused(lambda syllables: f"{self._first_name(syllables, woman)} {surname}")

    def _first_name(self, syllables: int, woman: bool) -> str:
        start = "".join(self._syllable(SURNAME_CODAS) for _ in range(syllables - 1))
        end = self.rng.choice(ONSETS) + self.rng.choice(WOMEN_ENDINGS) if woman else self._syllable(MEN_CODAS)
        return (start + end).capitalize()

    def _place(self, syllables: int) -> str:
        return self._stem(syllables, PLACE_CODAS)

    def _stem(self, syllables: int, codas: list[str]) -> str:
        return "".join(self._syllable(codas) for _ in range(syllables)).capitalize()

    def _syllable(self, codas: list[str]) -> str:
        return self.rng.choice(ONSETS) + self.rng.choice(VOWELS) + self.rng.choice(codas)

    def _unused(self, draw: Callable[[int], str]) -> str:
        """Draw until the name is new, adding a syllable when the short names run out."""
        syllables = 1
        while True:
            for _ in range(ATTEMPTS):
                name = draw(syllables)
                if name not in self.used:
                    self.used.add(name)
                    return name
            syllables += 1
