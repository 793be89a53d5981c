"""What the presets with a published Qwen model and a paper's settings share."""

from typing import Any

from memsearcher_jax.config import RunConfig
from memsearcher_jax.model.config import MeshConfig, ModelConfig
from memsearcher_jax.retrieval.config import RetrievalConfig
from memsearcher_jax.sampling.config import SamplingConfig
from memsearcher_jax.training.config import TrainingConfig


def qwen_model(**sizes: Any) -> ModelConfig:
    """A model of the published shape `sizes`, for training on many devices."""
    return ModelConfig(**{"vocab_size": 151_936, "tie_embeddings": True, "remat": "nothing_saveable"} | sizes)


def qwen(model: ModelConfig, *, tensor: int, grad_accum_steps: int) -> RunConfig:
    """The MemSearcher paper's settings, which are the defaults, for `model`.

    A host decodes up to 256 contexts in the memory of 64 complete ones: 2,048 tokens each, of which they need 1,340 on
    average. 16 tokens per call keep the decode buffer of 256 slots, and with it all temporary memory, below 0.1 GB.

    662 steps are one epoch of the 169,615 training questions of NQ and HotpotQA, 256 per step; for other data,
    set `--rl.epochs 1`. An update has the original's 640 contexts: seven updates per step with 3.5 contexts per
    trajectory.
    """
    return RunConfig(
        published_model=True,
        model=model,
        mesh=MeshConfig(data=1, fsdp=-1, tensor=1),
        sampling=SamplingConfig(slots=256, kv_tokens=524_288, decode_steps_per_call=16, tensor=tensor),
        retrieval=RetrievalConfig(encoder=""),  # the paper's is E5, in a folder
        training=TrainingConfig(grad_accum_steps=grad_accum_steps, logit_chunk=512),
    )
