"""Qwen3-4B with the paper's settings.

python launch/tpu_train.py --config qwen3_4b --model.path DIR --data.train FILES --retrieval.corpus FILE
"""

from memsearcher_jax.config import RunConfig
from memsearcher_jax.model.config import MeshConfig, ModelConfig
from memsearcher_jax.sampling.config import SamplingConfig
from memsearcher_jax.training.config import TrainingConfig


def qwen3_4b() -> RunConfig:
    """16 devices of 32 GB (v6e-16) by default; eight kv heads make a cache twice that of 7B, hence fewer slots."""
    return RunConfig(
        model=ModelConfig(
            vocab_size=151_936,
            embed_size=2_560,
            ffn_size=9_728,
            layers=36,
            heads=32,
            kv_heads=8,
            head_size=128,
            tied=True,
            family="qwen3",
            max_positions=40_960,
            remat="full",
        ),
        mesh=MeshConfig(data=1, fsdp=-1, tensor=1),
        sampling=SamplingConfig(slots=32, tensor=4),
        training=TrainingConfig(rows_per_update=256, accumulate=16),
    )
