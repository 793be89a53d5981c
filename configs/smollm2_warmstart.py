"""The warm start of `smollm2`: SFT on demonstrations that a script makes from real questions and their pages.

python launch/tpu_train.py --config smollm2_warmstart --model.path SMOLLM2 --data.train FILE --data.test FILE
    --retrieval.corpus FILE --out DIR

Questions of data.test are only measured, so give those to tune on.
"""

from dataclasses import replace

from memsearcher_jax.config import RunConfig
from memsearcher_jax.configs.smollm2 import smollm2
from memsearcher_jax.rl.config import RLConfig
from memsearcher_jax.sft.config import SFTConfig


def smollm2_warmstart() -> RunConfig:
    """Two and a half epochs of 238 questions; a step's contexts fit one mini-batch."""
    base = smollm2()
    return replace(
        base,
        training=replace(
            base.training,
            minibatch_rows=10,
            grad_accum_steps=10,
            learning_rate=2e-4,
            decay_steps=100,
            adam_b2=0.98,
        ),
        rl=RLConfig(method="sft", steps=60, prompts_per_step=10, checkpoint_every=6),
        sft=SFTConfig(measure_every=12),
    )
