"""Mem-alpha's GRPO on a laptop, from the packaged warm start, no download.

python launch/tpu_train.py --config tiny_memalpha
"""

from dataclasses import replace

from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.agent.memalpha.config import MemalphaConfig
from memsearcher_jax.config import RunConfig
from memsearcher_jax.configs.tiny import tiny
from memsearcher_jax.data.config import DataConfig
from memsearcher_jax.data.synthetic.streams import SyntheticStreamConfig
from memsearcher_jax.rl.config import CompleterConfig, EvaluationConfig, RLConfig


def tiny_memalpha() -> RunConfig:
    """Minutes on two CPU cores, compilation included; docs/memalpha.md has the times and results."""
    base = tiny()
    package = "package:tiny_memalpha"
    return replace(
        base,
        model=replace(base.model, path=package, tokenizer=package, vocab_size=1_600),
        agent=AgentConfig(
            workflow="memalpha", prompts="terse", completion_tokens=72, question_tokens=24, memory_tokens=96
        ),
        memalpha=MemalphaConfig(
            chunk_tokens=56, core_tokens=32, shown_items=1, retrieved_items=2, answer_memory_tokens=128, answer_tokens=8
        ),
        judge=CompleterConfig(backend="none"),
        sampling=replace(base.sampling, slots=32, context_tokens=256, decode_batch_sizes=(8, 16)),
        # Enough that no stream is repeated; the days of a long stream are those of short ones.
        data=DataConfig(
            synthetic="streams",
            streams=SyntheticStreamConfig(
                train_streams=80, test_streams=24, test_chunks=(10, 130), span_days=730, statements=2, filler=1
            ),
        ),
        training=replace(
            base.training,
            seq_len=256,
            minibatch_contexts=640,
            minibatch_rows=32,
            logit_chunk=64,
            warmup_steps="10 updates",
            decay_steps="200 updates",
        ),
        rl=RLConfig(
            steps=20,
            prompts_per_step=4,
            group_size=8,
            advantage_scope="position",
            keep_constant_reward_groups=False,
            checkpoint_every=10,
        ),
        evaluation=EvaluationConfig(),
    )
