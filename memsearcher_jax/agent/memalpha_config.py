"""Settings of Mem-alpha beside those that all agents share: `agent.memory_tokens` bounds what a context shows of the
memory, `agent.reply_tokens` one reply, `agent.question_tokens` a question."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from memsearcher_jax.agent.memalpha_reward import MemalphaRewardConfig


@dataclass(frozen=True)
class MemalphaConfig:
    """How a stream is read and asked about. Defaults: the paper's released run."""

    chunk_tokens: int = 2_560
    """Longest chunk, in tokens of the policy; longer ones are refused when the data is read."""
    core_tokens: int = 512
    """Budget of the core paragraph; what is over it is cut, with a notice at its end."""
    shown_items: int = 5
    """Latest items of each list that a context shows; fewer where they do not fit agent.memory_tokens."""
    reader: Literal["memory", "long_context", "rag"] = "memory"
    """What questions are answered from: the memory, or, to compare, the end of the stream as it is (long_context) or
    the chunks that BM25 finds (rag); these two write no memory."""
    retrieved_items: int = 20
    """Items of each list that a question is answered from, the best by BM25."""
    retrieved_chunks: int = 2
    """Chunks that a question is answered from, of reader rag."""
    answer_memory_tokens: int = 30_000
    """Budget of what a question is answered from; items that BM25 finds worst are left out first. Of reader
    long_context: how much of the stream's end is read."""
    answer_tokens: int = 2_048
    """Most tokens of one answer, or of one verdict of a judge."""
    answer_temperature: float = 0.0
    """Of answers and verdicts; 0 is greedy. The original draws at 0.7, which makes its rewards noisy."""
    reward: MemalphaRewardConfig = field(default_factory=MemalphaRewardConfig)
