"""Makes `package:tiny_memalpha`: supervised steps on a scripted policy that reads streams, and on answering questions.

python -m memsearcher_jax.rl.stream_start BASE
python launch/tpu_train.py --config tiny_memalpha_warmstart --model.path BASE --out DIR
python launch/export_hf.py --checkpoint DIR --out NEW

BASE is the small search agent's start with rows for more tokens: it can copy, which takes longest to learn.
"""

from memsearcher_jax.agent.memalpha_config import MemalphaConfig
from memsearcher_jax.agent.types import AgentConfig
from memsearcher_jax.config import RunConfig
from memsearcher_jax.data.problems import DataConfig
from memsearcher_jax.data.stream_world import StreamConfig
from memsearcher_jax.model.config import MeshConfig, ModelConfig
from memsearcher_jax.rl.config import DemonstrationConfig, EvaluationConfig, RLConfig, SpeakerConfig
from memsearcher_jax.sampling.config import SamplingConfig
from memsearcher_jax.training.config import TrainingConfig


def tiny_memalpha_warmstart() -> RunConfig:
    """About a million parameters, fresh stories for every step."""
    return RunConfig(
        model=ModelConfig(
            tokenizer="package:tiny_memalpha",
            vocab_size=1_600,
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
            workflow="memalpha",
            prompts="terse_memalpha",
            reply_tokens=72,
            question_tokens=24,
            memory_tokens=96,
        ),
        memalpha=MemalphaConfig(
            chunk_tokens=56,
            core_tokens=32,
            shown_items=1,
            retrieved_items=2,
            answer_memory_tokens=128,
            answer_tokens=8,
        ),
        judge=SpeakerConfig(who="nobody"),
        sampling=SamplingConfig(
            slots=32,
            context_tokens=256,
            decode_tokens=16,
            rows_per_call=8,
            prefill_piece=32,
            prefill_buckets=(128, 512),
            top_k=0,
            top_p=1.0,
        ),
        data=DataConfig(
            made="streams",
            streams=StreamConfig(
                train_streams=400,
                test_streams=40,
                train_chunks=10,
                test_chunks=(10, 130),
                span=730,
                facts=2,
                idle=1,
                questions=8,
            ),
        ),
        training=TrainingConfig(
            row_tokens=384,
            rows_per_update=8,
            accumulate=4,
            logit_chunk=96,
            learning_rate=1.5e-3,
            warmup_steps=50,
            decay_steps=1_600,
            adam_b2=0.98,
            kl_coefficient=0.0,
            entropy_coefficient=0.0,
        ),
        rl=RLConfig(method="demonstrations", steps=200, problems=40, baseline="position", checkpoint_every=20),
        demonstrations=DemonstrationConfig(copies=60, recitations=60, readings=40, repetitions=20, interviews=60),
        evaluation=EvaluationConfig(),
    )
