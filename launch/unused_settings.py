"""Which settings a command does not read: a setting that is given and has no effect is refused, or printed.

A setting that has a counterpart, which the command reads in its place, is refused with the name of that one. Others are
printed as left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from memsearcher_jax.config import RunConfig, agent_of, settings

TRAINING = ("rl.", "training.", "teacher.", "health.", "sft.")
"""Sections of training and of supervised learning."""

RULES_READ = ("training.seq_len", "training.logit_chunk", "rl.advantage_scope", "rl.carry_over")
"""Settings that rules compare with those of the sampler, of tools or of a reward: other commands may need them."""

SEARCH_LIMITS = ("rl.search_timeout", "rl.max_search_outage")

IN_EVALUATION = {
    "agent.max_turns": "evaluation.max_turns",
    "sampling.temperature": "evaluation.temperature",
    "data.train": "data.test",
}
"""Settings of training whose counterpart an evaluation reads."""

COMPLETERS = ("answerer", "judge")
OF_A_SERVICE = ("url", "model", "api_key_env", "extra_body", "timeout", "max_concurrency", "max_outage")


@dataclass(frozen=True)
class Unused:
    """What a command does not read."""

    names: tuple[str, ...] = ()  # settings, or sections with their dot
    but: tuple[str, ...] = ()  # settings of these sections that it reads
    instead: dict[str, str] = field(default_factory=dict)  # a setting that it does not read -> the one that it reads

    def has(self, setting: str) -> bool:
        """Whether the command does not read the setting."""
        return _is_one_of(setting, self.names) and not _is_one_of(setting, self.but)


ASKING = Unused(
    (*TRAINING, "reward.metric", "reward.wrong_answer", "reward.require_format"),
    (*SEARCH_LIMITS, *RULES_READ),
    {name: used for name, used in IN_EVALUATION.items() if not name.startswith("data.")},
)
"""Of a command that answers questions and scores none."""

INDEXING = Unused(
    (*TRAINING, "sampling.", "health.", "judge.", "answerer.", "evaluation.", "reward.", "memalpha."),
    (*SEARCH_LIMITS, *RULES_READ, "sampling.context_tokens"),
)
"""Of a command that opens passages and no model."""

UNUSED = {
    "Train": Unused(("sft.",)),
    "Evaluate": Unused(TRAINING, (*SEARCH_LIMITS, *RULES_READ), IN_EVALUATION),
    "Ask": ASKING,
    "ServeAgent": ASKING,
    "BuildIndex": INDEXING,
    "Serve": INDEXING,
}
"""What the commands do not read, by the class of their flags.

Training stores the settings of evaluation, which an evaluation of the run reads. An export stores every setting, and a
plan reads most.
"""


def refuse_unused(command: str, given: Sequence[str], config: RunConfig) -> list[str]:
    """The settings among the `given` ones that have no effect on the command with this config.

    Raises ValueError for a setting whose counterpart is read in its place.
    """
    unused = UNUSED.get(command)
    if unused is None:
        return []
    left_out = []
    for setting in given:
        if used := unused.instead.get(setting):
            raise ValueError(f"--{setting} has no effect on this command: set --{used}")
        if unused.has(setting) or _is_of_another_agent(command, setting, config):
            left_out.append(setting)
            continue
        section, _, name = setting.rpartition(".")
        if section in COMPLETERS and name in OF_A_SERVICE:
            backend = getattr(config, section).backend
            if backend != "openai":
                raise ValueError(
                    f"--{setting} is of a service, and {section}.backend is {backend}: set --{section}.backend openai"
                )
    return left_out


def _is_of_another_agent(command: str, setting: str, config: RunConfig) -> bool:
    """Whether only another agent than the one of the config reads the setting."""
    if command in ("BuildIndex", "Serve") or config.has_own_agent:
        return False
    section = setting.partition(".")[0]
    if section == "memalpha":
        return config.agent.workflow != "memalpha"
    # An evaluation of any agent asks a judge, also one that reads the settings of a run.
    asks_judge = section == "judge" and command in ("Train", "Evaluate")
    return section in COMPLETERS and not asks_judge and not agent_of(config).needs_completers


def given_settings(words: Sequence[str]) -> list[str]:
    """The settings that the words of a command line give, by their full names."""
    known = settings(RunConfig())
    written = [word.partition("=")[0].removeprefix("--").replace("-", "_") for word in words if word.startswith("--")]
    return [name for name in written if name in known]


def _is_one_of(setting: str, names: Sequence[str]) -> bool:
    """Whether the setting is named, or belongs to a section that is named."""
    return any(setting == name or (name.endswith(".") and setting.startswith(name)) for name in names)
