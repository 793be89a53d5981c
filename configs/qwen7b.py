"""Qwen2.5-7B with the paper's settings.

python launch/tpu_train.py --config qwen7b --model.path DIR --data.train FILES \\
    --retrieval.corpus FILE --retrieval.encoder DIR
"""

from memsearcher_jax.config import RunConfig
from memsearcher_jax.configs._qwen import qwen, qwen_model


def qwen7b() -> RunConfig:
    """32 devices of 32 GB (v6e-32) by default: one row per device and microbatch, four devices per sampler.

    On devices of 16 GB: `--model.remat nothing_saveable`.
    """
    model = qwen_model(
        remat="save_qkv_attention_up",  # a tenth less time than nothing_saveable
        vocab_size=152_064,
        tie_embeddings=False,
        embed_size=3_584,
        ffn_size=18_944,
        layers=28,
        heads=28,
        kv_heads=4,
        head_size=128,
    )
    return qwen(model, tensor=4, grad_accum_steps=8)
