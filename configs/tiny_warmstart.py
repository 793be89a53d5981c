"""Makes `package:tiny`: supervised steps on the scripted agent's trajectories, with a memory and with a history.

python launch/tpu_train.py --config tiny_warmstart --out DIR && python launch/export_hf.py --checkpoint DIR --out DIR

Errors in the memory are kept rare, since they teach reading badly; answering early alone makes the start bad.
"""

from memsearcher_jax.agent.types import AgentConfig
from memsearcher_jax.config import RunConfig
from memsearcher_jax.model.config import MeshConfig, ModelConfig
from memsearcher_jax.rl.config import DemonstrationConfig, EvaluationConfig, RLConfig
from memsearcher_jax.sampling.config import SamplingConfig
from memsearcher_jax.training.config import TrainingConfig


def tiny_warmstart() -> RunConfig:
    """About a million parameters, a fresh world for every step; 40 minutes of one CPU core."""
    return RunConfig(
        model=ModelConfig(
            vocab_size=1_536,
            embed_size=128,
            ffn_size=320,
            layers=4,
            heads=4,
            kv_heads=2,
            head_size=32,
            rope_theta=10_000.0,
            tied=True,
            max_positions=1_024,
            compute_dtype="float32",
        ),
        mesh=MeshConfig(data=1, fsdp=-1, tensor=1),
        agent=AgentConfig(
            prompts="terse",
            max_turns=8,
            reply_tokens=40,
            question_tokens=32,
            memory_tokens=32,
            observation_tokens=96,
            max_calls=1,
            default_top_n=1,
        ),
        sampling=SamplingConfig(
            slots=64,
            context_tokens=360,
            decode_tokens=16,
            rows_per_call=8,
            prefill_piece=32,
            prefill_buckets=(128, 512),
            top_k=0,
            top_p=1.0,
        ),
        training=TrainingConfig(
            row_tokens=384,
            rows_per_update=8,
            accumulate=4,
            logit_chunk=96,
            learning_rate=2e-3,
            warmup_steps=50,
            decay_steps=4_200,
            adam_b2=0.98,
            kl_coefficient=0.0,
            entropy_coefficient=0.0,
        ),
        rl=RLConfig(method="demonstrations", steps=400, problems=28, checkpoint_every=50),
        demonstrations=DemonstrationConfig(
            answer_early=0.6,
            wrong_query=0.1,
            bad_memory=0.1,
            histories=12,
            copies=60,
            recitations=150,
            decisions=80,
        ),
        evaluation=EvaluationConfig(max_turns=8),
    )
