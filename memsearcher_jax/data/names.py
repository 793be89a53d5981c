"""Names that no encyclopedia holds, built from syllables: pronounceable, of a recognisable kind, never used twice."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

# 210 syllables: many more names than they number, and few enough that a small vocabulary holds each as one token.
ONSETS = ["b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z"]
VOWELS = ["a", "e", "i", "o", "u"]
CODAS = ["l", "n", "r"]
TOWN_ENDINGS = ["ford", "haven", "burg", "mouth", "stead"]
LAND_ENDINGS = ["ia", "land", "mark"]
TRADES = ["Mills", "Press", "Lines", "Foods", "Motors", "Glass"]
THINGS = ["Lantern", "Garden", "Bridge", "Winter", "Orchard", "Letter", "Harbour", "Mirror"]


@dataclass
class Names:
    """Draws names from `rng`; the one object of this room that changes, so that no draw can repeat another."""

    rng: random.Random
    used: set[str] = field(default_factory=set)

    def town(self) -> str:
        return self._unused(lambda: self._stem(1) + self.rng.choice(TOWN_ENDINGS))

    def land(self) -> str:
        return self._unused(lambda: self._stem(1) + self.rng.choice(LAND_ENDINGS))

    def firm(self) -> str:
        return self._unused(lambda: f"{self._stem(2)} {self.rng.choice(TRADES)}")

    def film(self) -> str:
        return self._unused(lambda: f"The {self.rng.choice(THINGS)} of {self._stem(2)}")

    def surname(self) -> str:
        return self._unused(lambda: self._stem(2))

    def person(self, surname: str, woman: bool) -> str:
        """A full name; first names recur, as they do among people, and women's end in a vowel."""
        return self._unused(lambda: f"{self._stem(1)}{self.rng.choice('ae') if woman else 'us'} {surname}")

    def _stem(self, syllables: int) -> str:
        """Syllables of the form onset, vowel, coda, the first letter a capital."""
        parts = [self.rng.choice(ONSETS) + self.rng.choice(VOWELS) + self.rng.choice(CODAS) for _ in range(syllables)]
        return "".join(parts).capitalize()

    def _unused(self, draw: Callable[[], str]) -> str:
        """Draw until the name is new; ends in ValueError where the syllables have run out."""
        for _ in range(1_000):
            name = draw()
            if name not in self.used:
                self.used.add(name)
                return name
        raise ValueError("data.world: no names are left: ask for fewer people")
