"""Qwen3-4B with the paper's settings.

python launch/tpu_train.py --config qwen3_4b --model.path DIR --data.train FILES \\
    --retrieval.corpus FILE --retrieval.encoder DIR
"""

from memsearcher_jax.config import RunConfig
from memsearcher_jax.configs._qwen import qwen, qwen_model


def qwen3_4b() -> RunConfig:
    """16 devices of 32 GB (v6e-16) by default."""
    model = qwen_model(
        family="qwen3",
        max_positions=40_960,
        embed_size=2_560,
        ffn_size=9_728,
        layers=36,
        heads=32,
        kv_heads=8,
        head_size=128,
    )
    return qwen(model, tensor=4, grad_accum_steps=16)
