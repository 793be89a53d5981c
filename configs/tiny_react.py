"""The ReAct baseline of `tiny`: the complete history instead of a memory; same weights, data and reward.

python launch/tpu_train.py --config tiny_react
"""

from dataclasses import replace

from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.config import RunConfig
from memsearcher_jax.configs.tiny import tiny


def tiny_react() -> RunConfig:
    """Takes as long as `tiny`; docs/learning.md shows both."""
    base = tiny()
    return replace(
        base,
        agent=replace(base.agent, workflow="react", prompts="terse_react", memory_tokens=AgentConfig.memory_tokens),
        sampling=replace(base.sampling, context_tokens=1_024),
        training=replace(base.training, seq_len=1_024, minibatch_rows=6, grad_accum_steps=6, logit_chunk=128),
    )
