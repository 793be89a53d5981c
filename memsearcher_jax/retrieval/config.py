"""What is searched, and how: the retrieval section of a run's config, and the limits of the search service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

HASHING = "hashing"


@dataclass(frozen=True)
class RetrievalConfig:
    """What is searched, and how."""

    url: tuple[str, ...] = ()
    """A search service, such as http://host:8000, which then has its own corpus, index and method; several that hold
    parts of one corpus are searched as one; none: search here."""
    corpus: str = ""
    """A JSONL file of {"id", "contents"} passages, plain or .gz; empty: the embedded world."""
    index: str = ""
    """A folder with a built index, which then needs no corpus; empty: one is built in the run's folder."""
    method: Literal["dense", "bm25", "hybrid"] = "dense"
    """Meaning (dense vectors), words (bm25), or both with titles and the names in passages (hybrid)."""
    kind: Literal["scann", "exact"] = "scann"
    """How vectors are searched: approximately by ScaNN, or every inner product."""
    encoder: str = HASHING
    """What turns text into vectors: hashing, which needs no download, or a Hugging Face folder of E5 or MiniLM."""
    encoder_size: int = 1_024
    """Dimensions of a hashed vector; each halving costs recall, see retrieval/encode.py."""
    encoder_prompts: Literal["auto", "e5", "none"] = "auto"
    """What stands in front of queries and passages: `query: ` and `passage: ` (e5), nothing (none), or what the
    encoder's folder says (auto), E5's where it says nothing and is named after E5."""
    encoder_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type that such a folder's encoder computes in; its vectors are float32 in any case."""
    encoder_device: Literal["default", "cpu"] = "default"
    """Where it runs: on the accelerators beside the policy, or on the host's CPU."""
    query_tokens: int = 128
    """Longest query in tokens of that encoder, prompt included; what is longer is cut."""
    passage_tokens: int = 512
    """Longest passage, likewise; an encoder that was made for less cuts earlier."""
    embedding_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Type of the stored embeddings."""
    recall: float = 0.98
    """Share of the exact top five that ScaNN must find when an index is built."""
    batch_limit: int = 1_024
    """Most texts that are encoded or searched for in one call."""
    cached_queries: int = 20_000
    """Queries whose results are remembered, the least recently used forgotten first; 0: none."""
    timeout: float = 10.0
    """Seconds that a search service has for one attempt."""
    attempts: int = 4
    """Attempts at a search service before the search fails; the pauses between them grow."""


@dataclass(frozen=True)
class ServiceLimits:
    """What one request to the search service may ask for, and how many may wait."""

    query_characters: int = 4_096
    """Longest query."""
    queries: int = 1_024
    """Most queries of one request."""
    top_n: int = 100
    """Most passages per query."""
    body_bytes: int = 16_777_216
    """Largest body of a request."""
    batch_queries: int = 256
    """Queries of different requests that are searched for together."""
    waiting_queries: int = 8_192
    """Queries that may wait; whoever comes then is told to come back later."""
    seconds: float = 30.0
    """Time that a request may take."""
