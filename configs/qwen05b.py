"""Qwen2.5-0.5B with the paper's settings.

python launch/tpu_train.py --config qwen05b --model.path DIR --data.train FILES --retrieval.corpus FILE
"""

from memsearcher_jax.config import RunConfig
from memsearcher_jax.model.config import MeshConfig, ModelConfig
from memsearcher_jax.sampling.config import SamplingConfig
from memsearcher_jax.training.config import TrainingConfig


def qwen05b() -> RunConfig:
    """One host of four or eight devices."""
    return RunConfig(
        model=ModelConfig(
            vocab_size=151_936,
            embed_size=896,
            ffn_size=4_864,
            layers=24,
            heads=14,
            kv_heads=2,
            head_size=64,
            tied=True,
            remat="full",
        ),
        mesh=MeshConfig(data=1, fsdp=-1, tensor=1),
        sampling=SamplingConfig(slots=64, tensor=1),
        training=TrainingConfig(rows_per_update=256, accumulate=32),
    )
