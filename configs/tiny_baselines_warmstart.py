"""Makes `package:tiny_baselines`: `package:tiny`, which can copy, learns the protocols of Search-R1, RAG and direct.

python launch/tpu_train.py --config tiny_baselines_warmstart --out DIR
python launch/export_hf.py --checkpoint DIR --out NEW
"""

from dataclasses import replace

from memsearcher_jax.config import RunConfig
from memsearcher_jax.configs.tiny_baselines import tiny_search_r1
from memsearcher_jax.configs.tiny_warmstart import tiny_warmstart


def tiny_baselines_warmstart() -> RunConfig:
    """The errors of `tiny_warmstart`, so that all workflows begin with the same faults."""
    base, warmstart = tiny_search_r1(), tiny_warmstart()
    return replace(
        base,
        model=replace(base.model, path="package:tiny"),
        sampling=warmstart.sampling,
        data=warmstart.data,
        training=replace(warmstart.training, learning_rate=1e-3, warmup_steps=20, decay_steps=1_200),
        rl=replace(warmstart.rl, steps=100),
        sft=replace(warmstart.sft, other_workflows=("rag", "direct"), action_examples=0),
    )
