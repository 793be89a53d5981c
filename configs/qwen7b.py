"""Qwen2.5-7B with the paper's settings.

python launch/tpu_train.py --config qwen7b --model.path DIR --data.train FILES --retrieval.corpus FILE
"""

from memsearcher_jax.config import RunConfig
from memsearcher_jax.model.config import MeshConfig, ModelConfig
from memsearcher_jax.sampling.config import SamplingConfig
from memsearcher_jax.training.config import TrainingConfig


def qwen7b() -> RunConfig:
    """32 devices of 32 GB (v6e-32) by default: one row per device and micro-batch, four devices per sampler."""
    return RunConfig(
        model=ModelConfig(
            vocab_size=152_064,
            embed_size=3_584,
            ffn_size=18_944,
            layers=28,
            heads=28,
            kv_heads=4,
            head_size=128,
            tied=False,
            remat="full",
        ),
        mesh=MeshConfig(data=1, fsdp=-1, tensor=1),
        sampling=SamplingConfig(slots=64, tensor=4),
        training=TrainingConfig(rows_per_update=256, accumulate=8),
    )
