"""One run's configuration: each room's frozen config, and the checks that need more than one room.

The defaults are the paper's settings for the 7B model; a preset in `configs/` states what it changes.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

from memsearcher_jax.agent.memalpha_config import MemalphaConfig
from memsearcher_jax.agent.types import AgentConfig
from memsearcher_jax.data.problems import DataConfig
from memsearcher_jax.data.sources import BENCHMARKS
from memsearcher_jax.model.config import MeshConfig, ModelConfig
from memsearcher_jax.retrieval.config import RetrievalConfig
from memsearcher_jax.rl.config import AlarmConfig, DemonstrationConfig, EvaluationConfig, RLConfig, SpeakerConfig
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
    memalpha: MemalphaConfig = field(default_factory=MemalphaConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    retrieval: RetrievalConfig = field(default_factory=RetrievalConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    rl: RLConfig = field(default_factory=RLConfig)
    alarms: AlarmConfig = field(default_factory=AlarmConfig)
    demonstrations: DemonstrationConfig = field(default_factory=DemonstrationConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    answerer: SpeakerConfig = field(default_factory=SpeakerConfig)
    judge: SpeakerConfig = field(default_factory=SpeakerConfig)


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, ends included unless they are open. NaN lies in no range."""

    low: float
    high: float
    open_low: bool = False
    open_high: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        return above and (value < self.high if self.open_high else value <= self.high)

    def __str__(self) -> str:
        low = f"{'above' if self.open_low else 'at least'} {self.low:,}"
        if math.isinf(self.high):
            return f"{low} and finite"
        return f"{low} and {'below' if self.open_high else 'at most'} {self.high:,}"


MOST = 10_000_000  # no count of a sensible run comes near it: beyond it a slip of the finger is likelier than a wish
_COUNT, _COUNT_OR_NONE = Range(1, MOST), Range(0, MOST)
_POSITIVE, _NOT_NEGATIVE = Range(0, math.inf, open_low=True, open_high=True), Range(0, math.inf, open_high=True)
_SHARE, _DECAY = Range(0, 1, open_low=True), Range(0, 1, open_high=True)

RANGES: dict[str, Range] = {
    "seed": Range(0, 2**32 - 1),  # what every generator in use accepts
    **{
        f"model.{name}": _COUNT
        for name in ("vocab_size", "embed_size", "ffn_size", "layers", "heads", "kv_heads", "max_positions")
    },
    "model.head_size": Range(2, MOST),
    "model.rope_theta": _POSITIVE,
    "model.norm_eps": _POSITIVE,
    **{f"mesh.{name}": Range(-1, MOST) for name in ("data", "fsdp", "tensor")},
    **{
        f"agent.{name}": _COUNT
        for name in (
            *("max_turns", "reply_tokens", "question_tokens", "observation_tokens"),
            *("max_calls", "default_top_n", "max_top_n"),
        )
    },
    "agent.memory_tokens": _COUNT_OR_NONE,
    **{
        f"memalpha.{name}": _COUNT
        for name in (
            *("chunk_tokens", "core_tokens", "retrieved_items", "retrieved_chunks"),
            *("answer_memory_tokens", "answer_tokens"),
        )
    },
    "memalpha.shown_items": _COUNT_OR_NONE,
    "memalpha.answer_temperature": _NOT_NEGATIVE,
    **{f"memalpha.reward.{name}_weight": _NOT_NEGATIVE for name in ("answers", "compression", "calls", "content")},
    "memalpha.reward.threshold": Range(0, 1),
    **{
        f"sampling.{name}": _COUNT
        for name in (
            *("slots", "tensor", "context_tokens", "decode_tokens"),
            *("decode_rows", "rows_per_call", "prefill_piece", "prefill_buckets"),
        )
    },
    "sampling.draft_tokens": _COUNT_OR_NONE,
    "sampling.temperature": _POSITIVE,
    "sampling.top_k": _COUNT_OR_NONE,
    "sampling.top_p": _SHARE,
    **{f"retrieval.{name}": _COUNT for name in ("encoder_size", "query_tokens", "passage_tokens")},
    "retrieval.recall": _SHARE,
    "retrieval.batch_limit": _COUNT,
    "retrieval.cached_queries": _COUNT_OR_NONE,
    "retrieval.timeout": _POSITIVE,
    "retrieval.attempts": _COUNT,
    "data.world.seed": Range(0, 2**32 - 1),
    **{f"data.world.{name}_people": _COUNT_OR_NONE for name in ("train", "test", "other")},
    **{f"data.world.{name}_questions": _COUNT_OR_NONE for name in ("train", "test")},
    "data.world.hops": Range(1, 8),  # the paths of so many facts grow by a factor with each
    "data.streams.seed": Range(0, 2**32 - 1),
    **{f"data.streams.{name}": _COUNT for name in ("train_chunks", "test_chunks", "facts", "questions")},
    **{f"data.streams.{name}": _COUNT_OR_NONE for name in ("train_streams", "test_streams", "idle", "span")},
    **{f"training.{name}": _COUNT for name in ("row_tokens", "rows_per_update", "accumulate", "logit_chunk")},
    "training.learning_rate": _POSITIVE,
    "training.warmup_steps": _COUNT_OR_NONE,
    "training.decay_steps": _COUNT_OR_NONE,
    "training.weight_decay": _NOT_NEGATIVE,
    "training.adam_b1": _DECAY,
    "training.adam_b2": _DECAY,
    "training.max_grad_norm": _POSITIVE,
    "training.clip_low": Range(0, 1),
    "training.clip_high": _NOT_NEGATIVE,
    "training.clip_c": Range(1, math.inf, open_low=True, open_high=True),
    "training.norm_tokens": _COUNT,
    "training.old_logprob_threshold": _NOT_NEGATIVE,
    "training.importance_cap": _NOT_NEGATIVE,
    "training.kl_coefficient": _NOT_NEGATIVE,
    "training.entropy_coefficient": _NOT_NEGATIVE,
    **{f"rl.{name}": _COUNT for name in ("steps", "problems", "rollouts", "checkpoint_every", "keep_checkpoints")},
    "rl.evaluate_every": _COUNT_OR_NONE,
    "rl.search_seconds": _POSITIVE,
    **{f"alarms.{name}": _COUNT for name in ("skipped_updates", "steps")},
    **{
        f"alarms.{name}": _NOT_NEGATIVE
        for name in ("reward_below", "entropy_below", "entropy_above", "tokens_below", "tokens_above", "kl_above")
    },
    **{f"demonstrations.{name}": Range(0, 1) for name in ("answer_early", "wrong_query", "bad_memory")},
    **{f"demonstrations.{name}": Range(0, 1) for name in ("keep_part", "keep_idle")},
    **{f"demonstrations.{name}": _COUNT_OR_NONE for name in ("histories", "copies", "recitations", "decisions")},
    **{f"demonstrations.{name}": _COUNT_OR_NONE for name in ("readings", "repetitions", "interviews")},
    "demonstrations.measure_every": _COUNT,
    "evaluation.max_turns": _COUNT,
    "evaluation.temperature": _NOT_NEGATIVE,
    "evaluation.questions": _COUNT_OR_NONE,
    **{f"{who}.{name}": _COUNT for who in ("answerer", "judge") for name in ("attempts", "at_once", "cached")},
    **{f"{who}.timeout": _POSITIVE for who in ("answerer", "judge")},
}
"""What each number may be; of a tuple, each member. A number that is missing here fails a test."""


def check(config: RunConfig) -> RunConfig:
    """Returns the config, or raises ValueError with one line that names the setting and a way out.

    Only what the numbers alone can tell; `rl.build` checks what needs templates, files or devices.
    """
    for name, value in settings(config).items():
        for number in (value if isinstance(value, tuple) else (value,)) if name in RANGES else ():
            _require(number in RANGES[name], f"{name} is {number}: it must be {RANGES[name]}")
    _check_lengths(config)
    _check_memalpha(config)
    model, agent, training = config.model, config.agent, config.training
    _require(
        model.heads % model.kv_heads == 0,
        f"model.heads {model.heads} is no multiple of model.kv_heads {model.kv_heads}",
    )
    _require(model.head_size % 2 == 0, f"model.head_size {model.head_size} is odd: rotary positions need pairs")
    _require(
        agent.default_top_n <= agent.max_top_n,
        f"agent.default_top_n {agent.default_top_n} is more than agent.max_top_n {agent.max_top_n}",
    )
    for name in config.evaluation.in_distribution:
        _require(
            name in BENCHMARKS,
            f"evaluation.in_distribution: {name!r} is no benchmark: choose from {', '.join(BENCHMARKS)}",
        )
    _require(
        training.rows_per_update % training.accumulate == 0,
        f"training.rows_per_update {training.rows_per_update} is no multiple of training.accumulate "
        f"{training.accumulate}",
    )
    _check_old_logprobs(config)
    return config


def _check_old_logprobs(config: RunConfig) -> None:
    training = config.training
    _require(
        training.importance_cap == 0 or training.old_logprobs != "sampler",
        f"training.importance_cap is {training.importance_cap}, but with training.old_logprobs sampler the ratio "
        "starts at the sampler and there is nothing to weigh: choose checked or trainer",
    )
    _require(
        config.rl.method == "grpo" or training.old_logprobs == "sampler",
        f"training.old_logprobs {training.old_logprobs} is for rl.method grpo: {config.rl.method} have no sampler",
    )


def _check_memalpha(config: RunConfig) -> None:
    """What belongs to one kind of workflow alone."""
    reads_streams = config.agent.workflow == "memalpha"
    if config.data.embedded:
        made = "streams" if reads_streams else "world"
        _require(
            config.data.made == made,
            f"agent.workflow {config.agent.workflow} does not read what data.made {config.data.made} is: set it to "
            f"{made}, or data.train and data.test to files",
        )
    _require(
        reads_streams or config.rl.baseline == "trajectory",
        f"rl.baseline {config.rl.baseline} needs a reward for each context, and agent.workflow "
        f"{config.agent.workflow} has one for each trajectory: set it to trajectory",
    )
    _require(
        config.rl.baseline == "trajectory" or config.rl.credit == "every context",
        f"rl.baseline {config.rl.baseline} gives every context an advantage of its own: set rl.credit to every context",
    )
    _require(
        config.answerer.who != "nobody",
        "answerer.who is nobody: only a judge can be missing, somebody has to answer the questions",
    )
    _require(
        not reads_streams or config.memalpha.core_tokens < config.agent.memory_tokens,
        f"memalpha.core_tokens {config.memalpha.core_tokens} is not below agent.memory_tokens "
        f"{config.agent.memory_tokens}: a context shows the core whole and the latest items after it",
    )


def _check_lengths(config: RunConfig) -> None:
    agent, sampling, training = config.agent, config.sampling, config.training
    if agent.workflow == "memalpha":
        least = agent.memory_tokens + config.memalpha.chunk_tokens + agent.reply_tokens
        parts = "agent.memory_tokens, memalpha.chunk_tokens and agent.reply_tokens"
    else:
        memory_tokens = agent.memory_tokens if agent.workflow == "memsearcher" else 0
        least = agent.question_tokens + memory_tokens + 2 * agent.reply_tokens + agent.observation_tokens
        parts = "agent.question_tokens, memory_tokens, observation_tokens and twice reply_tokens"
    _require(
        least < sampling.context_tokens,
        f"a turn may need {least} tokens and its templates ({parts}), but sampling.context_tokens is "
        f"{sampling.context_tokens}: lower one of them or raise it",
    )
    _require(
        sampling.context_tokens <= training.row_tokens,
        f"sampling.context_tokens {sampling.context_tokens} is more than training.row_tokens {training.row_tokens}: "
        "a context must fit one row",
    )
    _require(
        sampling.context_tokens <= config.model.max_positions,
        f"sampling.context_tokens {sampling.context_tokens} is more than model.max_positions "
        f"{config.model.max_positions}: the model knows no later positions",
    )
    buckets = sampling.prefill_buckets
    _require(
        buckets != () and list(buckets) == sorted(set(buckets)),
        f"sampling.prefill_buckets is {' '.join(map(str, buckets)) or 'empty'}: give at least one width, ascending",
    )
    rows = sampling.decode_rows
    _require(
        list(rows) == sorted(set(rows)),
        f"sampling.decode_rows is {' '.join(map(str, rows))}: give numbers of slots, ascending",
    )
    _require(
        sampling.decode_tokens + sampling.draft_tokens <= sampling.context_tokens,
        f"sampling.decode_tokens {sampling.decode_tokens} and draft_tokens {sampling.draft_tokens} are more than "
        f"sampling.context_tokens {sampling.context_tokens}: lower them",
    )
    piece = sampling.prefill_piece
    _require(
        piece <= sampling.context_tokens,
        f"sampling.prefill_piece {piece} is more than sampling.context_tokens {sampling.context_tokens}: lower it",
    )
    _require(
        all(bucket % piece == 0 for bucket in buckets),
        f"sampling.prefill_buckets is {' '.join(map(str, buckets))}: give multiples of sampling.prefill_piece {piece}",
    )
    _require(
        training.row_tokens % training.logit_chunk == 0,
        f"training.row_tokens {training.row_tokens} is no multiple of training.logit_chunk {training.logit_chunk}",
    )


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def settings(config: Any, prefix: str = "") -> dict[str, Any]:
    """Every setting under its full name, such as "rl.steps", in the order of the fields."""
    named: dict[str, Any] = {}
    for one in dataclasses.fields(config):
        value = getattr(config, one.name)
        named |= (
            settings(value, f"{prefix}{one.name}.") if dataclasses.is_dataclass(value) else {prefix + one.name: value}
        )
    return named


def differences(first: RunConfig, second: RunConfig) -> list[tuple[str, Any, Any]]:
    """(name, value in the first, value in the second) of every setting in which they differ."""
    other = settings(second)
    return [(name, value, other[name]) for name, value in settings(first).items() if value != other[name]]


def to_dict(config: RunConfig) -> dict[str, Any]:
    """The config as plain values, for JSON."""
    return dataclasses.asdict(config)


def from_dict(values: dict[str, Any], kind: type = RunConfig, prefix: str = "") -> Any:
    """The inverse of `to_dict`, also after a trip through JSON; a setting that is missing takes its default.

    Raises ValueError with one line that names a setting that there is not, or one of the wrong type.
    """
    hints = typing.get_type_hints(kind)
    _require(isinstance(values, dict), f"{prefix.rstrip('.') or 'the config'} is {values!r}: it must be a section")
    if unknown := sorted(set(values) - set(hints)):
        raise ValueError(f"there is no setting {prefix}{unknown[0]}: the file is of another version")
    return kind(**{name: _typed(value, hints[name], prefix + name) for name, value in values.items()})


def _typed(value: Any, hint: Any, name: str) -> Any:
    """`value` as the type `hint`, which JSON may have spelt otherwise: a list for a tuple, 1 for 1.0."""
    if dataclasses.is_dataclass(hint):
        return from_dict(value, hint, f"{name}.")
    if typing.get_origin(hint) is tuple:
        _require(isinstance(value, list | tuple), f"{name} is {value!r}: it must be a list")
        return tuple(_typed(member, typing.get_args(hint)[0], name) for member in value)
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        _require(value in choices, f"{name} is {value!r}: it must be one of {', '.join(choices)}")
        return value
    if hint is float and type(value) is int:
        return float(value)
    _require(type(value) is hint, f"{name} is {value!r}: it must be of type {hint.__name__}")
    return value
