"""The device calls that fill the KV cache: prefill of uncached tokens, and copies of partly shared pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from memsearcher_jax.model import kv_cache, qwen
from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.model.kv_cache import Cache, CacheView
from memsearcher_jax.model.qwen import Params

HostArray = Any  # a numpy array in the scheduler, a tracer inside a program


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Prefill:
    """Caches a block of tokens: B rows, one for each shard of the mesh, cut into A chunks of consecutive tokens."""

    ids_BT: HostArray  # int32
    position_BT: HostArray  # int32
    segment_BT: HostArray  # int32: one number for each context; 0 is padding
    page_table_AI: HostArray  # int32: the pages of each chunk's context
    start_A: HostArray  # int32: position of the chunk's first token
    length_A: HostArray  # int32: tokens of the chunk's context that were cached before this call


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CopyPages:
    """Copies pages, in order; a page that is copied over itself is an unused entry."""

    source_A: HostArray  # int32
    target_A: HostArray  # int32


def prefill(model: ModelConfig, cache: Cache, params: Params, call: Prefill) -> Cache:
    view = CacheView.of(cache, call.page_table_AI, call.start_A, call.length_A, model.attention)
    _, after = qwen.forward(params, model, call.ids_BT, call.position_BT, call.segment_BT, view, output="hidden")
    assert isinstance(after, Cache)  # what `CacheView.append` returns
    return after


def copy_pages(cache: Cache, params: Params, call: CopyPages) -> Cache:
    return kv_cache.copy_pages(cache, call.source_A, call.target_A)
