"""The configuration of a run: each package's frozen config, and the checks that need more than one of them.

The defaults are the paper's settings for the 7B model; a preset in `configs/` states what it changes.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal

from annotated_types import Interval

from memsearcher_jax.agent.base import Agent
from memsearcher_jax.agent.config import AgentConfig, RewardConfig
from memsearcher_jax.agent.memalpha.config import MemalphaConfig
from memsearcher_jax.agent.registry import make_agent
from memsearcher_jax.agent.tool_functions import file_tools
from memsearcher_jax.data.benchmarks import BENCHMARKS
from memsearcher_jax.data.problems import DataConfig
from memsearcher_jax.jsonl import flatten
from memsearcher_jax.model.config import MeshConfig, ModelConfig
from memsearcher_jax.python_files import load_named
from memsearcher_jax.ranges import Seed, contains, describe
from memsearcher_jax.retrieval.config import RetrievalConfig
from memsearcher_jax.rl.config import CompleterConfig, EvaluationConfig, RLConfig
from memsearcher_jax.runtime.health import HealthConfig
from memsearcher_jax.sampling.config import SamplingConfig
from memsearcher_jax.sft.config import SFTConfig
from memsearcher_jax.training.config import TeacherConfig, TrainingConfig, learning_rate_plan

INT8_TIS_CAP = 2.0
"""`training.tis_cap` where the sampler rounds to int8 and nothing else is set."""


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides what a run does."""

    seed: Seed = 0
    """Root of all randomness: weights, data order, draws."""
    model: ModelConfig = field(default_factory=ModelConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    memalpha: MemalphaConfig = field(default_factory=MemalphaConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    retrieval: RetrievalConfig = field(default_factory=RetrievalConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    rl: RLConfig = field(default_factory=RLConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    sft: SFTConfig = field(default_factory=SFTConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    answerer: CompleterConfig = field(default_factory=CompleterConfig)
    judge: CompleterConfig = field(default_factory=CompleterConfig)
    published_model: bool = False
    """The settings are for the weights of a published model: commands refuse to start without its weights, questions,
    passages, an encoder and, for training, an accelerator. The flag --smoke_test of the commands clears it."""


def agent_of(config: RunConfig) -> Agent:
    """The agent that the run trains, evaluates or serves."""
    return make_agent(config.agent, config.reward, config.memalpha)


def check(config: RunConfig) -> RunConfig:
    """Returns the config, or raises ValueError with one line that names the setting and a way out.

    Only what the values alone can tell; `rl.setup` checks what needs templates, files or devices. The result has
    `training.old_logprobs auto` resolved for a sampler in int8.
    """
    if config.sampling.is_quantized and config.training.old_logprobs == "auto":
        training = replace(config.training, old_logprobs="trainer", tis_cap=config.training.tis_cap or INT8_TIS_CAP)
        config = replace(config, training=training)
    check_ranges(config)
    agent = agent_of(config)
    agent.check()
    agent.check_context(config.sampling.context_tokens)
    rules = (_rl_errors, _model_errors, _sampling_errors, _training_errors, _teacher_errors)
    for error in chain(_agent_errors(config, agent), *(rule(config) for rule in rules)):
        raise ValueError(error)
    return config


def check_ranges(config: Any, prefix: str = "") -> None:
    """Raises ValueError for a number that is not in the range of its field; the message starts with `prefix`."""
    values = settings(config)
    for name, interval in intervals(type(config)).items():
        for number in values[name] if isinstance(values[name], tuple) else (values[name],):
            if not contains(interval, number):
                raise ValueError(f"{prefix}{name} is {number}: it must be {describe(interval)}")


def _agent_errors(config: RunConfig, agent: Agent) -> Iterator[str]:
    """What the agent cannot do."""
    rl, workflow, given = config.rl, config.agent.workflow, config.agent
    if config.data.is_synthetic and config.data.synthetic != agent.synthetic_data:
        yield (
            f"agent.workflow {workflow} cannot read data.synthetic {config.data.synthetic}: "
            f"set it to {agent.synthetic_data}, or data.train and data.test to files"
        )
    if agent.rewards_per != "context" and rl.advantage_scope != "trajectory" and not config.reward.function:
        yield (
            f"rl.advantage_scope {rl.advantage_scope} needs a reward for each context, and agent.workflow "
            f"{workflow} has one for each trajectory: set it to trajectory"
        )
    if rl.carry_over and agent.has_one_context:
        yield (
            f"rl.carry_over {rl.carry_over} swaps weights between contexts, and agent.workflow {workflow} has one "
            "context for all turns: set it to 0, or choose memsearcher"
        )
    if not agent.calls_tools and (given.tools or given.replay):
        yield f"agent.workflow {workflow} calls no tools: remove agent.tools and agent.replay"
    for file in given.tools:
        if not file.startswith("mcp:"):
            file_tools(file)
    function = config.reward.function
    if function and not callable(load_named(function, "reward.function", "reward")):
        yield f"reward.function {function}: is no function"
    if given.default_top_n > given.max_top_n:
        yield f"agent.default_top_n {given.default_top_n} is more than agent.max_top_n {given.max_top_n}"


def _rl_errors(config: RunConfig) -> Iterator[str]:
    rl = config.rl
    if rl.group_size == 1 and rl.advantage_scope != "pooled" and config.training.objective == "grpo":
        yield "rl.group_size 1 leaves no group, so every advantage is 0: raise it, or set rl.advantage_scope to pooled"
    if rl.advantage_scope != "trajectory" and rl.credit != "all_contexts":
        yield f"rl.advantage_scope {rl.advantage_scope} credits each context: set rl.credit to all_contexts"
    if rl.carry_over and config.training.old_logprobs == "trainer" and not config.training.tis_cap:
        yield (
            f"rl.carry_over {rl.carry_over} trains on contexts of earlier policies: set training.old_logprobs to "
            "sampler (a ratio against the policy that sampled each) or training.tis_cap (the decoupled objective)"
        )
    if rl.refill and (rl.carry_over or rl.advantage_scope != "trajectory"):
        yield (
            f"rl.refill {rl.refill} replaces groups of trajectories that belong to this step: set rl.carry_over to 0 "
            "and rl.advantage_scope to trajectory"
        )
    if rl.refill and rl.epochs:
        yield f"rl.refill {rl.refill} takes more problems than a step counts: set rl.epochs to 0 and rl.steps"
    if config.health.on_collapse == "rollback" and not rl.evaluate_every:
        yield "health.on_collapse rollback needs evaluations, and rl.evaluate_every 0 makes none: set it"
    if config.answerer.backend == "none":
        yield "answerer.backend is none: only a judge is optional, set it to initial_policy or openai"
    for name in config.evaluation.in_distribution:
        if name not in BENCHMARKS:
            yield f"evaluation.in_distribution: {name!r} is no benchmark: choose from {', '.join(BENCHMARKS)}"


def _model_errors(config: RunConfig) -> Iterator[str]:
    model, context_tokens = config.model, config.sampling.context_tokens
    if model.heads % model.kv_heads:
        yield f"model.heads {model.heads} is no multiple of model.kv_heads {model.kv_heads}"
    if (model.lora_rank or model.adapter) and not model.path:
        yield "model.lora_rank and model.adapter need the weights that the adapters belong to: set model.path"
    if not model.lora_targets or len(set(model.lora_targets)) < len(model.lora_targets):
        yield "model.lora_targets is empty or names a projection twice: name each projection once"
    if context_tokens > (most := model.max_positions):
        yield f"sampling.context_tokens {context_tokens} is more than model.max_positions {most}: lower it"


def _sampling_errors(config: RunConfig) -> Iterator[str]:
    sampling = config.sampling
    buckets, batch_sizes, chunk = sampling.prefill_buckets, sampling.decode_batch_sizes, sampling.prefill_chunk
    for name, tokens in (("decode_steps_per_call", sampling.decode_steps_per_call), ("prefill_chunk", chunk)):
        if tokens > sampling.context_tokens:
            yield f"sampling.{name} {tokens} is more than sampling.context_tokens {sampling.context_tokens}: lower it"
    widths = " ".join(map(str, buckets))
    if not buckets or list(buckets) != sorted(set(buckets)):
        yield f"sampling.prefill_buckets is {widths or 'empty'}: give at least one width, ascending"
    if any(bucket % chunk for bucket in buckets):
        yield f"sampling.prefill_buckets is {widths}: give multiples of sampling.prefill_chunk {chunk}"
    if list(batch_sizes) != sorted(set(batch_sizes)):
        sizes = " ".join(map(str, batch_sizes))
        yield f"sampling.decode_batch_sizes is {sizes}: give numbers of slots, ascending"


def _training_errors(config: RunConfig) -> Iterator[str]:
    training, context_tokens = config.training, config.sampling.context_tokens
    learning_rate_plan(training, 1)  # of how many steps the command knows: `rl.setup.with_steps`, `make_trainer`
    if context_tokens > (most := training.seq_len):
        yield f"sampling.context_tokens {context_tokens} is more than training.seq_len {most}: lower it, or raise that"
    for name, divisor in (("minibatch_rows", "grad_accum_steps"), ("seq_len", "logit_chunk")):
        number, parts = getattr(training, name), getattr(training, divisor)
        if number % parts:
            yield f"training.{name} {number} is no multiple of training.{divisor} {parts}"
    if training.tis_cap and training.old_logprobs != "trainer":
        yield f"training.tis_cap is {training.tis_cap}, and only training.old_logprobs trainer uses it: choose trainer"
    has_teacher = config.teacher.path or config.teacher.hint
    if not has_teacher and config.model.adapter and config.model.lora_rank and training.kl_coefficient:
        yield (
            "training.kl_coefficient compares with the weights in model.path, without the adapters in model.adapter "
            "that training begins with: set it to 0"
        )


def _teacher_errors(config: RunConfig) -> Iterator[str]:
    training, teacher = config.training, config.teacher
    if training.objective == "grpo":
        if teacher.hint or teacher.top_k or (teacher.path and not training.kl_coefficient):
            yield "the teacher teaches nothing: set training.objective to distill or grpo+distill"
        return
    if teacher.top_k > config.model.vocab_size:
        yield f"teacher.top_k {teacher.top_k} is more than the {config.model.vocab_size} tokens of the model: lower it"
    if teacher.top_k and training.kl_coefficient:
        yield "teacher.top_k is a divergence from the teacher already: set training.kl_coefficient to 0"
    if not teacher.path and not teacher.hint:
        yield f"training.objective {training.objective} needs a teacher: set teacher.path, or teacher.hint to True"
    if not config.rl.keep_constant_reward_groups or config.rl.refill:
        yield (
            f"training.objective {training.objective} learns also where all rewards of a group are equal: set "
            "rl.keep_constant_reward_groups to True and rl.refill to 0"
        )


def intervals(kind: type = RunConfig, prefix: str = "") -> dict[str, Interval]:
    """The range of every number under the setting's full name; of a tuple, that of its members."""
    found: dict[str, Interval] = {}
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            found |= intervals(hint, f"{prefix}{name}.")
            continue
        member = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else hint
        for item in getattr(member, "__metadata__", ()):
            if isinstance(item, Interval):
                found[prefix + name] = item
    return found


def settings(config: Any) -> dict[str, Any]:
    """Every setting under its full name, such as "rl.steps", in the order of the fields."""
    return flatten(dataclasses.asdict(config))


def with_settings(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """The config with other values of some settings of its sections, by their full names."""
    for name, value in values.items():
        section, field = name.split(".")
        config = replace(config, **{section: replace(getattr(config, section), **{field: value})})
    return config


def differences(first: RunConfig, second: RunConfig) -> list[tuple[str, Any, Any]]:
    """(name, value in the first, value in the second) of every setting in which they differ.

    Python files are compared by name: where one may have moved, its hash is compared.
    """
    other = settings(second)
    return [
        (name, value, other[name]) for name, value in settings(first).items() if _named(value) != _named(other[name])
    ]


def _named(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_named, value))
    return value.rpartition("/")[2] if isinstance(value, str) and value.endswith(".py") else value


def to_dict(config: RunConfig) -> dict[str, Any]:
    """The config as plain values, for JSON."""
    return dataclasses.asdict(config)


def from_dict(values: dict[str, Any], kind: type = RunConfig, prefix: str = "") -> Any:
    """The inverse of `to_dict`, also after a trip through JSON; a missing setting takes its default.

    Raises ValueError with one line that names an unknown setting, or one of the wrong type.
    """
    hints = typing.get_type_hints(kind)
    if not isinstance(values, dict):
        raise ValueError(f"{prefix.rstrip('.') or 'the config'} is {values!r}: it must be a section")
    if unknown := sorted(set(values) - set(hints)):
        raise ValueError(f"there is no setting {prefix}{unknown[0]}: the file is of another version")
    return kind(**{name: _typed(value, hints[name], prefix + name) for name, value in values.items()})


def _typed(value: Any, hint: Any, name: str) -> Any:
    """`value` as the type `hint`, which JSON may write differently: a list for a tuple, 1 for 1.0."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return from_dict(value, hint, f"{name}.")
    origin, choices = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_typed(member, choices[0], name) for member in value)
    if type(value) is hint or (origin is Literal and value in choices):
        return value
    if hint is float and type(value) is int:
        return float(value)
    of_literal = f"one of {', '.join(choices)}" if origin is Literal else f"of type {getattr(hint, '__name__', '')}"
    expected = "a list" if origin is tuple else of_literal
    raise ValueError(f"{name} is {value!r}: it must be {expected}")
