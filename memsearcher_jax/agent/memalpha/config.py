"""Settings of Mem-alpha.

Of the settings that all agents share, `agent.memory_tokens` limits what a context shows of the memory,
`agent.completion_tokens` one reply, and `agent.question_tokens` a question.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from memsearcher_jax.agent.memalpha.reward import MemalphaRewardConfig
from memsearcher_jax.ranges import Count, CountOrZero, NonNegative


@dataclass(frozen=True)
class MemalphaConfig:
    """How a stream is read, and how questions about it are answered.

    Defaults: the paper's released run, except answer_temperature.
    """

    chunk_tokens: Count = 2_560
    """Maximum tokens of a chunk; longer ones are refused when the data is read."""
    core_tokens: Count = 512
    """Token budget of the core paragraph; longer text is cut, with a notice at its end."""
    shown_items: CountOrZero = 5
    """Latest items of each list that a context shows; fewer if they do not fit agent.memory_tokens."""
    answer_from: Literal["memory", "long_context", "rag"] = "memory"
    """What questions are answered from: the memory or, as baselines that write no memory, the end of the stream
    (long_context) or the chunks that BM25 finds (rag)."""
    retrieved_items: Count = 20
    """Items of each list from which a question is answered, the best by BM25."""
    retrieved_chunks: Count = 2
    """Chunks from which a question is answered, with answer_from rag."""
    answer_memory_tokens: Count = 30_000
    """Token budget of the text from which a question is answered; the items that BM25 ranks last are dropped first.
    With answer_from long_context, how much of the end of the stream is read."""
    answer_tokens: Count = 2_048
    """Maximum tokens of one answer, or of one reply of the judge."""
    answer_temperature: NonNegative = 0.0
    """Sampling temperature of answers and of the judge; 0 is greedy. The original uses 0.7, which makes its rewards
    noisy."""
    answer_rules: tuple[str, ...] = ()
    """SOURCE=RULE: how answers about a data source of one's own are scored, by its exact name. Rules: contains (the
    default), contains_text, all_elements, keywords, parts, label, box, rouge_l, locomo, judge (docs/memalpha.md)."""
    reward: MemalphaRewardConfig = field(default_factory=MemalphaRewardConfig)
