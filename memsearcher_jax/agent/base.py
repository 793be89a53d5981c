"""What an agent is: one object that training, evaluation, serving and planning ask, and never which agent it is.

An agent knows its problems, its templates, its settings with their check and its longest context. It starts a workflow,
a generator that does no I/O, and rewards finished trajectories.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal, Protocol

from memsearcher_jax.agent import reward as answers
from memsearcher_jax.agent.config import AgentConfig, RewardConfig
from memsearcher_jax.agent.memalpha.config import MemalphaConfig
from memsearcher_jax.agent.prompts import Prompts, load
from memsearcher_jax.types import (
    FAILURES,
    Completion,
    GenerationKind,
    Outcome,
    Problem,
    Prompt,
    ScoredTrajectory,
    StopReason,
    TokenCounter,
    Trajectory,
    TrajectorySummary,
    Workflow,
)


class PromptTokenizer(TokenCounter, Protocol):
    """A token counter that also encodes prompts."""

    @property
    def extra_markup_tokens(self) -> int:
        """Tokens by which the markup of a conversation exceeds ChatML's text, as which budgets count it."""
        ...

    def prompt(self, prompt: Prompt) -> Sequence[Sequence[int]]:
        """The ids of each segment; chat markup of trusted segments becomes special tokens."""
        ...


class Complete(Protocol):
    """Completes prompts with a model that is not the policy: an answerer, or a judge."""

    def __call__(self, prompts: Sequence[Prompt], draws: int) -> list[Completion]:
        """One completion of each prompt, in order. Calls with equal `draws` sample the same for equal prompts."""
        ...


class Logprobs(Protocol):
    """Scores texts with the policy."""

    def __call__(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[float]:
        """For each text the sum of the log-probabilities of its tokens after its prompt, in nats, at temperature 1.

        Raises ValueError, in one line, for a prompt and a text that exceed the longest context together.
        """
        ...


def no_logprobs(prompts: Sequence[Prompt], texts: Sequence[str]) -> list[float]:
    """Raises ValueError: where no weights are loaded, there are no log-probabilities."""
    raise ValueError("scoring.logprobs needs the weights of the policy, and here are none: train or evaluate with them")


@dataclass(frozen=True)
class Scoring:
    """What an agent's rewards may use."""

    token_counter: TokenCounter
    answerer: Complete | None = None
    judge: Complete | None = None
    notify: Callable[[str], None] = lambda line: None  # receives lines on the progress
    evaluation: bool = False  # some benchmarks are scored by other rules than in training
    logprobs: Logprobs = no_logprobs  # of the policy as it is trained or evaluated


@dataclass(frozen=True)
class Agent(abc.ABC):
    """An agent under the settings of a run; the sections of other agents are ignored."""

    config: AgentConfig
    reward: RewardConfig = field(default_factory=RewardConfig)
    memalpha: MemalphaConfig = field(default_factory=MemalphaConfig)
    tools: tuple[dict[str, Any], ...] = ()  # JSON schemas of the run's own, with name, description and parameters

    searches: ClassVar[bool] = False
    """Whether its workflow yields `Search`, so that a run opens an index."""
    has_one_context: ClassVar[bool] = False
    """Whether one context holds all turns: such a trajectory cannot go on under other weights."""
    keeps_memory: ClassVar[bool] = False
    """Whether a context shows a memory that the policy wrote."""
    kinds: ClassVar[frozenset[GenerationKind]] = frozenset(("action",))
    """What its workflow generates: `training.train_on` selects by it."""
    calls_tools: ClassVar[bool] = False
    """Whether its workflow yields `Call` for tools of the run's own."""
    rewards_per: ClassVar[Literal["trajectory", "context"]] = "trajectory"
    needs_completers: ClassVar[bool] = False
    """Whether its rewards ask an answerer."""
    templates: ClassVar[str] = "memsearcher"
    """The packaged agent whose template files it reads."""
    synthetic_data: ClassVar[str] = "encyclopedia"
    """The value of `data.synthetic` that makes problems for it."""

    @property
    def untrainable(self) -> str:
        """Why its workflow generates nothing that can be trained, by a setting, or ""."""
        return ""

    @property
    @abc.abstractmethod
    def prompts(self) -> Any:
        """The template set, read when it is first used.

        Raises FileNotFoundError or ValueError for one that does not fit the workflow.
        """

    @abc.abstractmethod
    def start(self, problem: Problem, token_counter: TokenCounter) -> Workflow:
        """The workflow of one trajectory."""

    @abc.abstractmethod
    def rewards(self, trajectories: Sequence[Trajectory], scoring: Scoring) -> list[ScoredTrajectory]:
        """One `ScoredTrajectory` for each trajectory, in order.

        A trajectory that was lost to a fault of the machinery has a reward of NaN. Raises ConnectionError if a
        completer completes nothing at all: there is nothing to learn from.
        """

    def check(self) -> None:  # noqa: B027
        """Raises ValueError for settings that contradict each other; by default, none do."""

    @abc.abstractmethod
    def check_problems(self, problems: Iterable[Problem], count: Callable[[str], int], *, has_judge: bool) -> None:
        """Raises ValueError that names a problem which the workflow cannot take, or answers that nothing can score.

        `count`: tokens of a text.
        """

    @abc.abstractmethod
    def context_budget(self) -> dict[str, int]:
        """Maximum tokens of one context without template text, by the setting that limits them."""

    @abc.abstractmethod
    def template_tokens(self, tokenizer: PromptTokenizer) -> int:
        """Maximum tokens of template text in one context."""

    def completer_tokens(self, tokenizer: PromptTokenizer, *, judge: bool) -> int:
        """Tokens of the longest context in which the answerer, or with `judge` the judge too, completes; 0 if none."""
        return 0

    def scored_by(self, problems: Iterable[Problem]) -> dict[str, str]:
        """How an evaluation scores the answers, by the source of the problems; {} if there is one rule for all."""
        return {}

    def numbers(self, summary: TrajectorySummary) -> dict[str, float]:
        """Numbers of one trajectory whose means are metrics of a step, besides those of every agent."""
        return {}

    def longest_context(self, tokenizer: PromptTokenizer) -> int:
        """Maximum tokens of one context."""
        return sum(self._limits(tokenizer).values())

    def check_context(self, context_tokens: int, tokenizer: PromptTokenizer | None = None) -> None:
        """Raises ValueError unless the longest context fits `context_tokens`.

        Without a tokenizer the templates count as one token.
        """
        limits = self._limits(tokenizer)
        needed = sum(limits.values())
        if needed > context_tokens:
            parts = ", ".join(f"{name} {limit}" for name, limit in limits.items())
            raise ValueError(
                f"a context may need {needed} tokens ({parts}), but sampling.context_tokens is {context_tokens}: raise "
                "it or lower one of these"
            )

    def _limits(self, tokenizer: PromptTokenizer | None) -> dict[str, int]:
        if tokenizer is None:
            return {"templates at least": 1, **self.context_budget()}
        return {"templates": self.template_tokens(tokenizer) + tokenizer.extra_markup_tokens, **self.context_budget()}


class QuestionAgent(Agent):
    """An agent that answers one question; it is rewarded by its answer."""

    workflow: ClassVar[Callable[..., Workflow]]
    parse_answer: ClassVar[Callable[[str], answers.Parsed]] = staticmethod(answers.parse_boxed)
    """The answer of a transcript and its format error, by the format of the workflow."""

    prompt_set: ClassVar[type[Prompts]] = Prompts

    @cached_property
    def prompts(self) -> Any:
        return load(self.config, self.prompt_set, self.templates)

    def start(self, problem: Problem, token_counter: TokenCounter) -> Workflow:
        prompts = self.prompts.with_tools(self.tools)
        return type(self).workflow(problem.question, config=self.config, prompts=prompts, token_counter=token_counter)

    def rewards(self, trajectories: Sequence[Trajectory], scoring: Scoring) -> list[ScoredTrajectory]:
        return [self._score(trajectory) for trajectory in trajectories]

    def _score(self, trajectory: Trajectory) -> ScoredTrajectory:
        """The training reward, and the metrics of the answer: 0 where there is none, no metrics where it was lost."""
        outcome = trajectory.outcome
        problem = trajectory.problem
        earned = self._earned(trajectory)
        if outcome.stop.is_fault:
            return ScoredTrajectory(trajectory, earned.value, earned.reason)
        answer = outcome.answer if outcome.stop is StopReason.ANSWERED else None
        scores = answers.answer_scores(answer, problem.golden)
        supporting_ids = problem.metadata.get("supporting_ids")  # of documents; a passage's id is DOCUMENT#START
        if isinstance(supporting_ids, list | tuple) and supporting_ids:
            wanted = set(map(str, supporting_ids))
            found = {passage.id.partition("#")[0] for passage in outcome.passages}
            scores["evidence_recall"] = len(found & wanted) / len(wanted)
        return ScoredTrajectory(trajectory, earned.value, earned.reason, scores)

    def _earned(self, trajectory: Trajectory) -> answers.Reward:
        """What the answer earns, by the format of the workflow."""
        golden = trajectory.problem.golden
        parse_answer = type(self).parse_answer
        return answers.trajectory_reward(trajectory.outcome, trajectory.transcript, golden, self.reward, parse_answer)

    def check_problems(self, problems: Iterable[Problem], count: Callable[[str], int], *, has_judge: bool) -> None:
        problems = list(problems)
        streams = [problem.id for problem in problems if problem.stream and problem.stream.questions]
        if streams:
            raise ValueError(
                f'problem "{streams[0]}" is a stream with questions, which agent.workflow {self.config.workflow} does '
                "not read: evaluate it with a preset and weights of memalpha"
            )
        budget = self.config.question_tokens
        too_long = [problem for problem in problems if count(problem.question) > budget]
        if too_long:
            first = too_long[0]
            others = f" ({len(too_long)} such questions)" if len(too_long) > 1 else ""
            raise ValueError(
                f'question "{first.id}" has {count(first.question)} tokens and the budget is {budget}{others}: '
                "raise agent.question_tokens, or shorten or remove the question"
            )

    def context_budget(self) -> dict[str, int]:
        config = self.config
        return {
            "agent.question_tokens": config.question_tokens,
            "agent.observation_tokens": config.observation_tokens,
            "2 x agent.completion_tokens": 2 * config.completion_tokens,
        }

    def template_tokens(self, tokenizer: PromptTokenizer) -> int:
        return self.prompts.with_tools(self.tools).template_tokens(self.config.max_calls, tokenizer)

    def numbers(self, summary: TrajectorySummary) -> dict[str, float]:
        """Its searches, and by kind whether its answer is wrong."""
        wrong = {f"wrong/{failure}": float(summary.failure == failure) for failure in FAILURES}
        return {"searches": float(summary.searches), **wrong}


class ReadingAgent(Agent):
    """An agent that reads texts into a memory, from which questions are answered later."""

    @abc.abstractmethod
    def text_problem(self, chunks: Sequence[str], question: str) -> Problem:
        """A problem of these texts and one question without a golden answer."""

    @abc.abstractmethod
    def start(self, problem: Problem, token_counter: TokenCounter, memory: Any = None) -> Workflow:
        """The workflow that adds a problem's texts, each of at most `chunk_tokens`, to a memory; None: an empty one."""

    @abc.abstractmethod
    def remembered(self, outcome: Outcome) -> Any:
        """The memory that a workflow wrote."""

    @abc.abstractmethod
    def answer(self, pairs: Sequence[tuple[Any, str]], scoring: Scoring) -> list[Completion]:
        """The answers to (memory, question) pairs."""

    @property
    @abc.abstractmethod
    def chunk_tokens(self) -> int:
        """Maximum tokens of a text that is read at once."""
