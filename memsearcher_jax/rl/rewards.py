"""Rewards of finished trajectories: the agent's rule, with the answerer and the judge that a run gives it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from memsearcher_jax.agent.base import Agent, Complete, ReadingAgent, Scoring
from memsearcher_jax.rl.completers import Completer
from memsearcher_jax.rl.tokenizer import ChatTokenizer
from memsearcher_jax.types import Completion, Prompt, ScoredTrajectory, Trajectory

REWARD_DRAWS = 2**31 - 1  # folded into the key, so that answers and trajectories draw from different streams


@dataclass(frozen=True)
class RewardFn:
    """Scores trajectories."""

    agent: Agent
    tokenizer: ChatTokenizer
    answerer: Completer | None = None
    judge: Completer | None = None
    evaluation: bool = False  # some benchmarks are scored by other rules in evaluation

    def __call__(
        self, trajectories: Sequence[Trajectory], key: jax.Array, notify: Callable[[str], None]
    ) -> list[ScoredTrajectory]:
        """One `ScoredTrajectory` for each, in order; `key` decides what answerer and judge sample.

        Raises ConnectionError where one of them completes nothing at all.
        """
        answerer, judge = _with_key(self.answerer, key), _with_key(self.judge, key)
        return self.agent.rewards(
            trajectories, Scoring(self.tokenizer, answerer, judge, notify, evaluation=self.evaluation)
        )

    def for_evaluation(self) -> RewardFn:
        """The same function by evaluation's rules, with the same completers."""
        return replace(self, evaluation=True)

    def answer(self, pairs: Sequence[tuple[Any, str]], key: jax.Array) -> list[Completion]:
        """The answers to (memory, question) pairs, of an agent that reads texts into a memory."""
        assert isinstance(self.agent, ReadingAgent), "only agents that read answer from a memory"
        return self.agent.answer(pairs, Scoring(self.tokenizer, _with_key(self.answerer, key)))


def _with_key(completer: Completer | None, key: jax.Array) -> Complete | None:
    if completer is None:
        return None

    def complete(prompts: Sequence[Prompt], draws: int) -> list[Completion]:
        return completer.complete(prompts, jax.random.fold_in(jax.random.fold_in(key, REWARD_DRAWS), draws))

    return complete
