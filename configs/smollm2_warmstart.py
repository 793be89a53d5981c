"""SFT of the adapters for `smollm2` on demonstrations that a script makes from real questions and their pages.

python launch/tpu_train.py --config smollm2_warmstart --data.train FILE --data.test FILE --retrieval.corpus FILE

Questions of data.test are only measured, so give those to tune on. All weights learn at a lower rate than adapters:
--model.lora_rank 0 --training.learning_rate 2e-4.
"""

from dataclasses import replace

from memsearcher_jax.config import RunConfig
from memsearcher_jax.configs.smollm2 import smollm2
from memsearcher_jax.rl.config import RLConfig
from memsearcher_jax.sft.config import SFTConfig


def smollm2_warmstart() -> RunConfig:
    """360 questions, and one step of every second one as a question of its own; a step has several mini-batches."""
    base = smollm2()
    return replace(
        base,
        model=replace(base.model, adapter=""),
        training=replace(
            base.training,
            minibatch_rows=4,
            grad_accum_steps=4,
            learning_rate=1.5e-3,
            warmup_steps=8,
            decay_steps=85,  # the rate is 0 after 93 updates; 30 steps made 85
            adam_b2=0.98,
        ),
        rl=RLConfig(method="sft", steps=30, prompts_per_step=12, checkpoint_every=15),
        sft=SFTConfig(measure_every=5),
    )
