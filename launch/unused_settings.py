"""Which settings a command does not read: a setting that is given and has no effect is refused, or printed.

A setting that has a counterpart, which the command reads in its place, is refused with the name of that one. Others are
printed as left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

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
    (
        *TRAINING,
        *("reward.metric", "reward.wrong_answer", "reward.require_format"),
        *("evaluation.max_questions", "evaluation.in_distribution", "data."),
    ),
    (*SEARCH_LIMITS, *RULES_READ, "data.synthetic", "data.malformed", "data.encyclopedia."),
    {name: used for name, used in IN_EVALUATION.items() if not name.startswith("data.")},
)
"""Of a command that answers questions and scores none."""

INDEXING = Unused(
    (
        *TRAINING,
        "seed",
        "model.",
        "mesh.",
        "sampling.",
        "agent.",
        "judge.",
        "answerer.",
        "evaluation.",
        "reward.",
        "memalpha.",
    ),
    (*SEARCH_LIMITS, *RULES_READ, "model.max_positions", "sampling.context_tokens", "agent.workflow"),
)
"""Of a command that opens passages and no model."""

UNUSED = {
    "Train": Unused(("sft.",)),
    "SFT": Unused(
        (
            "rl.",
            "health.",
            *(f"training.{name}" for name in ("clip_low", "clip_high", "dual_clip", "old_logprobs", "tis_cap")),
            *(f"training.{name}" for name in ("kl_coefficient", "entropy_coefficient", "offload_reference")),
            "data.train",
        ),
        ("rl.checkpoint_every", "rl.keep_checkpoints", "rl.trackers", *RULES_READ),
    ),
    "Evaluate": Unused(TRAINING, (*SEARCH_LIMITS, *RULES_READ), IN_EVALUATION),
    "Ask": ASKING,
    "ServeAgent": ASKING,
    "BuildIndex": replace(INDEXING, names=(*INDEXING.names, "data.", "retrieval.index", "retrieval.url")),
    "AuditCorpus": INDEXING,
    "Serve": replace(INDEXING, names=(*INDEXING.names, "data."), but=(*INDEXING.but, "data.encyclopedia.")),
    "PlanTpu": Unused(
        ("data.", "evaluation.", "health.", "sft.", "reward.", "judge.", "answerer.", "retrieval."),
        ("data.synthetic", "reward.function", "judge.backend", "answerer.backend", "retrieval.url"),
    ),
}
"""What the commands do not read, by `cli.Command.use`.

A run stores the settings of evaluation, which an evaluation of it reads. An export stores every setting.
"""


@dataclass(frozen=True)
class Condition:
    """Settings that have an effect under some values of others alone."""

    names: tuple[str, ...]  # settings, or sections with their dot
    is_met: Callable[[RunConfig], bool]


def _reads_agent_setting(*workflows: str) -> Callable[[RunConfig], bool]:
    """Whether the agent is one of these, or one of the user's, which may read any setting of agents."""
    return lambda config: config.has_own_agent or bool(config.agent.harness) or config.agent.workflow in workflows


TURNS = ("memsearcher", "react", "compact", "search_r1", "mem1")

CONDITIONS = (
    Condition(("agent.carry_memory",), _reads_agent_setting("memsearcher", "compact")),
    Condition(("agent.history_tokens",), _reads_agent_setting("compact")),
    Condition(("agent.rewrite_tokens",), _reads_agent_setting("memsearcher", "compact", "memagent")),
    Condition(("agent.memory_tokens",), _reads_agent_setting("memsearcher", "compact", "memagent", "memalpha")),
    Condition(("agent.max_turns", "evaluation.max_turns"), _reads_agent_setting(*TURNS)),
    Condition(("agent.on_search_error",), _reads_agent_setting(*TURNS, "rag")),
    Condition(("agent.harness_timeout",), lambda config: bool(config.agent.harness)),
    Condition(("agent.tool_timeout",), lambda config: bool(config.agent.tools)),
    Condition(("data.documents.",), lambda config: _generates(config, "documents")),
    Condition(("data.streams.",), lambda config: _generates(config, "streams")),
    Condition(("model.lora_alpha", "model.lora_targets"), lambda config: bool(config.model.lora_rank)),
    Condition(("retrieval.timeout", "retrieval.max_concurrency"), lambda config: bool(config.retrieval.url)),
    Condition(
        tuple(
            f"retrieval.{name}"
            for name in ("encoder", "encoder_prompts", "max_query_tokens", "max_passage_tokens", "embedding_dtype")
        ),
        lambda config: not config.retrieval.url and config.retrieval.method != "bm25",
    ),
    Condition(("retrieval.method",), lambda config: not config.retrieval.url),
    Condition(("retrieval.index_type",), lambda config: not config.retrieval.url and config.retrieval.method != "bm25"),
    Condition(
        ("retrieval.target_recall",),
        lambda config: (
            not config.retrieval.url and config.retrieval.method != "bm25" and config.retrieval.index_type == "scann"
        ),
    ),
    Condition(("rl.steps",), lambda config: not config.rl.epochs),
)


def _generates(config: RunConfig, kind: str) -> bool:
    """Whether the problems are generated, and are of this kind."""
    return config.data.is_synthetic and config.data.synthetic == kind


def refuse_unused(use: str, given: Sequence[str], config: RunConfig) -> list[str]:
    """The settings among the `given` ones that have no effect on a command of this use with this config.

    Raises ValueError for a setting whose counterpart is read in its place.
    """
    unused = UNUSED.get(use)
    if unused is None:
        return []
    left_out = []
    for setting in given:
        if used := unused.instead.get(setting):
            raise ValueError(f"--{setting} has no effect on this command: set --{used}")
        lacks_condition = any(
            _is_one_of(setting, condition.names) and not condition.is_met(config) for condition in CONDITIONS
        )
        if unused.has(setting) or lacks_condition or _is_of_another_agent(use, setting, config):
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


def _is_of_another_agent(use: str, setting: str, config: RunConfig) -> bool:
    """Whether only another agent than the one of the config reads the setting."""
    if config.has_own_agent:
        return False
    section = setting.partition(".")[0]
    if section == "memalpha":
        return config.agent.workflow != "memalpha"
    # An evaluation of any agent asks a judge, also one that reads the settings of a run.
    asks_judge = section == "judge" and use in ("Train", "Evaluate")
    return section in COMPLETERS and not asks_judge and not agent_of(config).needs_completers


def given_settings(words: Sequence[str]) -> list[str]:
    """The settings that the words of a command line give, by their full names."""
    known = settings(RunConfig())
    written = [word.partition("=")[0].removeprefix("--").replace("-", "_") for word in words if word.startswith("--")]
    return [name for name in written if name in known]


def _is_one_of(setting: str, names: Sequence[str]) -> bool:
    """Whether the setting is named, or belongs to a section that is named."""
    return any(setting == name or (name.endswith(".") and setting.startswith(name)) for name in names)
