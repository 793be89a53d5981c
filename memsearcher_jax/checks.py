"""The rules that settings of several packages keep together, checked before anything is opened.

The checks read values. None loads a file of a user's: who runs one gives the agent that it holds to `check_agent`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from memsearcher_jax.agent.base import Agent
from memsearcher_jax.config import RunConfig, agent_of, intervals, settings
from memsearcher_jax.data.benchmarks import BENCHMARKS
from memsearcher_jax.ranges import contains, describe
from memsearcher_jax.training.config import TeacherConfig, TrainingConfig, learning_rate_plan


def check(config: RunConfig, *, needs_weights: bool = True) -> RunConfig:
    """Returns the config, or raises ValueError with one line that names the setting and a way out.

    `needs_weights`: whether adapters need the weights that they belong to; a plan knows their shapes without them.
    `rl.setup` checks what needs templates, files or devices.
    """
    check_ranges(config)
    if not config.has_own_agent:
        check_agent(config, agent_of(config))
    rules = (_rl_errors, _model_errors, _sampling_errors, _training_errors, _teacher_errors)
    for error in chain.from_iterable(rule(config.resolved()) for rule in rules):
        raise ValueError(error)
    if needs_weights and (config.model.lora_rank or config.model.adapter) and not config.model.path:
        raise ValueError(
            "model.lora_rank and model.adapter need the weights that the adapters belong to: set model.path"
        )
    return config


def check_agent(config: RunConfig, agent: Agent) -> None:
    """Raises ValueError, as `check` does, for settings that contradict the agent that `agent.workflow` names."""
    agent.check()
    agent.check_context(config.sampling.context_tokens)
    for error in _agent_errors(config, agent):
        raise ValueError(error)


def check_supervised(config: RunConfig) -> None:
    """Raises ValueError for settings of a teacher, which supervised learning does not use."""
    defaults = settings(RunConfig())
    for name, value in settings(config).items():
        if value != defaults[name] and (name.startswith("teacher.") or name == "training.objective"):
            raise ValueError(
                f"{name} {value} has no effect in supervised learning, which imitates sft.trajectories alone: omit it, "
                "or train with launch/tpu_train.py"
            )


def check_ranges(config: Any, prefix: str = "") -> None:
    """Raises ValueError for a number that is not in the range of its field; the message starts with `prefix`."""
    values = settings(config)
    for name, interval in intervals(type(config)).items():
        value = values[name]
        numbers = value if isinstance(value, tuple) else (value,)
        for number in numbers:
            if not contains(interval, number):
                raise ValueError(f"{prefix}{name} is {number}: it must be {describe(interval)}")


def _agent_errors(config: RunConfig, agent: Agent) -> Iterator[str]:
    """What the agent cannot do."""
    rl = config.rl
    workflow = config.agent.workflow
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
    if rl.carry_over and config.agent.harness:
        yield f"rl.carry_over {rl.carry_over} continues trajectories in later steps, and a harness cannot: set it to 0"
    if not agent.calls_tools and (config.agent.tools or config.agent.replay):
        yield f"agent.workflow {workflow} calls no tools: remove agent.tools and agent.replay"
    yield from _kind_errors(config, agent)
    default_top_n = config.agent.default_top_n
    max_top_n = config.agent.max_top_n
    if default_top_n > max_top_n:
        yield f"agent.default_top_n {default_top_n} is more than agent.max_top_n {max_top_n}"


def _kind_errors(config: RunConfig, agent: Agent) -> Iterator[str]:
    """What training asks of the kinds of generations and the agent does not have."""
    train_on = config.training.train_on
    memory_weight = config.training.memory_weight
    workflow = config.agent.harness or config.agent.workflow
    if config.agent.harness and config.training.needs_kinds:
        yield (
            f"a harness ({workflow}) does not say which replies are memories: set training.train_on to all and "
            "training.memory_weight to 1"
        )
    if train_on == "memories" and "memory" not in agent.kinds:
        yield f"agent.workflow {workflow} writes no memories: set training.train_on to all"
    if train_on == "actions" and "action" not in agent.kinds:
        yield f"every reply of agent.workflow {workflow} is a memory: set training.train_on to all"
    if memory_weight != 1 and (train_on != "all" or len(agent.kinds) < 2):
        yield (
            f"training.memory_weight {memory_weight:g} weighs memories against actions, and only one of them is "
            "trained: set it to 1"
        )


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
    model = config.model
    context_tokens = config.sampling.context_tokens
    if model.heads % model.kv_heads:
        yield f"model.heads {model.heads} is no multiple of model.kv_heads {model.kv_heads}"
    if not model.lora_targets or len(set(model.lora_targets)) < len(model.lora_targets):
        yield "model.lora_targets is empty or names a projection twice: name each projection once"
    positions = model.max_positions
    if context_tokens > positions:
        yield f"sampling.context_tokens {context_tokens} is more than model.max_positions {positions}: lower it"


def _sampling_errors(config: RunConfig) -> Iterator[str]:
    sampling = config.sampling
    buckets = sampling.prefill_buckets
    batch_sizes = sampling.decode_batch_sizes
    chunk = sampling.prefill_chunk
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
    training = config.training
    context_tokens = config.sampling.context_tokens
    learning_rate_plan(training, 1)  # of how many steps the command knows: `rl.setup.with_steps`, `make_trainer`
    if context_tokens > training.seq_len:
        yield (
            f"sampling.context_tokens {context_tokens} is more than training.seq_len {training.seq_len}: lower it, or "
            "raise that"
        )
    if training.minibatch_rows % training.grad_accum_steps:
        yield (
            f"training.minibatch_rows {training.minibatch_rows} is no multiple of training.grad_accum_steps "
            f"{training.grad_accum_steps}"
        )
    if training.seq_len % training.logit_chunk:
        yield f"training.seq_len {training.seq_len} is no multiple of training.logit_chunk {training.logit_chunk}"
    if training.tis_cap and training.old_logprobs != "trainer":
        yield f"training.tis_cap is {training.tis_cap}, and only training.old_logprobs trainer uses it: choose trainer"
    if training.norm_tokens != TrainingConfig().norm_tokens and training.aggregate != "seq-mean-token-sum-norm":
        yield (
            f"training.norm_tokens {training.norm_tokens} has no effect under training.aggregate {training.aggregate}: "
            "omit it, or set the aggregate to seq-mean-token-sum-norm"
        )
    if training.offload_reference and not training.kl_coefficient and not config.teacher.path:
        yield "training.offload_reference has no effect without a reference: omit it, or set training.kl_coefficient"
    if not config.teacher.path and config.model.adapter and config.model.lora_rank and training.kl_coefficient:
        yield (
            "training.kl_coefficient compares with the weights in model.path, without the adapters in model.adapter "
            "that training begins with: set it to 0"
        )


def _teacher_errors(config: RunConfig) -> Iterator[str]:
    training = config.training
    teacher = config.teacher
    if training.objective == "grpo":
        if teacher.top_k or (teacher.path and not training.kl_coefficient):
            yield "the teacher teaches nothing: omit it, or set training.objective to distill or grpo+distill"
        for name in ("on", "coefficient"):
            value = getattr(teacher, name)
            if value != getattr(TeacherConfig(), name):
                yield (
                    f"teacher.{name} {value} has no effect under training.objective grpo, which weights a teacher by "
                    "training.kl_coefficient: omit it, or set the objective to distill or grpo+distill"
                )
        return
    if teacher.top_k > config.model.vocab_size:
        yield f"teacher.top_k {teacher.top_k} is more than the {config.model.vocab_size} tokens of the model: lower it"
    if teacher.top_k and training.kl_coefficient:
        yield "teacher.top_k is a divergence from the teacher already: set training.kl_coefficient to 0"
    if not teacher.path:
        yield f"training.objective {training.objective} needs a teacher: set teacher.path"
    if not config.rl.keep_constant_reward_groups or config.rl.refill:
        yield (
            f"training.objective {training.objective} learns also where all rewards of a group are equal: set "
            "rl.keep_constant_reward_groups to True and rl.refill to 0"
        )
