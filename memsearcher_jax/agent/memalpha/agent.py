"""Mem-alpha as an agent, and its rewards: questions about the memory are answered, and its calls are judged.

The trajectories are over when rewards begin. Answers and verdicts are generated in contexts of their own, which belong
to no trajectory and are not trained. A question without an answer, or a call without a verdict, enters no mean and is
counted; where nothing is left of a mean the reward is NaN, and that context is not trained.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from memsearcher_jax.agent.base import Complete, PromptTokenizer, ReadingAgent, Scoring
from memsearcher_jax.agent.memalpha.conversations import JUDGE_RULES, evidence_recall, judge_rule, question_types
from memsearcher_jax.agent.memalpha.memory import Memory, Store
from memsearcher_jax.agent.memalpha.prompts import MemalphaPrompts, load
from memsearcher_jax.agent.memalpha.reward import (
    after_thoughts,
    calls_reward,
    content_reward,
    needs_judge,
    parse_verdict,
    question_score,
    stream_reward,
)
from memsearcher_jax.agent.memalpha.tools import content_to_judge
from memsearcher_jax.agent.memalpha.view import EvidenceRetriever
from memsearcher_jax.agent.memalpha.workflow import StreamOutcome, memalpha
from memsearcher_jax.types import (
    Completion,
    FinishReason,
    Outcome,
    Problem,
    Prompt,
    ScoredTrajectory,
    StopReason,
    Stream,
    StreamQuestion,
    TokenCounter,
    Trajectory,
    Workflow,
)

CHUNK = 1_024  # prompts that exist at a time: each may be as long as a memory
MIN_PROMPTS = 16  # fewer may all fail by chance, so they do not end a run
DRAWS = {"answers": 0, "grades": 1, "verdicts": 2}

Verdict = bool | None  # None: the judge failed


@dataclass(frozen=True)
class Answered:
    """A question about a stream and its answer; without a score if the answerer or the judge failed."""

    question: StreamQuestion
    answer: Completion
    score: float | None
    error: str = ""

    def __str__(self) -> str:
        """One line for people."""
        given = f"failed: {self.answer.error}" if self.answer.error else " ".join(self.answer.text.split())
        score = "?" if self.score is None else f"{self.score:g}"
        return f"[{score}] {self.question.text} -> {given} (golden: {self.question.answer})"


class Memalpha(ReadingAgent):
    """The agent of Mem-alpha."""

    templates = "memalpha"
    keeps_memory = True
    rewards_per = "context"
    needs_completers = True
    synthetic_data = "streams"

    @property
    def untrainable(self) -> str:
        source = self.memalpha.answer_from
        return "" if source == "memory" else f"memalpha.answer_from {source} writes no memory, which would be trained"

    @cached_property
    def prompts(self) -> MemalphaPrompts:
        return load(self.config)

    @property
    def chunk_tokens(self) -> int:
        return self.memalpha.chunk_tokens

    def start(self, problem: Problem, token_counter: TokenCounter, memory: Memory | None = None) -> Workflow:
        settings = {"agent": self.config, "config": self.memalpha, "prompts": self.prompts}
        return memalpha(_stream(problem), **settings, token_counter=token_counter, initial=memory)

    def text_problem(self, chunks: Sequence[str], question: str) -> Problem:
        stream = Stream("files", tuple(chunks), (StreamQuestion(question, ""),))
        return replace(Problem.of_stream("asked", stream), question=question)

    def remembered(self, outcome: Outcome) -> Memory:
        return _read(outcome).memory

    def check(self) -> None:
        if self.memalpha.core_tokens >= self.config.memory_tokens:
            raise ValueError(
                f"memalpha.core_tokens {self.memalpha.core_tokens} is not below agent.memory_tokens "
                f"{self.config.memory_tokens}: a context shows the complete core and the latest items after it"
            )

    def check_problems(self, problems: Iterable[Problem], count: Callable[[str], int], *, has_judge: bool) -> None:
        sources = set()
        for problem in problems:
            if problem.stream is None:
                raise ValueError(
                    f"problem {problem.id!r} is not a stream: agent.workflow memalpha reads streams, the other "
                    "workflows read questions"
                )
            if not problem.stream.questions:
                raise ValueError(f"problem {problem.id!r} has no questions about its text: read it with memagent")
            sources.add(problem.stream.source)
            questions = [question.text for question in problem.stream.questions]
            for name, texts, limit, setting in (
                ("chunk", problem.stream.chunks, self.memalpha.chunk_tokens, "memalpha.chunk_tokens"),
                ("question", questions, self.config.question_tokens, "agent.question_tokens"),
            ):
                longest = max(map(count, texts))
                if longest > limit:
                    raise ValueError(
                        f'stream "{problem.id}" has a {name} of {longest} tokens and the budget is {limit}: raise '
                        f"{setting} (and what depends on it, such as sampling.context_tokens) or remove the stream"
                    )
        judged = sorted(source for source in sources if needs_judge(source, evaluation=True))
        if judged and not has_judge:
            raise ValueError(f"answers of {', '.join(judged)} are scored by a judge, and judge.backend is none: set it")

    def context_budget(self) -> dict[str, int]:
        return {
            "agent.memory_tokens": self.config.memory_tokens,
            "memalpha.chunk_tokens": self.memalpha.chunk_tokens,
            "agent.completion_tokens": self.config.completion_tokens,
        }

    def template_tokens(self, tokenizer: PromptTokenizer) -> int:
        return _tokens(tokenizer, self.prompts.chunk_prompt("", ""))

    def completer_tokens(self, tokenizer: PromptTokenizer, *, judge: bool) -> int:
        settings, config, prompts = self.memalpha, self.config, self.prompts
        # A source's prefix is joined to its questions by two line ends.
        prefix = max((tokenizer.count(text) + 2 for text in prompts.prefixes.values()), default=0)
        question = prefix + config.question_tokens
        needed = [_tokens(tokenizer, prompts.answer_prompt("", "")) + settings.answer_memory_tokens + question]
        if judge:
            # JSON's escapes may make a content longer than its completion; then it does not fit, fails, and is counted.
            judge_prompts = (prompts.judge_prompt(store, "") for store in Store)
            needed += [_tokens(tokenizer, prompt) + config.completion_tokens for prompt in judge_prompts]
            case = config.question_tokens + 2 * settings.answer_tokens  # with the golden answer and the given one
            rule = max(JUDGE_RULES.values(), key=len)
            needed.append(_tokens(tokenizer, prompts.grade_prompt("", "", "", rule)) + case)
        return max(needed) + settings.answer_tokens + 1

    def answer(self, pairs: Sequence[tuple[Memory, str]], scoring: Scoring) -> list[Completion]:
        asked = ((self._retriever(Stream("files", (), ()), memory, scoring), text) for memory, text in pairs)
        return self._answers(asked, scoring)

    def rewards(self, trajectories: Sequence[Trajectory], scoring: Scoring) -> list[ScoredTrajectory]:
        """One reward for each context. Without a judge the reward has no content term.

        A trajectory that did not reach the end of its stream has no reward. Two benchmarks are scored by other rules in
        evaluation.
        """
        complete = [one for one in trajectories if one.outcome.stop is StopReason.STREAM_READ]
        answered_RQ = self._answered(complete, scoring)
        scored = map(self._score, complete, answered_RQ, self._verdicts(complete, scoring))
        return [next(scored) if one.outcome.stop is StopReason.STREAM_READ else _unscored(one) for one in trajectories]

    def _retriever(self, stream: Stream, memory: Memory, scoring: Scoring) -> EvidenceRetriever:
        return EvidenceRetriever(stream, memory, self.memalpha, scoring.token_counter, self.prompts.tags)

    def _answers(self, asked: Iterable[tuple[EvidenceRetriever, str]], scoring: Scoring) -> list[Completion]:
        """The answers to questions, each from what is retrieved for it."""

        def prompt(retriever: EvidenceRetriever, question: str) -> Prompt:
            question = self.prompts.with_prefix(retriever.stream.source, question)
            return self.prompts.answer_prompt(retriever.retrieve(question), question)

        return _complete(scoring.answerer, itertools.starmap(prompt, asked), "answers", scoring)

    def _answered(self, trajectories: Sequence[Trajectory], scoring: Scoring) -> list[list[Answered]]:
        """The questions of each stream, answered from the memory that the trajectory wrote."""
        streams = [_stream(one.problem) for one in trajectories]
        retrievers = (self._retriever(_stream(one.problem), _read(one.outcome).memory, scoring) for one in trajectories)
        asked = ((retriever, question.text) for retriever in retrievers for question in retriever.stream.questions)
        answers = iter(self._answers(asked, scoring))
        cases = [(stream.source, question, next(answers)) for stream in streams for question in stream.questions]
        judged = [
            not answer.error and needs_judge(source, evaluation=scoring.evaluation) for source, _, answer in cases
        ]
        grade_prompts = itertools.starmap(self._grade_prompt, itertools.compress(cases, judged))
        grades = iter(_complete(scoring.judge, grade_prompts, "grades", scoring))

        def scored(source: str, question: StreamQuestion, answer: Completion, is_judged: bool) -> Answered:
            grade, error, score = next(grades) if is_judged else None, answer.error, None
            if grade and not _is_complete(grade):
                error = grade.error or "the judge's reply is empty or cut off: raise memalpha.answer_tokens"
            if not error:
                rule = {"evaluation": scoring.evaluation, "kind": question.kind}
                score = question_score(source, answer.text, question.answer, grade and grade.text, **rule)
            return Answered(question, answer, score, error)

        answered = (scored(*case, is_judged) for case, is_judged in zip(cases, judged, strict=True))
        return [list(itertools.islice(answered, len(stream.questions))) for stream in streams]

    def _grade_prompt(self, source: str, question: StreamQuestion, answer: Completion) -> Prompt:
        case = question.text, str(question.answer), after_thoughts(answer.text)
        return self.prompts.grade_prompt(*case, judge_rule(source, question.kind))

    def _verdicts(self, trajectories: Sequence[Trajectory], scoring: Scoring) -> list[list[list[Verdict]] | None]:
        """For each trajectory, chunk and call whether its content is valid; None without a judge."""
        if scoring.judge is None:
            return [None] * len(trajectories)
        contents_RC = [
            [list(map(content_to_judge, calls)) for calls in _read(one.outcome).calls_C] for one in trajectories
        ]
        judged = (content for contents_C in contents_RC for calls in contents_C for content in calls if content)
        prompts = itertools.starmap(self.prompts.judge_prompt, judged)
        completions = iter(_complete(scoring.judge, prompts, "verdicts", scoring))

        def verdict(content: object) -> Verdict:
            if not content:
                return False
            completion = next(completions)
            return parse_verdict(completion.text) if _is_complete(completion) else None

        return [[list(map(verdict, calls)) for calls in contents_C] for contents_C in contents_RC]

    def _score(
        self, trajectory: Trajectory, answered: Sequence[Answered], verdicts_C: Sequence[Sequence[Verdict]] | None
    ) -> ScoredTrajectory:
        outcome, settings = _read(trajectory.outcome), self.memalpha
        known = [one.score for one in answered if one.score is not None]
        counts = outcome.counts | {
            "questions": len(answered),
            "answers_failed": len(answered) - len(known),
            "verdicts_failed": sum(verdict is None for calls in verdicts_C or () for verdict in calls),
        }
        if settings.answer_from == "rag":  # it searches in the complete stream
            counts["memory_tokens"] = counts["stream_tokens"]
        elif settings.answer_from == "long_context":
            counts["memory_tokens"] = min(counts["stream_tokens"], settings.answer_memory_tokens)
        lines = "\n".join(map(str, answered))
        trajectory = replace(trajectory, outcome=replace(outcome, answer=lines, counts=counts))
        if not known:
            return _unscored(trajectory, f"no answer could be scored: {answered[0].error}")
        scores = {"accuracy": _mean(known), **_by_kind(_stream(trajectory.problem).source, answered)}
        if settings.answer_from != "memory":
            return ScoredTrajectory(trajectory, scores["accuracy"], "answered from the stream itself", scores)
        if evidence := [one.question.evidence for one in answered if one.question.evidence]:
            items = (*outcome.memory.semantic, *outcome.memory.episodic)
            text = "\n".join((str(outcome.memory.core), *(item.text for item in items)))
            scores["evidence_recall"] = _mean([evidence_recall(text, texts) for texts in evidence])
        calls_C = [calls_reward(results, settings.reward) for results in outcome.results_C]
        content_C = None if verdicts_C is None else [content_reward(calls) for calls in verdicts_C]
        sizes = {name: counts[name] for name in ("memory_tokens", "stream_tokens")}
        reward_C, r3 = stream_reward(known, **sizes, calls_C=calls_C, content_C=content_C, config=settings.reward)
        scores |= {"compression_reward": r3, "calls_reward": _mean(calls_C)}
        if content_C is not None:
            scores["content_reward"] = _mean(content_C)
        reason = " ".join(f"{name} {value:.3f}" for name, value in scores.items() if "/" not in name)
        return ScoredTrajectory(trajectory, _mean(reward_C), reason, scores, reward_C)


def _tokens(tokenizer: PromptTokenizer, prompt: Prompt) -> int:
    return sum(map(len, tokenizer.prompt(prompt)))


def _read(outcome: Outcome) -> StreamOutcome:
    assert isinstance(outcome, StreamOutcome), "the workflow ends with STREAM_READ"
    return outcome


def _stream(problem: Problem) -> Stream:
    assert problem.stream is not None, "`check_problems` refuses problems without a stream"
    return problem.stream


def _complete(complete: Complete | None, prompts: Iterator[Prompt], what: str, scoring: Scoring) -> list[Completion]:
    """Every completion, in order.

    Raises ConnectionError if all failed, and they are not only a few; in evaluation also if the service was down for
    one: a score of the others would be that of other questions.
    """
    completions: list[Completion] = []
    while chunk := list(itertools.islice(prompts, CHUNK)):
        if complete is None:
            raise ValueError(f"judge.backend is none and {what} are needed: set it to initial_policy or openai")
        completions += complete(chunk, DRAWS[what])
        scoring.notify(f"{len(completions)} {what}")
    errors = [one.error for one in completions if one.error]
    lost = scoring.evaluation and any(one.lost for one in completions)
    if lost or (len(completions) >= MIN_PROMPTS and len(errors) == len(completions)):
        raise ConnectionError(
            f"{len(errors)} of {len(completions)} {what} did not come; the last failure: {errors[-1]}"
        )
    return completions


def _is_complete(reply: Completion) -> bool:
    """Whether a judge has said something, and to its end. A draft in a thought is no verdict."""
    return reply.finish is not FinishReason.LENGTH and after_thoughts(reply.text).strip() not in ("", "Empty")


def _mean(values: Sequence[float]) -> float:
    """Mean of the values that are numbers; NaN where none is."""
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else math.nan


def _by_kind(source: str, answered: Sequence[Answered]) -> dict[str, float]:
    """The mean score of the data set, and by the kind of question where the data gives one."""
    scores = defaultdict[str, list[float]](list)
    for one in answered:
        if one.score is not None:
            kinds = (f"/{kind}" for kind in question_types(one.question.kind) if kind)
            for name in ("", *kinds):
                scores[f"accuracy/{source}{name}"].append(one.score)
    return {name: _mean(values) for name, values in sorted(scores.items())}


def _unscored(trajectory: Trajectory, reason: str = "") -> ScoredTrajectory:
    reason = reason or f"the stream was not read to its end: {trajectory.outcome.stop.value}"
    return ScoredTrajectory(trajectory, math.nan, reason, {}, (math.nan,) * len(trajectory.contexts))
