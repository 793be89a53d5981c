"""The configuration of a run: the frozen config of each package. `checks.py` has the rules between them.

The defaults are the paper's settings for the 7B model; a preset in `configs/` states what it changes.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from annotated_types import Interval

from memsearcher_jax.agent.base import Agent
from memsearcher_jax.agent.config import AgentConfig, RewardConfig
from memsearcher_jax.agent.memalpha.config import MemalphaConfig
from memsearcher_jax.agent.registry import make_agent
from memsearcher_jax.data.config import DataConfig
from memsearcher_jax.jsonl import flatten
from memsearcher_jax.model.config import MeshConfig, ModelConfig
from memsearcher_jax.python_files import CodeName
from memsearcher_jax.ranges import Seed
from memsearcher_jax.retrieval.config import RetrievalConfig
from memsearcher_jax.rl.config import CompleterConfig, EvaluationConfig, HealthConfig, RLConfig
from memsearcher_jax.sampling.config import SamplingConfig
from memsearcher_jax.sft.config import SFTConfig
from memsearcher_jax.training.config import TeacherConfig, TrainingConfig

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

    @property
    def has_own_agent(self) -> bool:
        """Whether a file of the user's holds the agent."""
        return self.agent.workflow.endswith(".py") and not self.agent.harness

    def resolved(self) -> RunConfig:
        """The config that a run works with: `training.old_logprobs auto` is resolved.

        What is stored, and compared when a run resumes, are the settings as they were given.
        """
        if not self.sampling.is_quantized or self.training.old_logprobs != "auto":
            return self
        tis_cap = self.training.tis_cap or INT8_TIS_CAP
        return replace(self, training=replace(self.training, old_logprobs="trainer", tis_cap=tis_cap))


def agent_of(config: RunConfig) -> Agent:
    """The agent that the run trains, evaluates or serves."""
    return make_agent(config.agent, config.reward, config.memalpha)


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
    others = settings(second)
    found = []
    for name, value in settings(first).items():
        other = others[name]
        if _without_folder(value) != _without_folder(other):
            found.append((name, value, other))
    return found


def _without_folder(value: Any) -> Any:
    """The name of a Python file in place of its path; other values as they are."""
    if isinstance(value, tuple):
        return tuple(map(_without_folder, value))
    is_python_file = isinstance(value, str) and bool(CodeName.of(value).file)
    return value.rpartition("/")[2] if is_python_file else value


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
    origin = typing.get_origin(hint)
    choices = typing.get_args(hint)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_typed(member, choices[0], name) for member in value)
    if type(value) is hint or (origin is Literal and value in choices):
        return value
    if hint is float and type(value) is int:
        return float(value)
    of_literal = f"one of {', '.join(choices)}" if origin is Literal else f"of type {getattr(hint, '__name__', '')}"
    expected = "a list" if origin is tuple else of_literal
    raise ValueError(f"{name} is {value!r}: it must be {expected}")
