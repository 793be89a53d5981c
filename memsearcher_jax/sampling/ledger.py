"""The host's copy of what stands in every slot, of how much of it the slot's cache holds, and of what that saved.

A freed slot keeps its cache until it is opened again. So a fresh prompt asks the ledger which slot has cached the
longest beginning of it: its own slot has the system prefix and the question of the turn before, another one those of
the same problem's other rollouts, and any slot the system prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Recorded:
    """One context as its slot held it, one entry per token."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # 0 where not sampled
    sampled: tuple[bool, ...]


@dataclass
class Counters:
    """What an engine has done since `start`."""

    standing_tokens: int = 0  # text that was given: prompts and observations
    prompt_tokens: int = 0  # all that stood before each generation: what a sampler without reuse would prefill
    prefilled_tokens: int = 0  # tokens that went through prefill
    shared_tokens: int = 0  # beginnings of fresh contexts that a cache held already
    generated_tokens: int = 0
    ticks: int = 0
    speaking_slots: int = 0  # added up over ticks
    slots: int = 0  # likewise, those that had nothing to say included

    @property
    def reused_share(self) -> float:
        """Share of the prompt tokens that were never computed again."""
        return 1 - self.prefilled_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def idle_share(self) -> float:
        """Share of the slots that a tick computed for nothing: free, or waiting for a search."""
        return 1 - self.speaking_slots / self.slots if self.slots else 0.0


class Ledger:
    """S slots of C tokens; arrays are changed in place."""

    def __init__(self, slots: int, capacity: int):
        self.ids_SC = np.zeros((slots, capacity), np.int32)
        self.logprob_SC = np.zeros((slots, capacity), np.float32)
        self.sampled_SC = np.zeros((slots, capacity), bool)
        self.length_S = np.zeros(slots, np.int32)
        self.cached_S = np.zeros(slots, np.int32)
        """Tokens at the beginning of `ids_SC` whose keys and values are held, also after the slot was freed."""
        self.follows_S = np.zeros(slots, bool)
        """Contexts that begin with the shared prefix; `cached_S` and `promised_S` count it."""
        self.promised_S = np.zeros(slots, np.int32)
        """Tokens that the cache holds, or will once prefill has caught up with contexts opened since the last tick."""

    def open(self, slot: int, ids_T: np.ndarray, cached: int, follows: bool) -> None:
        """A fresh context, of which the first `cached` tokens are held already, those of the shared prefix included."""
        self.ids_SC[slot, : len(ids_T)] = ids_T
        self.logprob_SC[slot] = 0.0
        self.sampled_SC[slot] = False
        self.length_S[slot], self.cached_S[slot], self.promised_S[slot] = len(ids_T), cached, len(ids_T) - 1
        self.follows_S[slot] = follows

    def add_text(self, slot: int, ids: Sequence[int]) -> None:
        """Given tokens behind what stands."""
        length = self.length_S[slot]
        self.ids_SC[slot, length : length + len(ids)] = ids
        self.length_S[slot] += len(ids)

    def add_drawn(self, slot: int, token_T: np.ndarray, logprob_T: np.ndarray) -> None:
        """Sampled tokens behind what stands; after them the cache holds all but the last."""
        start, end = self.length_S[slot], self.length_S[slot] + len(token_T)
        self.ids_SC[slot, start:end] = token_T
        self.logprob_SC[slot, start:end] = logprob_T
        self.sampled_SC[slot, start:end] = True
        self.length_S[slot], self.cached_S[slot], self.promised_S[slot] = end, end - 1, end - 1

    def forget(self) -> None:
        """The caches hold nothing any more."""
        self.cached_S[:] = self.promised_S[:] = 0

    def behind(self, slot: int) -> int:
        """Standing tokens that prefill has still to cache; decode feeds the last one."""
        return int(self.length_S[slot] - 1 - self.cached_S[slot])

    def best_source(self, slot: int, ids_T: np.ndarray, prefix_tokens: int, part: range) -> tuple[int, int]:
        """(source, tokens): which slot of `part` caches, or will, the longest beginning of `ids_T`, and how much of it.

        The first `prefix_tokens` of it stand in the shared prefix: only contexts that begin with it too, or without it
        if there are none, can be a source. The slot itself if no other has more, and otherwise one that need not be
        waited for, if there is.
        """
        differs_ST = self.ids_SC[part.start : part.stop, : len(ids_T)] != ids_T
        same_S = np.where(differs_ST.any(axis=1), differs_ST.argmax(axis=1), len(ids_T))
        cached_S, promised_S = self.cached_S[part.start : part.stop], self.promised_S[part.start : part.stop]
        alike_S = self.follows_S[part.start : part.stop] == (prefix_tokens > 0)
        shared_S = np.where(alike_S, np.minimum(same_S, promised_S), 0)
        own = slot - part.start
        shared_S[own] = max(min(same_S[own], cached_S[own]) * alike_S[own], prefix_tokens)
        best = int(np.lexsort((cached_S >= shared_S, shared_S))[-1])
        best = own if shared_S[own] == shared_S[best] else best
        return part.start + best, int(shared_S[best])

    def record(self, slot: int) -> Recorded:
        """The context as it stands."""
        length = self.length_S[slot]
        return Recorded(
            tuple(self.ids_SC[slot, :length].tolist()),
            tuple(self.logprob_SC[slot, :length].tolist()),
            tuple(self.sampled_SC[slot, :length].tolist()),
        )
