"""The configuration of a run: each package's frozen config, and the checks that need more than one of them.

The defaults are the paper's settings for the 7B model; a preset in `configs/` states what it changes.
"""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, field
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

    Only what the values alone can tell; `rl.setup` checks what needs templates, files or devices.
    """
    check_ranges(config)
    agent = agent_of(config)
    agent.check()
    agent.check_context(config.sampling.context_tokens)
    _check_agent(config, agent)
    _check_rl(config)
    _check_model(config)
    _check_sampling(config)
    _check_training(config)
    for name in config.evaluation.in_distribution:
        benchmarks = ", ".join(BENCHMARKS)
        _require(name in BENCHMARKS, f"evaluation.in_distribution: {name!r} is no benchmark: choose from {benchmarks}")
    return config


def check_ranges(config: Any, prefix: str = "") -> None:
    """Raises ValueError for a number that is not in the range of its field; the message starts with `prefix`."""
    values = settings(config)
    for name, interval in intervals(type(config)).items():
        numbers = values[name] if isinstance(values[name], tuple) else (values[name],)
        for number in numbers:
            _require(contains(interval, number), f"{prefix}{name} is {number}: it must be {describe(interval)}")


def _check_agent(config: RunConfig, agent: Agent) -> None:
    """What the agent cannot do."""
    rl, workflow = config.rl, config.agent.workflow
    _require(
        not config.data.is_synthetic or config.data.synthetic == agent.synthetic_data,
        f"agent.workflow {workflow} cannot read data.synthetic {config.data.synthetic}: "
        f"set it to {agent.synthetic_data}, or data.train and data.test to files",
    )
    _require(
        agent.rewards_per == "context" or rl.advantage_scope == "trajectory" or config.reward.function != "",
        f"rl.advantage_scope {rl.advantage_scope} needs a reward for each context, and agent.workflow "
        f"{workflow} has one for each trajectory: set it to trajectory",
    )
    _require(
        rl.carry_over == 0 or not agent.has_one_context,
        f"rl.carry_over {rl.carry_over} swaps weights between contexts, and agent.workflow {workflow} has one "
        "context for all turns: set it to 0, or choose memsearcher",
    )
    _require(
        agent.calls_tools or not (config.agent.tools or config.agent.replay),
        f"agent.workflow {workflow} calls no tools: remove agent.tools and agent.replay",
    )
    for file in config.agent.tools:
        if not file.startswith("mcp:"):
            file_tools(file)
    if function := config.reward.function:
        _require(
            callable(load_named(function, "reward.function", "reward")), f"reward.function {function}: is no function"
        )
    _require(
        config.agent.default_top_n <= config.agent.max_top_n,
        f"agent.default_top_n {config.agent.default_top_n} is more than agent.max_top_n {config.agent.max_top_n}",
    )


def _check_rl(config: RunConfig) -> None:
    rl = config.rl
    _require(
        rl.advantage_scope == "trajectory" or rl.credit == "all_contexts",
        f"rl.advantage_scope {rl.advantage_scope} gives every context an advantage of its own: "
        "set rl.credit to all_contexts",
    )
    _require(
        rl.carry_over == 0 or config.training.old_logprobs == "sampler" or config.training.tis_cap > 0,
        f"rl.carry_over {rl.carry_over} trains on contexts of earlier policies: set training.old_logprobs to sampler, "
        "for a ratio against the policy that sampled each, or training.tis_cap, for the decoupled objective",
    )
    _require(
        rl.refill == 0 or (rl.carry_over == 0 and rl.advantage_scope == "trajectory"),
        f"rl.refill {rl.refill} replaces groups of trajectories that belong to this step: set rl.carry_over to 0 and "
        "rl.advantage_scope to trajectory",
    )
    _require(
        rl.refill == 0 or rl.epochs == 0,
        f"rl.refill {rl.refill} takes more problems than a step counts, so that rl.epochs {rl.epochs} would end early: "
        "set rl.epochs to 0 and rl.steps",
    )
    _require(
        config.health.on_collapse != "rollback" or rl.evaluate_every > 0,
        "health.on_collapse rollback restores the checkpoint with the best evaluation, and rl.evaluate_every 0 makes "
        "none: set it",
    )
    _require(
        config.answerer.backend != "none",
        "answerer.backend is none: only a judge is optional, set it to initial_policy or openai",
    )


def _check_model(config: RunConfig) -> None:
    model, context_tokens = config.model, config.sampling.context_tokens
    _require(
        model.heads % model.kv_heads == 0,
        f"model.heads {model.heads} is no multiple of model.kv_heads {model.kv_heads}",
    )
    _require(
        bool(model.path) or not (model.lora_rank or model.adapter),
        "model.lora_rank and model.adapter need the weights that the adapters belong to: set model.path",
    )
    _require(
        0 < len(model.lora_targets) == len(set(model.lora_targets)),
        "model.lora_targets is empty or names a projection twice: name each projection once",
    )
    _require(model.head_size % 2 == 0, f"model.head_size {model.head_size} is odd: rotary positions need pairs")
    _require(
        context_tokens <= model.max_positions,
        f"sampling.context_tokens {context_tokens} is more than model.max_positions {model.max_positions}: the model "
        "was not trained on later positions",
    )


def _check_sampling(config: RunConfig) -> None:
    sampling = config.sampling
    buckets, batch_sizes, chunk = sampling.prefill_buckets, sampling.decode_batch_sizes, sampling.prefill_chunk
    _require(
        buckets != () and list(buckets) == sorted(set(buckets)),
        f"sampling.prefill_buckets is {' '.join(map(str, buckets)) or 'empty'}: give at least one width, ascending",
    )
    _require(
        list(batch_sizes) == sorted(set(batch_sizes)),
        f"sampling.decode_batch_sizes is {' '.join(map(str, batch_sizes))}: give numbers of slots, ascending",
    )
    _require(
        sampling.decode_steps_per_call <= sampling.context_tokens,
        f"sampling.decode_steps_per_call {sampling.decode_steps_per_call} is more than sampling.context_tokens "
        f"{sampling.context_tokens}: lower it",
    )
    _require(
        chunk <= sampling.context_tokens,
        f"sampling.prefill_chunk {chunk} is more than sampling.context_tokens {sampling.context_tokens}: lower it",
    )
    _require(
        all(bucket % chunk == 0 for bucket in buckets),
        f"sampling.prefill_buckets is {' '.join(map(str, buckets))}: give multiples of sampling.prefill_chunk {chunk}",
    )


def _check_training(config: RunConfig) -> None:
    training, context_tokens, rl = config.training, config.sampling.context_tokens, config.rl
    plan = learning_rate_plan(training, rl.steps)
    end = plan.warmup.count + plan.decay.count
    _require(
        not plan.decay.count or plan.decay.unit == "updates" or rl.epochs > 0 or end >= rl.steps,
        f"training.decay_steps {training.decay_steps}: the learning rate is 0 from training step {end} of {rl.steps} "
        "on: set it to end, or lower rl.steps",
    )
    _require(
        context_tokens <= training.seq_len,
        f"sampling.context_tokens {context_tokens} is more than training.seq_len {training.seq_len}: a context must "
        "fit one row",
    )
    _require(
        training.minibatch_rows % training.grad_accum_steps == 0,
        f"training.minibatch_rows {training.minibatch_rows} is no multiple of training.grad_accum_steps "
        f"{training.grad_accum_steps}",
    )
    _require(
        training.seq_len % training.logit_chunk == 0,
        f"training.seq_len {training.seq_len} is no multiple of training.logit_chunk {training.logit_chunk}",
    )
    _require(
        training.tis_cap == 0 or training.old_logprobs != "sampler",
        f"training.tis_cap is {training.tis_cap}, but with training.old_logprobs sampler the ratio compares with the "
        "sampler already: choose trainer",
    )
    teacher, teaches = config.teacher, training.objective != "grpo"
    _require(
        not teaches or bool(teacher.path or teacher.hint),
        f"training.objective {training.objective} needs a teacher: set teacher.path, or teacher.hint to True",
    )
    _require(
        teaches or not (teacher.hint or (teacher.path and not training.kl_coefficient)),
        "the teacher teaches nothing: set training.objective to distill or grpo+distill",
    )
    _require(
        not teaches or training.importance_sampling_level == "token",
        f"training.objective {training.objective} has an advantage for each token: set "
        "training.importance_sampling_level to token",
    )
    _require(
        not teaches or (rl.keep_constant_reward_groups and not rl.refill),
        f"training.objective {training.objective} learns also where all rewards of a group are equal: set "
        "rl.keep_constant_reward_groups to True and rl.refill to 0",
    )
    _require(
        not (not teacher.path and config.model.adapter and config.model.lora_rank and training.kl_coefficient),
        "training.kl_coefficient compares with the weights in model.path, without the adapters in model.adapter that "
        "training begins with: set it to 0",
    )


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


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
    _require(isinstance(values, dict), f"{prefix.rstrip('.') or 'the config'} is {values!r}: it must be a section")
    if unknown := sorted(set(values) - set(hints)):
        raise ValueError(f"there is no setting {prefix}{unknown[0]}: the file is of another version")
    return kind(**{name: _typed(value, hints[name], prefix + name) for name, value in values.items()})


def _typed(value: Any, hint: Any, name: str) -> Any:
    """`value` as the type `hint`, which JSON may write differently: a list for a tuple, 1 for 1.0."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
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
