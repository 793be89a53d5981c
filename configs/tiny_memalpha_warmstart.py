"""Makes `package:tiny_memalpha`: SFT on a scripted policy that reads streams, and on answering questions.

python -m memsearcher_jax.sft.extend_vocab BASE
python launch/tpu_train.py --config tiny_memalpha_warmstart --model.path BASE --out DIR
python launch/export_hf.py --checkpoint DIR --out NEW

BASE is `package:tiny` with embedding rows for more tokens: it can copy, which takes longest to learn.
"""

from dataclasses import replace

from memsearcher_jax.config import RunConfig
from memsearcher_jax.configs.tiny_memalpha import tiny_memalpha
from memsearcher_jax.rl.config import RLConfig
from memsearcher_jax.sft.config import SFTConfig


def tiny_memalpha_warmstart() -> RunConfig:
    """About a million parameters, new stories for every step."""
    base = tiny_memalpha()
    return replace(
        base,
        model=replace(base.model, path=""),
        sampling=replace(base.sampling, decode_steps_per_call=16, decode_batch_sizes=()),
        data=replace(base.data, streams=replace(base.data.streams, train_streams=400, test_streams=40, questions=8)),
        training=replace(
            base.training,
            seq_len=384,
            minibatch_rows=8,
            grad_accum_steps=4,
            logit_chunk=96,
            learning_rate=1.5e-3,
            warmup_steps=50,
            decay_steps=1_600,
            adam_b2=0.98,
        ),
        rl=RLConfig(method="sft", steps=200, prompts_per_step=40, advantage_scope="position", checkpoint_every=20),
        sft=SFTConfig(
            copy_examples=60, extraction_examples=60, storing_examples=40, reordering_examples=20, qa_examples=60
        ),
    )
