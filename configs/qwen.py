"""Published Qwen models with the settings of the papers: MemSearcher on six of them, Search-R1 on 3B, MEM1 on 7B.

python launch/tpu_train.py --config qwen3b --model.path DIR --data.train FILES \\
    --retrieval.corpus FILE --retrieval.encoder DIR
python launch/evaluate.py --config search_r1_3b --checkpoint DIR --benchmarks all --data.root DIR \\
    --retrieval.index DIR --retrieval.encoder DIR
"""

from dataclasses import replace

from memsearcher_jax.agent.config import RewardConfig
from memsearcher_jax.config import RunConfig
from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.retrieval.config import RetrievalConfig
from memsearcher_jax.sampling.config import SamplingConfig
from memsearcher_jax.training.config import TrainingConfig

SMALL = ModelConfig(vocab_size=151_936, tie_embeddings=True, remat="nothing_saveable")
"""What the models up to 4B share, for training on many devices."""


def memsearcher(model: ModelConfig, *, tensor: int, grad_accum_steps: int) -> RunConfig:
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
        sampling=SamplingConfig(
            slots=256, kv_tokens=524_288, decode_steps_per_call=16, prefill_buckets=(256, 1_024, 2_048), tensor=tensor
        ),
        retrieval=RetrievalConfig(encoder=""),  # the paper's is E5, in a folder
        training=TrainingConfig(grad_accum_steps=grad_accum_steps, logit_chunk=512),
    )


def qwen05b() -> RunConfig:
    """Qwen2.5-0.5B on one host of four or eight devices."""
    model = replace(SMALL, embed_size=896, ffn_size=4_864, layers=24, heads=14, kv_heads=2, head_size=64)
    return memsearcher(model, tensor=1, grad_accum_steps=32)


def qwen3b() -> RunConfig:
    """Qwen2.5-3B on 16 devices of 16 GB by default; two kv heads let two devices share one sampler."""
    model = replace(SMALL, embed_size=2_048, ffn_size=11_008, layers=36, heads=16, kv_heads=2, head_size=128)
    return memsearcher(model, tensor=2, grad_accum_steps=16)


def qwen7b() -> RunConfig:
    """Qwen2.5-7B on 32 devices of 32 GB (v6e-32) by default.

    One row per device and microbatch, four devices per sampler. On devices of 16 GB: `--model.remat nothing_saveable`.
    """
    shape = replace(SMALL, embed_size=3_584, ffn_size=18_944, layers=28, heads=28, kv_heads=4, head_size=128)
    # It takes a sixth less time than nothing_saveable.
    model = replace(shape, vocab_size=152_064, tie_embeddings=False, remat="save_qkv_attention_gate_up")
    return memsearcher(model, tensor=4, grad_accum_steps=8)


def first_hour(model: ModelConfig, *, slots: int, kv_tokens: int) -> RunConfig:
    """A step of minutes on one device or on the eight of one host: 16 problems of 8 trajectories."""
    base = memsearcher(replace(model, family="qwen3", max_positions=40_960), tensor=1, grad_accum_steps=16)
    return replace(
        base,
        sampling=replace(base.sampling, slots=slots, kv_tokens=kv_tokens),
        training=replace(base.training, minibatch_rows=16),
        rl=replace(base.rl, steps=100, prompts_per_step=16, group_size=8),
    )


def qwen3_0b6() -> RunConfig:
    """Qwen3-0.6B, all weights on one device of 16 GB, such as a free v5e-1.

    The cache holds 32,768 tokens, so at most some twenty contexts at a time.
    """
    model = replace(SMALL, embed_size=1_024, ffn_size=3_072, layers=28, heads=16, kv_heads=8, head_size=128)
    return first_hour(model, slots=32, kv_tokens=32_768)


def qwen3_1b7() -> RunConfig:
    """Qwen3-1.7B, all weights on the eight devices of 16 GB of one host, such as a free v5e-8."""
    model = replace(SMALL, embed_size=2_048, ffn_size=6_144, layers=28, heads=16, kv_heads=8, head_size=128)
    return first_hour(model, slots=128, kv_tokens=262_144)


def qwen3_4b() -> RunConfig:
    """Qwen3-4B on 16 devices of 32 GB (v6e-16) by default."""
    model = replace(SMALL, embed_size=2_560, ffn_size=9_728, layers=36, heads=32, kv_heads=8, head_size=128)
    return memsearcher(replace(model, family="qwen3", max_positions=40_960), tensor=4, grad_accum_steps=16)


def search_r1_3b() -> RunConfig:
    """The Search-R1 baseline: the settings of its published GRPO runs, on the devices of `qwen3b`.

    Four searches and a last reply, three passages each, exact match as the reward.
    """
    base = qwen3b()
    return replace(
        base,
        agent=replace(base.agent, workflow="search_r1", completion_tokens=500, observation_tokens=500, default_top_n=3),
        reward=RewardConfig(metric="exact_match", wrong_answer=0.0, require_format=False),
        sampling=replace(base.sampling, top_k=0, top_p=1.0),
        training=replace(base.training, warmup_steps="286"),
        rl=replace(base.rl, steps=500, prompts_per_step=512),
        evaluation=replace(base.evaluation, max_turns=5),
    )


def mem1_7b() -> RunConfig:
    """MEM1's search agent, on the devices of `qwen7b`, with GRPO in place of its PPO.

    The base model, questions joined in pairs, six turns of 1,000 tokens, three passages in 1,000 tokens, exact match as
    the reward.
    """
    base = qwen7b()
    search_r1 = search_r1_3b()
    return replace(
        base,
        agent=replace(search_r1.agent, workflow="mem1", max_turns=6, completion_tokens=1_000, observation_tokens=1_000),
        data=replace(base.data, objectives=2),
        reward=search_r1.reward,
        sampling=replace(base.sampling, top_k=0, top_p=1.0),
        training=replace(base.training, warmup_steps="5%"),
        rl=replace(base.rl, steps=500, prompts_per_step=128),
    )
