"""Qwen2.5-3B with the paper's settings.

python launch/tpu_train.py --config qwen3b --model.path DIR --data.train FILES \\
    --retrieval.corpus FILE --retrieval.encoder DIR
"""

from memsearcher_jax.config import RunConfig
from memsearcher_jax.configs._qwen import qwen, qwen_model


def qwen3b() -> RunConfig:
    """16 devices of 16 GB by default; two kv heads let two devices share one sampler."""
    model = qwen_model(
        embed_size=2_048,
        ffn_size=11_008,
        layers=36,
        heads=16,
        kv_heads=2,
        head_size=128,
    )
    return qwen(model, tensor=2, grad_accum_steps=16)
