"""Rewards of trajectories that read a stream: questions about the memory are answered, its calls judged.

The trajectories are over when this begins. Answers and verdicts are generated in contexts of their own, which belong to
no trajectory and are not trained. A question without an answer, or a call without a verdict, enters no mean and is
counted; where nothing is left of a mean the reward is NaN, and that context is not trained.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np
from jax.sharding import Mesh

from memsearcher_jax.agent.memalpha.config import MemalphaConfig
from memsearcher_jax.agent.memalpha.memory import Store
from memsearcher_jax.agent.memalpha.prompts import MemalphaPrompts
from memsearcher_jax.agent.memalpha.reward import (
    calls_reward,
    content_reward,
    needs_judge,
    parse_verdict,
    question_score,
    stream_reward,
)
from memsearcher_jax.agent.memalpha.tools import content_to_judge
from memsearcher_jax.agent.memalpha.view import EvidenceRetriever
from memsearcher_jax.agent.memalpha.workflow import StreamOutcome
from memsearcher_jax.config import RunConfig
from memsearcher_jax.retrieval.lru_cache import LRUCache
from memsearcher_jax.rl.completers import CachedCompleter, Completer, EngineCompleter, open_openai_completer
from memsearcher_jax.rl.config import CompleterConfig
from memsearcher_jax.rl.metrics import known_mean
from memsearcher_jax.rl.reward_fn import RewardFn
from memsearcher_jax.rl.rollout import Params, WorkflowExecutor
from memsearcher_jax.rl.tokenizer import ChatTokenizer
from memsearcher_jax.sampling.engine import Engine
from memsearcher_jax.types import (
    Completion,
    Prompt,
    ScoredTrajectory,
    StopReason,
    Stream,
    StreamQuestion,
    TokenCounter,
    Trajectory,
)

CHUNK = 1_024  # prompts that exist at a time: each may be as long as a memory
MIN_PROMPTS = 16  # fewer may all fail by chance, so they do not end a run
REWARD_DRAWS = 2**31 - 1  # folded into the key, so that answers and trajectories draw from different streams

Verdict = bool | None  # None: the judge failed


@dataclass(frozen=True)
class StreamRewardFn:
    """Scores trajectories that have read a stream. Without a `judge` the reward has no content term."""

    config: MemalphaConfig
    prompts: MemalphaPrompts
    token_counter: TokenCounter
    answerer: Completer | None  # config.check demands one
    judge: Completer | None
    evaluation: bool = False  # two benchmarks are scored by other rules in evaluation

    def __call__(
        self, trajectories: Sequence[Trajectory], key: jax.Array, notify: Callable[[str], None]
    ) -> list[ScoredTrajectory]:
        """One `ScoredTrajectory` for each trajectory, in order, with one reward for each of its contexts.

        Raises ConnectionError if the answerer or the judge completes nothing at all: there is nothing to learn from.
        A trajectory that did not reach the end of its stream has no reward.
        """
        key = jax.random.fold_in(key, REWARD_DRAWS)
        complete = [one for one in trajectories if one.outcome.stop is StopReason.STREAM_READ]
        answers_RQ = self.answers(complete, jax.random.fold_in(key, 0), notify)
        grades_RQ = self._grades(complete, answers_RQ, jax.random.fold_in(key, 1), notify)
        verdicts_RC = self._verdicts(complete, jax.random.fold_in(key, 2), notify)
        scored = iter([self._score(*one) for one in zip(complete, answers_RQ, grades_RQ, verdicts_RC, strict=True)])
        return [next(scored) if one.outcome.stop is StopReason.STREAM_READ else _unscored(one) for one in trajectories]

    def answers(
        self, trajectories: Sequence[Trajectory], key: jax.Array, notify: Callable[[str], None]
    ) -> list[list[Completion]]:
        """One completion for each question of each stream, from the memory that the trajectory wrote.

        Raises ConnectionError if the answerer completes nothing at all.
        """

        def prompts() -> Iterator[Prompt]:
            for trajectory in trajectories:
                stream = _stream(trajectory)
                retriever = EvidenceRetriever(stream, _outcome(trajectory).memory, self.config, self.token_counter)
                for question in stream.questions:
                    asked = self.prompts.with_prefix(stream.source, question.text)
                    yield self.prompts.answer_prompt(retriever.retrieve(asked), asked)

        completions = iter(_complete(self.answerer, prompts(), key, notify, "answers"))
        return [list(itertools.islice(completions, len(_stream(one).questions))) for one in trajectories]

    def _grades(
        self,
        trajectories: Sequence[Trajectory],
        answers_RQ: Sequence[Sequence[Completion]],
        key: jax.Array,
        notify: Callable[[str], None],
    ) -> list[list[Completion]]:
        """The judge's completions about the answers of the sources that need it; empty completions about others and
        about answers that failed."""
        prompts_RQ = [
            [
                self.prompts.grade_prompt(question.text, str(question.answer), answer.text)
                if needs_judge(stream.source, evaluation=self.evaluation) and not answer.error
                else None
                for question, answer in zip(stream.questions, answers, strict=True)
            ]
            for stream, answers in zip(map(_stream, trajectories), answers_RQ, strict=True)
        ]
        asked = (prompt for prompts in prompts_RQ for prompt in prompts if prompt)
        empty = "the judge's completion is empty"
        grades = (
            one if one.text.strip() else Completion(error=one.error or empty)
            for one in _complete(self.judge, asked, key, notify, "grades")
        )
        return [[next(grades) if prompt else Completion() for prompt in prompts] for prompts in prompts_RQ]

    def _verdicts(
        self, trajectories: Sequence[Trajectory], key: jax.Array, notify: Callable[[str], None]
    ) -> list[list[list[Verdict]] | None]:
        """For each trajectory, chunk and call whether its content is valid; None without a judge."""
        if self.judge is None:
            return [None] * len(trajectories)
        contents_RC = [
            [[content_to_judge(call) for call in calls] for calls in _outcome(trajectory).calls_C]
            for trajectory in trajectories
        ]
        judged = [content for contents_C in contents_RC for calls in contents_C for content in calls if content]
        prompts = (self.prompts.judge_prompt(*content) for content in judged)
        completions = iter(_complete(self.judge, prompts, key, notify, "verdicts"))

        def verdict(content: object) -> Verdict:
            if not content:
                return False
            completion = next(completions)
            return None if completion.error else parse_verdict(completion.text)

        return [[[verdict(content) for content in calls] for calls in contents_C] for contents_C in contents_RC]

    def _score(
        self,
        trajectory: Trajectory,
        answers: Sequence[Completion],
        grades: Sequence[Completion],
        verdicts_C: Sequence[Sequence[Verdict]] | None,
    ) -> ScoredTrajectory:
        outcome, stream = _outcome(trajectory), _stream(trajectory)
        score_Q = [
            None
            if answer.error or grade.error
            else question_score(
                stream.source, answer.text, question.answer, grade.text or None, evaluation=self.evaluation
            )
            for question, answer, grade in zip(stream.questions, answers, grades, strict=True)
        ]
        known = [score for score in score_Q if score is not None]
        counts = {
            "questions": len(score_Q),
            "answers_failed": len(score_Q) - len(known),
            "verdicts_failed": sum(verdict is None for calls in verdicts_C or () for verdict in calls),
        }
        if self.config.answer_from != "memory":
            counts["memory_tokens"] = self._kept_tokens(outcome.counts["stream_tokens"])
        lines = "\n".join(_line(*one) for one in zip(stream.questions, answers, score_Q, strict=True))
        trajectory = replace(trajectory, outcome=replace(outcome, answer=lines, counts=outcome.counts | counts))
        if not known:
            failure = next(one.error for one in (*answers, *grades) if one.error)
            return _unscored(trajectory, f"no answer could be scored: {failure}")
        scores = {"accuracy": float(np.mean(known)), **_by_kind(stream, score_Q)}
        if self.config.answer_from != "memory":
            return ScoredTrajectory(trajectory, scores["accuracy"], "answered from the stream itself", scores)
        calls_C = [calls_reward(results, self.config.reward) for results in outcome.results_C]
        content_C = None if verdicts_C is None else [content_reward(calls) for calls in verdicts_C]
        reward = stream_reward(
            known,
            memory_tokens=outcome.counts["memory_tokens"],
            stream_tokens=outcome.counts["stream_tokens"],
            calls_C=calls_C,
            content_C=content_C,
            config=self.config.reward,
        )
        scores |= {"compression": reward.compression, "calls_reward": float(np.mean(calls_C))}
        if content_C is not None:
            scores["content_reward"] = known_mean(content_C)
        reason = " ".join(f"{name} {value:.3f}" for name, value in scores.items() if "/" not in name)
        return ScoredTrajectory(trajectory, known_mean(reward.value_C), reason, scores, reward.value_C)

    def _kept_tokens(self, stream_tokens: int) -> int:
        """Tokens that readers without a memory keep of a stream: those of its end, or all of them to search in."""
        if self.config.answer_from == "rag":
            return stream_tokens
        return min(stream_tokens, self.config.answer_memory_tokens)


def open_stream_reward_fn(
    config: RunConfig,
    prompts: MemalphaPrompts,
    tokenizer: ChatTokenizer,
    mesh: Mesh,
    initial_params: Callable[[], Params],
    *,
    evaluation: bool = False,
    check: Callable[[], None] = lambda: None,
) -> StreamRewardFn:
    """The reward function with its answerer and judge. `check` interrupts them by raising.

    `initial_params` returns the frozen weights on `mesh`; it is called only if a completer runs on them, and once.
    Raises ValueError if a service's settings do not suffice.
    """
    settings, engine_completer = config.memalpha, None
    if uses_initial_policy(config):
        # An engine of its own: its contexts are longer than the policy's, and it may be greedy.
        context_tokens = answer_context_tokens(config, prompts, tokenizer)
        sampling = replace(config.sampling, context_tokens=context_tokens, temperature=settings.answer_temperature)
        engine = Engine(config.model, sampling, tokenizer.stop_ids, mesh)
        executor = WorkflowExecutor(engine, tokenizer, check=check)
        engine_completer = EngineCompleter(executor, initial_params(), settings.answer_tokens)

    def open_completer(section: str) -> Completer | None:
        backend: CompleterConfig = getattr(config, section)
        completer: Completer | None = engine_completer if backend.backend == "initial_policy" else None
        if backend.backend == "openai":
            tokens, temperature = settings.answer_tokens, settings.answer_temperature
            completer = open_openai_completer(
                backend, section=section, max_tokens=tokens, temperature=temperature, check=check
            )
        return CachedCompleter(completer, LRUCache(backend.cache_size)) if completer else None

    return StreamRewardFn(settings, prompts, tokenizer, open_completer("answerer"), open_completer("judge"), evaluation)


def for_evaluation(reward_fn: RewardFn) -> RewardFn:
    """The same function by evaluation's rules, with the same completers."""
    return replace(reward_fn, evaluation=True) if isinstance(reward_fn, StreamRewardFn) else reward_fn


def uses_initial_policy(config: RunConfig) -> bool:
    """Whether the weights that the run started from answer or judge."""
    return "initial_policy" in (config.answerer.backend, config.judge.backend)


def check_answer_contexts(config: RunConfig, prompts: MemalphaPrompts, tokenizer: ChatTokenizer) -> None:
    """Raises ValueError unless the longest context that answers or judges fits the model."""
    needed = answer_context_tokens(config, prompts, tokenizer)
    if uses_initial_policy(config) and needed > config.model.max_positions:
        raise ValueError(
            f"a context that answers or judges may need {needed} tokens (memalpha.answer_memory_tokens "
            f"{config.memalpha.answer_memory_tokens}, memalpha.answer_tokens {config.memalpha.answer_tokens}, a "
            f"question and its template), but model.max_positions is {config.model.max_positions}: lower one of them"
        )


def answer_context_tokens(config: RunConfig, prompts: MemalphaPrompts, tokenizer: ChatTokenizer) -> int:
    """Tokens of the longest context in which a question is answered or something is judged."""
    settings, agent = config.memalpha, config.agent

    def tokens(prompt: Prompt) -> int:
        return sum(map(len, tokenizer.prompt(prompt)))

    # A source's prefix is joined to its questions by two line ends.
    prefix = max((tokenizer.count(text) + 2 for text in prompts.prefixes.values()), default=0)
    question = prefix + agent.question_tokens
    needed = [tokens(prompts.answer_prompt("", "")) + settings.answer_memory_tokens + question]
    if config.judge.backend == "initial_policy":
        # JSON's escapes may make a content longer than its completion; then it does not fit, fails, and is counted.
        needed += [tokens(prompts.judge_prompt(store, "")) + agent.completion_tokens for store in Store]
        case = agent.question_tokens + 2 * settings.answer_tokens  # with the golden answer and the given one
        needed.append(tokens(prompts.grade_prompt("", "", "")) + case)
    return max(needed) + settings.answer_tokens + 1


def _outcome(trajectory: Trajectory) -> StreamOutcome:
    assert isinstance(trajectory.outcome, StreamOutcome), "only the workflow of streams ends with STREAM_READ"
    return trajectory.outcome


def _stream(trajectory: Trajectory) -> Stream:
    assert trajectory.problem.stream is not None, "setup refuses problems without a stream"
    return trajectory.problem.stream


def _complete(
    completer: Completer | None, prompts: Iterator[Prompt], key: jax.Array, notify: Callable[[str], None], what: str
) -> list[Completion]:
    """Every completion, in order. Raises ConnectionError if all failed, and they are not only a few."""
    completions: list[Completion] = []
    while chunk := list(itertools.islice(prompts, CHUNK)):
        if completer is None:
            raise ValueError(f"judge.backend is none and {what} are needed: set it to initial_policy or openai")
        completions += completer.complete(chunk, key)
        notify(f"{len(completions)} {what}")
    if len(completions) >= MIN_PROMPTS and all(one.error for one in completions):
        raise ConnectionError(f"none of {len(completions)} {what} came; the last failure: {completions[-1].error}")
    return completions


def _by_kind(stream: Stream, score_Q: Sequence[float | None]) -> dict[str, float]:
    """The mean score of the data set, and by the kind of question where the data gives one."""
    scores: dict[str, list[float]] = {}
    for question, score in zip(stream.questions, score_Q, strict=True):
        if score is not None:
            scores.setdefault(f"accuracy/{stream.source}", []).append(score)
            if question.kind:
                scores.setdefault(f"accuracy/{stream.source}/{question.kind}", []).append(score)
    return {name: float(np.mean(values)) for name, values in sorted(scores.items())}


def _unscored(trajectory: Trajectory, reason: str = "") -> ScoredTrajectory:
    reason = reason or f"the stream was not read to its end: {trajectory.outcome.stop.value}"
    return ScoredTrajectory(trajectory, math.nan, reason, {}, (math.nan,) * len(trajectory.contexts))


def _line(question: StreamQuestion, answer: Completion, score: float | None) -> str:
    """One line for people."""
    given = f"failed: {answer.error}" if answer.error else " ".join(answer.text.split())
    return f"[{'?' if score is None else format(score, 'g')}] {question.text} -> {given} (golden: {question.answer})"
