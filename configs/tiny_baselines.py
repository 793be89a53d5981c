"""The baselines of `tiny`: other protocols on the same data, with the same budget; docs/train.md compares them.

python launch/tpu_train.py --config tiny_react
"""

from dataclasses import replace

from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.config import RunConfig
from memsearcher_jax.configs.qwen import search_r1_3b
from memsearcher_jax.configs.tiny import tiny


def tiny_react() -> RunConfig:
    """ReAct: the complete history instead of a memory, from the same weights. Takes as long as `tiny`."""
    base = tiny()
    return replace(
        base,
        agent=replace(base.agent, workflow="react", memory_tokens=AgentConfig.memory_tokens),
        sampling=replace(base.sampling, context_tokens=1_024),
        training=replace(base.training, seq_len=1_024, minibatch_rows=6, grad_accum_steps=6, logit_chunk=128),
    )


def tiny_compact() -> RunConfig:
    """The history of ReAct, summarised after two searches, from weights that know every `history_tokens`.

    Takes as long as `tiny`.
    """
    base = tiny()
    return replace(
        base,
        model=replace(base.model, path="package:tiny_compact", tokenizer="package:tiny"),
        agent=replace(base.agent, workflow="compact", history_tokens=128),
        sampling=replace(base.sampling, context_tokens=512),
        training=replace(base.training, seq_len=512, logit_chunk=128),
    )


def tiny_search_r1() -> RunConfig:
    """Search-R1: the complete history, its protocol and its reward."""
    return replace(_baseline(tiny_react(), "search_r1"), reward=search_r1_3b().reward)


def tiny_mem1() -> RunConfig:
    """MEM1: one internal state, in the tags and from the weights of Search-R1."""
    return replace(_baseline(tiny(), "mem1"), reward=search_r1_3b().reward)


def tiny_rag() -> RunConfig:
    """RAG: one search for the question, one passage as in every search of `tiny`, one answer."""
    return _baseline(tiny(), "rag")


def tiny_direct() -> RunConfig:
    """An answer without a search. No test question is about an entity of training: only the format can be learned."""
    return _baseline(tiny(), "direct")


def _baseline(base: RunConfig, workflow: str) -> RunConfig:
    """`base` with another workflow, from weights that know its protocol."""
    return replace(
        base,
        model=replace(base.model, path="package:tiny_baselines", tokenizer="package:tiny"),
        agent=replace(base.agent, workflow=workflow),
    )
