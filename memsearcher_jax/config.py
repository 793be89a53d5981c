"""One run's configuration: each room's frozen config, and the checks that need more than one room.

The defaults are the paper's settings for the 7B model; a preset in `configs/` states what it changes.
"""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, field
from typing import Any

from memsearcher_jax.agent.types import AgentConfig
from memsearcher_jax.data.problems import DataConfig
from memsearcher_jax.model.config import MeshConfig, ModelConfig
from memsearcher_jax.retrieval.search import RetrievalConfig
from memsearcher_jax.rl.config import EvaluationConfig, RLConfig
from memsearcher_jax.sampling.config import SamplingConfig
from memsearcher_jax.training.config import TrainingConfig


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides what a run does."""

    seed: int = 0
    """Root of all randomness: weights, data order, draws."""
    model: ModelConfig = field(default_factory=ModelConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    retrieval: RetrievalConfig = field(default_factory=RetrievalConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    rl: RLConfig = field(default_factory=RLConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)


def check(config: RunConfig) -> RunConfig:
    """Returns the config, or raises ValueError with one line that names the setting and a way out.

    Only what the numbers alone can tell; `rl.build` checks what needs templates, files or devices.
    """
    _check_ranges(config)
    agent, sampling, training = config.agent, config.sampling, config.training
    memory_tokens = agent.memory_tokens if agent.workflow == "memsearcher" else 0
    least = agent.question_tokens + memory_tokens + 2 * agent.reply_tokens + agent.observation_tokens
    _require(
        agent.workflow != "memsearcher" or least < sampling.context_tokens,
        f"a turn may need {least} tokens (agent.question_tokens + memory_tokens + 2 x reply_tokens + "
        f"observation_tokens) but sampling.context_tokens is {sampling.context_tokens}: lower one of them or raise it",
    )
    _require(
        sampling.context_tokens <= training.row_tokens,
        f"sampling.context_tokens {sampling.context_tokens} is more than training.row_tokens {training.row_tokens}: "
        "a context must fit one row",
    )
    _require(
        sampling.context_tokens <= config.model.max_positions,
        f"sampling.context_tokens {sampling.context_tokens} is more than model.max_positions "
        f"{config.model.max_positions}",
    )
    _require(
        training.rows_per_update % training.accumulate == 0,
        f"training.rows_per_update {training.rows_per_update} is no multiple of training.accumulate "
        f"{training.accumulate}",
    )
    _require(
        training.row_tokens % training.logit_chunk == 0,
        f"training.row_tokens {training.row_tokens} is no multiple of training.logit_chunk {training.logit_chunk}",
    )
    _require(
        list(sampling.prefill_buckets) == sorted(set(sampling.prefill_buckets)) and sampling.prefill_buckets != (),
        f"sampling.prefill_buckets {sampling.prefill_buckets} must be ascending and not empty",
    )
    _require(
        config.model.heads % config.model.kv_heads == 0,
        f"model.heads {config.model.heads} is no multiple of model.kv_heads {config.model.kv_heads}",
    )
    return config


def _check_ranges(config: RunConfig) -> None:
    positive = {
        "agent": ("max_turns", "reply_tokens", "question_tokens", "observation_tokens", "max_calls", "max_top_n"),
        "model": ("vocab_size", "embed_size", "ffn_size", "layers", "heads", "kv_heads", "head_size"),
        "sampling": ("slots", "tensor", "context_tokens", "decode_tokens", "prefill_rows"),
        "training": ("row_tokens", "rows_per_update", "accumulate", "logit_chunk", "learning_rate", "max_grad_norm"),
        "rl": ("steps", "problems", "rollouts", "checkpoint_every", "keep_checkpoints"),
        "evaluation": ("max_turns",),
    }
    for section, names in positive.items():
        for name in names:
            value = getattr(getattr(config, section), name)
            _require(value > 0, f"{section}.{name} is {value}: it must be positive")
    _require(config.agent.memory_tokens >= 0, "agent.memory_tokens must not be negative")
    _require(0.0 < config.sampling.top_p <= 1.0, f"sampling.top_p is {config.sampling.top_p}: it must be in (0, 1]")
    _require(
        config.sampling.temperature > 0.0,
        f"sampling.temperature is {config.sampling.temperature}: rollouts of one problem differ only above 0",
    )
    _require(
        config.evaluation.temperature >= 0.0,
        f"evaluation.temperature is {config.evaluation.temperature}: it must not be negative",
    )
    _require(
        config.agent.default_top_n <= config.agent.max_top_n,
        f"agent.default_top_n {config.agent.default_top_n} is more than agent.max_top_n {config.agent.max_top_n}",
    )


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def to_dict(config: RunConfig) -> dict[str, Any]:
    """The config as plain values, for JSON."""
    return dataclasses.asdict(config)


def from_dict(values: dict[str, Any], kind: type = RunConfig) -> Any:
    """The inverse of `to_dict`. An unknown key raises ValueError; a missing one takes its default."""
    hints = typing.get_type_hints(kind)
    if unknown := sorted(set(values) - set(hints)):
        raise ValueError(f"{kind.__name__} has no field {unknown[0]!r}: the file is of another version")
    return kind(**{name: _typed(value, hints[name]) for name, value in values.items()})


def _typed(value: Any, hint: Any) -> Any:
    if dataclasses.is_dataclass(hint):
        return from_dict(value, hint)
    if typing.get_origin(hint) is tuple:
        return tuple(value)
    return value
