"""Settings of the writer of questions. Imports no JAX."""

from __future__ import annotations

from dataclasses import dataclass

from memsearcher_jax.ranges import Count
from memsearcher_jax.rl.config import CompleterConfig


@dataclass(frozen=True)
class WriterConfig(CompleterConfig):
    """The language model that writes the questions: a service, or a checkpoint on this host's devices."""

    backend: str = "openai"
    checkpoint: str = ""
    """Weights that write in place of a service: a run directory, a Hugging Face directory, or a repository of the Hub,
    OWNER/NAME or OWNER/NAME@REVISION. They answer writer.max_concurrency prompts at a time."""
    context_tokens: Count = 2_048
    """checkpoint: tokens of a prompt with its passages and of the reply, together."""
