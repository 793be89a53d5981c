"""The bounded memory: all that one turn hands to the next."""

from __future__ import annotations

from dataclasses import dataclass

from memsearcher_jax.agent.types import Ruler


@dataclass(frozen=True)
class Memory:
    """A text of at most `budget` tokens, with a record of what did not fit."""

    budget: int
    text: str = ""
    tokens: int = 0  # of the text
    cuts: int = 0  # rewrites that were over the budget
    tokens_cut: int = 0  # tokens by which they were over it, together

    def rewrite(self, text: str, ruler: Ruler) -> Memory:
        """The memory that holds `text` instead, cut at the budget."""
        tokens = ruler.count(text)
        excess = tokens - self.budget
        if excess <= 0:
            return Memory(self.budget, text, tokens, self.cuts, self.tokens_cut)
        clipped = ruler.clip(text, self.budget)
        return Memory(self.budget, clipped, ruler.count(clipped), self.cuts + 1, self.tokens_cut + excess)
