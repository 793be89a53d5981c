"""One context on the host: its tokens, what was sampled of them, and how much of them its pages hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from memsearcher_jax.sampling.config import SamplingParams

FindStop = Callable[[Sequence[int]], int | None]
"""The ids that a generation has so far -> the length of the shortest prefix after which it ends; None: it goes on."""


@dataclass(frozen=True)
class RecordedContext:
    """A finished context: arrays with one entry per token."""

    ids: np.ndarray  # int32
    logprobs: np.ndarray  # float32; 0 where not sampled
    sampled: np.ndarray  # bool


class Context:
    """A context of at most `capacity` tokens. All but its last token are cached before it decodes."""

    def __init__(self, slot: int, rng_stream: tuple[int, int], params: SamplingParams, capacity: int):
        self.slot = slot
        self.rng_stream = rng_stream
        self.params = params
        self.ids_T = np.zeros(capacity, np.int32)
        self.logprob_T = np.zeros(capacity, np.float32)
        self.sampled_T = np.zeros(capacity, bool)
        self.length = 0
        self.generation = 0  # the number of the current or the last one
        self.generation_start = 0
        self.find_stop: FindStop | None = None
        self.remaining = 0  # tokens that the current generation may still add; 0: it has ended
        self.calls_in_flight = 0  # that decode the current generation, and whose tokens the host does not know yet
        self.pages: list[int] = []
        self.cached = 0  # leading tokens that the pages hold
        self.planned = 0  # leading tokens that the pages hold or, as the pool knows, will hold
        self.lost = 0  # leading tokens that were cached before the context gave its pages back

    @property
    def uncached(self) -> int:
        """Tokens to prefill; decoding feeds the last one itself."""
        return self.length - 1 - self.cached

    def append(self, ids: Sequence[int] | np.ndarray, logprob_T: np.ndarray | None = None) -> None:
        """Appends text, or sampled tokens with their log-probabilities."""
        span = slice(self.length, self.length + len(ids))
        self.ids_T[span] = ids
        if logprob_T is not None:
            self.logprob_T[span] = logprob_T
            self.sampled_T[span] = True
        self.length += len(ids)

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens, of which at most all but the last are cached."""
        self.logprob_T[length:] = 0.0
        self.sampled_T[length:] = False
        self.length = length
        self.cached = min(self.cached, length - 1)
        self.lost = min(self.lost, length - 1)

    def generate(self, max_tokens: int, find_stop: FindStop | None) -> None:
        """Starts a generation after the last token."""
        self.generation += 1
        self.calls_in_flight = 0
        self.find_stop = find_stop
        self.generation_start = self.length
        self.remaining = min(max_tokens, len(self.ids_T) - self.length)

    def generated(self) -> tuple[int, ...]:
        """The tokens of the last generation."""
        return tuple(self.ids_T[self.generation_start : self.length].tolist())

    def record(self) -> RecordedContext:
        """The context as it is now."""
        return RecordedContext(
            ids=self.ids_T[: self.length].copy(),
            logprobs=self.logprob_T[: self.length].copy(),
            sampled=self.sampled_T[: self.length].copy(),
        )
