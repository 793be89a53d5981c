"""The contexts and pages of one data-parallel replica: which contexts run, wait for pages, or are preempted.

A context with a generation to make *runs* while it holds pages for it, else it *waits*. Waiting contexts are admitted
in the order in which they were opened, while pages are free. If a running context needs a page and none is free, the
youngest context that holds pages is preempted: it gives them back, and what of it is lost is prefilled again once it is
admitted. So the oldest running context always advances, whatever the size of the pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memsearcher_jax.sampling.config import SamplingConfig
from memsearcher_jax.sampling.context import Context
from memsearcher_jax.sampling.pages import CachedPrefix, PagePool


@dataclass(frozen=True)
class PrefillChunk:
    """Consecutive tokens of one context, of which `cached` tokens were cached before the call that holds the chunk."""

    context: Context
    start: int
    tokens: int
    cached: int


class Replica:
    """The host state of one replica."""

    def __init__(self, settings: SamplingConfig, pages: int):
        self._settings = settings
        self.pool = PagePool(pages, settings.page_tokens)
        self.contexts: dict[int, Context] = {}  # by slot, in the order in which they were opened
        # Counted since `clear`.
        self.preempted = 0
        self.shared_tokens = 0
        self.recomputed_tokens = 0

    @property
    def active(self) -> bool:
        """Whether a generation has not ended."""
        return any(context.remaining for context in self.contexts.values())

    @property
    def running(self) -> list[Context]:
        """Contexts that generate and hold pages, the oldest first."""
        return [context for context in self.contexts.values() if context.remaining and context.pages]

    @property
    def decoding(self) -> list[Context]:
        """Running contexts with nothing left to prefill, and a generation that the calls in flight may not end."""
        steps = self._settings.decode_steps_per_call
        return [
            context
            for context in self.running
            if not context.uncached and context.remaining > steps * context.calls_in_flight
        ]

    def clear(self) -> None:
        """Drops all contexts and all that is cached."""
        self.contexts.clear()
        self.pool.clear()
        self.preempted = 0
        self.shared_tokens = 0
        self.recomputed_tokens = 0

    def remove(self, slot: int) -> Context:
        """Takes the slot's context out; its pages keep their content until they are allocated again."""
        context = self.contexts.pop(slot)
        self.pool.release(context.pages)
        return context

    def truncate(self, context: Context, length: int) -> None:
        """Keeps the first `length` tokens of a context, and the pages that hold them."""
        context.truncate(length)
        full, tail = divmod(context.cached, self.pool.page_tokens)
        if tail and self.pool.is_shared(context.pages[full]):
            tail = 0  # another context needs the rest of this page
        kept = full + (tail > 0)
        self.pool.release(context.pages[kept:])
        del context.pages[kept:]
        context.cached = full * self.pool.page_tokens + tail
        context.planned = context.cached
        if tail:
            self.pool.truncate(context.pages[full], tail)

    def grow(self) -> None:
        """Gives every running context the pages that its next step may fill, and preempts where there are too few."""
        for context in self.running:
            while context.pages and (missing := self._needed_pages(context) - len(context.pages)) > 0:
                if missing <= self.pool.free:
                    self.pool.extend(context.pages, missing)
                else:
                    self._preempt(self._youngest_holder())
            self._plan(context)

    def admit(self) -> Iterator[tuple[int, int]]:
        """Admits the waiting contexts that find pages; yields (source, target) of the pages to copy for them.

        A context whose beginning another one is about to prefill waits for it. One that was preempted while a call
        decodes it waits for the tokens of this call.
        """
        running = self.running
        waiting = [
            context
            for context in self.contexts.values()
            if context.remaining and not context.pages and not context.calls_in_flight
        ]
        reserved: int | None = None  # a page for each running context that will need one; counted when it is needed
        for context in waiting:
            prefix = self.pool.find(context.ids_T[: context.length - 1])
            if prefix.is_growing:
                continue
            self.pool.hold(prefix.pages)
            missing = self._needed_pages(context) - len(prefix.pages)
            while missing > self.pool.free and not running:
                self._preempt(self._youngest_holder())
            if reserved is None:
                reserved = sum(map(self._will_grow, running))
            if missing + reserved > self.pool.free:  # a running context would preempt this one soon
                self.pool.release(prefix.pages)
                return
            yield from self._admit(context, prefix)
            running.append(context)
            reserved += self._will_grow(context)

    def _admit(self, context: Context, prefix: CachedPrefix) -> Iterator[tuple[int, int]]:
        pages = list(prefix.pages)
        context.pages = pages
        context.cached = len(pages) * self.pool.page_tokens + prefix.tail_tokens
        context.planned = context.cached
        if prefix.tail_tokens:
            self.pool.extend(pages, 1)
            self.pool.copy_content(prefix.tail, pages[-1], prefix.tail_tokens)
            yield prefix.tail, pages[-1]
        self.pool.extend(pages, self._needed_pages(context) - len(pages))
        self._plan(context)
        if context.lost:
            self.recomputed_tokens += max(0, context.lost - context.cached)
        else:
            self.shared_tokens += context.cached
        context.lost = 0

    def prefill_chunks(self, rows: int) -> list[PrefillChunk]:
        """At most `rows` chunks of the running contexts, the oldest first, which from now on count as cached."""
        width = self._settings.prefill_chunk
        chunks: list[PrefillChunk] = []
        for context in self.running:
            cached = context.cached
            end = context.length - 1
            for start in range(cached, end, width)[: rows - len(chunks)]:
                chunk = PrefillChunk(context, start, min(width, end - start), cached)
                chunks.append(chunk)
                self.mark_cached(context, start + chunk.tokens)
        return chunks

    def uncached_chunks(self) -> int:
        """Chunks that are left to prefill."""
        return sum(-(-context.uncached // self._settings.prefill_chunk) for context in self.running)

    def mark_cached(self, context: Context, tokens: int) -> None:
        """Records that the context's first `tokens` tokens are cached."""
        self._plan(context)
        self.pool.mark_cached(context.pages, context.cached, tokens)
        context.cached = tokens

    def _needed_pages(self, context: Context) -> int:
        """Pages that the context needs for its next call.

        They hold all of its tokens, and those of its calls in flight and of the next one, but for the last token.
        """
        calls = context.calls_in_flight + 1
        new_tokens = min(calls * self._settings.decode_steps_per_call, context.remaining)
        return self.pool.pages_for(context.length - 1 + new_tokens)

    def _preempt(self, context: Context) -> None:
        self.pool.release(context.pages)
        context.lost = max(context.lost, context.cached)
        context.pages = []
        context.cached = 0
        context.planned = 0
        self.preempted += 1

    def _plan(self, context: Context) -> None:
        """Records what the context's pages will hold after its prefill."""
        end = context.length - 1
        if context.pages and context.planned < end:
            self.pool.plan(context.pages, context.planned, context.ids_T[context.planned : end])
            context.planned = end

    def _will_grow(self, context: Context) -> bool:
        return self.pool.pages_for(context.length - 1 + context.remaining) > len(context.pages)

    def _youngest_holder(self) -> Context:
        return next(context for context in reversed(self.contexts.values()) if context.pages)
