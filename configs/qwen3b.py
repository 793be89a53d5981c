"""Qwen2.5-3B with the paper's settings.

python launch/tpu_train.py --config qwen3b --model.path DIR --data.train FILES --retrieval.corpus FILE
"""

from memsearcher_jax.config import RunConfig
from memsearcher_jax.model.config import MeshConfig, ModelConfig
from memsearcher_jax.sampling.config import SamplingConfig
from memsearcher_jax.training.config import TrainingConfig


def qwen3b() -> RunConfig:
    """16 devices of 16 GB by default; two kv heads let two devices share one sampler."""
    return RunConfig(
        model=ModelConfig(
            vocab_size=151_936,
            embed_size=2_048,
            ffn_size=11_008,
            layers=36,
            heads=16,
            kv_heads=2,
            head_size=128,
            tied=True,
            remat="full",
        ),
        mesh=MeshConfig(data=1, fsdp=-1, tensor=1),
        sampling=SamplingConfig(slots=64, tensor=2),
        # Half of the usual chunk: beside logits of a thousand tokens, layers of this size are small.
        training=TrainingConfig(rows_per_update=256, accumulate=16, logit_chunk=512),
    )
