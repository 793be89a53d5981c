"""Warm starts: supervised learning of the packaged weights on demonstrations, which examples/warmstart writes.

python -m examples.warmstart.demonstrate --config tiny_warmstart --out demos
python launch/sft.py --config tiny_warmstart --sft.trajectories demos --sft.held_out demos/held_out --out DIR
python launch/export_hf.py --checkpoint DIR --out NEW

Each step trains the file that was written for it.
"""

from dataclasses import replace

from memsearcher_jax.config import RunConfig
from memsearcher_jax.configs.memagent import tiny_memagent
from memsearcher_jax.configs.smollm2 import smollm2
from memsearcher_jax.configs.tiny import tiny
from memsearcher_jax.configs.tiny_baselines import tiny_compact, tiny_search_r1
from memsearcher_jax.configs.tiny_memalpha import tiny_memalpha
from memsearcher_jax.data.config import DataConfig
from memsearcher_jax.rl.config import RLConfig
from memsearcher_jax.sft.config import SFTConfig


def tiny_warmstart() -> RunConfig:
    """Makes `package:tiny`, of about a million parameters, from random weights.

    MemSearcher and ReAct, 400 steps, a new encyclopedia for each; 44 minutes on one CPU core that was shared.
    """
    return warmstart(replace(tiny(), data=DataConfig()), "", 2e-3, warmup=50, decay=4_200)


def tiny_baselines_warmstart() -> RunConfig:
    """Makes `package:tiny_baselines` in 100 steps.

    `package:tiny`, which can copy, learns the protocols of Search-R1, RAG and direct, from demonstrations with the same
    faults.
    """
    base = replace(tiny_search_r1(), sampling=tiny().sampling, data=DataConfig(), training=tiny().training)
    return warmstart(base, "package:tiny", 1e-3, warmup=20, decay=1_200)


def tiny_compact_warmstart() -> RunConfig:
    """Makes `package:tiny_compact` in 24 steps.

    `package:tiny`, which knows MemSearcher, learns it, ReAct and what lies between from equally many demonstrations of
    each, with the same faults.
    """
    base = tiny_compact()
    base = replace(base, sampling=replace(base.sampling, context_tokens=768), data=DataConfig())
    return warmstart(base, "package:tiny", 1e-3, warmup=20, decay=160, seq_len=768)


def tiny_memagent_warmstart() -> RunConfig:
    """Makes `package:tiny_memagent` in 220 steps, with a new encyclopedia for each.

    `package:tiny`, which reads passages, learns to compare titles, and the protocol of MemAgent from single contexts
    with errors; 12 minutes on one CPU core, and export_hf.py --dtype bfloat16.
    """
    base = tiny_memagent()
    encyclopedia = replace(base.data.encyclopedia, train_people=64, test_people=16, other_people=0)
    base = replace(base, data=replace(base.data, encyclopedia=encyclopedia), training=tiny().training)
    return warmstart(base, "package:tiny", 1e-3, warmup=50, decay=3_400)


def tiny_memalpha_warmstart() -> RunConfig:
    """Makes `package:tiny_memalpha` in 200 steps, with new stories for each.

    It starts from BASE (--model.path BASE): the weights of `package:tiny`, which can copy, with embedding rows for more
    tokens.

    python -m examples.warmstart.tokenizers extend BASE
    """
    base = tiny_memalpha()
    streams = replace(base.data.streams, train_streams=400, test_streams=40, questions=8)
    base = replace(base, data=replace(base.data, streams=streams))
    config = warmstart(base, "", 1.5e-3, warmup=50, decay=1_600, seq_len=384, logit_chunk=96)
    return replace(config, rl=RLConfig(advantage_scope="position", checkpoint_every=20))


def smollm2_warmstart() -> RunConfig:
    """Makes the adapters of `smollm2` in 30 steps of 12 questions.

    One step of every second question is a question of its own, too. A step has several mini-batches. The learning rate
    is 0 after 93 updates; 30 steps made 85.

    --data.train FILE --data.test FILE --retrieval.corpus FILE, for both commands. Questions of data.test are only
    measured, so give those to tune on. All weights learn at a lower rate than adapters: --model.lora_rank 0
    --training.learning_rate 2e-4.
    """
    base = smollm2()
    base = replace(base, model=replace(base.model, adapter=""))
    config = warmstart(base, "smollm2", 1.5e-3, warmup=8, decay=85, minibatch_rows=4)
    return replace(config, rl=RLConfig(checkpoint_every=15), sft=replace(config.sft, measure_every=5))


def warmstart(
    base: RunConfig, path: str, learning_rate: float, *, warmup: int, decay: int, **training: int
) -> RunConfig:
    """`base` with supervised learning of the weights in `path`, one file in each step; the rate changes by updates."""
    update = {"minibatch_rows": 8, "grad_accum_steps": 4, "adam_b2": 0.98, "learning_rate": learning_rate, **training}
    rate = {"warmup_steps": f"{warmup} updates", "decay_steps": f"{decay} updates"}
    return replace(
        base,
        model=replace(base.model, path=path),
        training=replace(base.training, **update, **rate),
        rl=RLConfig(checkpoint_every=50),
        sft=SFTConfig(trajectories_per_step=0),
    )
