"""Mem-alpha with the settings of `memalpha_4b` on Qwen2.5-3B, the model of the search agents.

python launch/tpu_train.py --config memalpha_qwen3b --model.path DIR --data.train FILES
"""

from dataclasses import replace

from memsearcher_jax.config import RunConfig
from memsearcher_jax.configs.memalpha_4b import memalpha_4b
from memsearcher_jax.configs.qwen3b import qwen3b


def memalpha_qwen3b() -> RunConfig:
    """16 devices of 16 GB by default. The original's 30,000 tokens of memory per answer and its answers of 2,048 tokens
    together exceed the model's 32,768 positions: `--memalpha.answer_memory_tokens 28000` fits."""
    base, search = memalpha_4b(), qwen3b()
    return replace(
        base,
        model=search.model,
        sampling=replace(search.sampling, top_k=base.sampling.top_k, top_p=base.sampling.top_p),
        training=replace(base.training, grad_accum_steps=search.training.grad_accum_steps // 8),
    )
