"""Makes `package:tiny`: SFT on the scripted agent's trajectories, with a memory and with a history.

python launch/tpu_train.py --config tiny_warmstart --out DIR && python launch/export_hf.py --checkpoint DIR --out DIR

Errors in the memory are kept rare, since they teach misreading; answering early alone gives a bad initial policy.
"""

from dataclasses import replace

from memsearcher_jax.config import RunConfig
from memsearcher_jax.configs.tiny import tiny
from memsearcher_jax.data.problems import DataConfig
from memsearcher_jax.rl.config import RLConfig
from memsearcher_jax.sft.config import SFTConfig


def tiny_warmstart() -> RunConfig:
    """About a million parameters, a new encyclopedia for every step; 44 minutes on one CPU core that was shared."""
    base = tiny()
    return replace(
        base,
        model=replace(base.model, path=""),
        sampling=replace(base.sampling, decode_steps_per_call=16, decode_batch_sizes=()),
        data=DataConfig(),
        training=replace(
            base.training,
            minibatch_rows=8,
            grad_accum_steps=4,
            learning_rate=2e-3,
            warmup_steps=50,
            decay_steps=4_200,
            adam_b2=0.98,
        ),
        rl=RLConfig(method="sft", steps=400, prompts_per_step=28, checkpoint_every=50),
        sft=SFTConfig(
            answer_early=0.6,
            wrong_query=0.1,
            bad_memory=0.1,
            other_workflows=("react",),
            copy_examples=60,
            extraction_examples=150,
            action_examples=80,
        ),
    )
