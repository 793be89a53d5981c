"""The retrieval section of a run's config, and the limits of the search service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memsearcher_jax.http.config import ConnectionLimits
from memsearcher_jax.ranges import Count, LargeCount, Positive, PositiveFraction

HASHING = "hashing"
MAX_TOP_N = 100
"""Results per query up to which an approximate search considers the same candidates."""
MAX_BATCH = 1_024
"""Texts that are encoded or searched in one call."""
MAX_QUERY_CHARS = 4_000
"""Characters of a query that are searched: encoders read less."""


@dataclass(frozen=True)
class RetrievalConfig:
    """What is searched, and how."""

    url: str = ""
    """Address of a search service, such as http://host:8000, with a corpus, an index and a method of its own. Empty:
    search on this host."""
    corpus: str = ""
    """A JSONL file of {"id", "contents"} passages, plain or .gz, or hf://datasets/OWNER/NAME/FILE; empty: the synthetic
    encyclopedia."""
    index: str = ""
    """A built index folder or dataset repository of the Hub, which needs no corpus; empty: build one in the run's
    folder."""
    method: Literal["dense", "bm25", "hybrid"] = "dense"
    """Dense vectors, BM25, or a fusion of both with titles and the links between passages (hybrid)."""
    index_type: Literal["scann", "exact"] = "scann"
    """How vectors are searched: approximately with ScaNN, or exhaustively."""
    encoder: str = HASHING
    """Encoder of the texts: hashing, which needs no download, or a Hugging Face folder or repository of E5 or MiniLM.
    Empty: it must be given, as in the presets of published models."""
    encoder_prompts: Literal["auto", "e5", "none"] = "auto"
    """Prefixes of queries and passages: `query: ` and `passage: ` (e5), none, or those in the encoder's folder (auto),
    which are E5's if the folder defines none and has the name of a published E5, such as e5-base-v2."""
    max_query_tokens: Count = 128
    """Queries are truncated to this many of the encoder's tokens, prefix included."""
    max_passage_tokens: Count = 512
    """As max_query_tokens, for passages. An encoder with a lower limit truncates to that."""
    embedding_dtype: Literal["float32", "float16"] = "float32"
    """Type of the embeddings that are stored when an index is built."""
    target_recall: PositiveFraction = 0.98
    """Share of the exact top five that ScaNN must find when an index is built, on probes that did not tune it."""
    timeout: Positive = 10.0
    """Seconds that one request to a search service may take."""
    max_concurrency: Count = 16
    """Concurrent requests of a rollout to a search service. Searches that are asked for meanwhile share the next
    request. An index in this process is searched by one batch at a time."""


@dataclass(frozen=True)
class ServiceLimits(ConnectionLimits):
    """Limits of the search service."""

    max_batch_queries: LargeCount = 256
    """Queries of concurrent requests that are searched in one call."""
    max_waiting_queries: LargeCount = 8_192
    """Queries of one request, with status 400, and queries that may wait; further requests get status 503."""
    search_timeout: Positive = 10.0
    """Seconds until the process that searches has answered 64 queries; else they have failed, and it is replaced."""
    request_timeout: Positive = 30.0
    """Seconds until a request is rejected with status 503."""
