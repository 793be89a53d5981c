"""Qwen2.5-0.5B with the paper's settings.

python launch/tpu_train.py --config qwen05b --model.path DIR --data.train FILES \\
    --retrieval.corpus FILE --retrieval.encoder DIR
"""

from memsearcher_jax.config import RunConfig
from memsearcher_jax.configs._qwen import qwen, qwen_model


def qwen05b() -> RunConfig:
    """One host of four or eight devices."""
    model = qwen_model(
        embed_size=896,
        ffn_size=4_864,
        layers=24,
        heads=14,
        kv_heads=2,
        head_size=64,
    )
    return qwen(model, tensor=1, grad_accum_steps=32)
