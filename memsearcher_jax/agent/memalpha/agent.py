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
    AnswerRule,
    after_thoughts,
    answer_rule,
    calls_reward,
    chosen_rules,
    content_reward,
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
class AnsweredQuestion:
    """A question about a stream of `source`, and what the answerer completed."""

    source: str
    question: StreamQuestion
    answer: Completion


@dataclass(frozen=True)
class JudgedCall:
    """A call whose content a judge is asked about, and where its verdict belongs."""

    store: Store
    content: str
    verdicts: list[Verdict]  # of the calls of its chunk
    position: int  # of this call among them


@dataclass(frozen=True)
class ScoredQuestion:
    """A question about a stream and its answer; without a score if the answerer or the judge failed."""

    asked: StreamQuestion
    answer: Completion
    score: float | None
    error: str = ""

    def __str__(self) -> str:
        """One line for people."""
        given = f"failed: {self.answer.error}" if self.answer.error else " ".join(self.answer.text.split())
        score = "?" if self.score is None else f"{self.score:g}"
        return f"[{score}] {self.asked.text} -> {given} (golden: {self.asked.answer})"


class Memalpha(ReadingAgent):
    """The agent of Mem-alpha."""

    templates = "memalpha"
    keeps_memory = True
    kinds = frozenset(("memory",))
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
        return memalpha(
            _stream(problem),
            agent=self.config,
            config=self.memalpha,
            prompts=self.prompts,
            token_counter=token_counter,
            initial=memory,
        )

    def text_problem(self, chunks: Sequence[str], question: str) -> Problem:
        stream = Stream("files", tuple(chunks), (StreamQuestion(question, ""),))
        return replace(Problem.of_stream("asked", stream), question=question)

    def remembered(self, outcome: Outcome) -> Memory:
        return _read(outcome).memory

    def check(self) -> None:
        chosen_rules(self.memalpha.answer_rules)
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
            longest_question = max(map(count, questions))
            longest_chunk = max(map(count, problem.stream.chunks))
            if longest_chunk > self.memalpha.chunk_tokens:
                raise _over_budget(problem, "chunk", longest_chunk, "memalpha.chunk_tokens", self.memalpha.chunk_tokens)
            if longest_question > self.config.question_tokens:
                raise _over_budget(
                    problem, "question", longest_question, "agent.question_tokens", self.config.question_tokens
                )
        judged = [source for source in sorted(sources) if self._rule(source, evaluation=True) is AnswerRule.JUDGE]
        if judged and not has_judge:
            raise ValueError(f"answers of {', '.join(judged)} are scored by a judge, and judge.backend is none: set it")

    def scored_by(self, problems: Iterable[Problem]) -> dict[str, str]:
        sources = sorted({_stream(problem).source for problem in problems})
        rules = {source: self._rule(source, evaluation=True) for source in sources}
        return {source: f"{rule.value}: {rule.description}" for source, rule in rules.items()}

    @cached_property
    def _chosen_rules(self) -> dict[str, AnswerRule]:
        return chosen_rules(self.memalpha.answer_rules)

    def _rule(self, source: str, *, evaluation: bool) -> AnswerRule:
        return answer_rule(source, self._chosen_rules, evaluation=evaluation)

    def context_budget(self) -> dict[str, int]:
        return {
            "agent.memory_tokens": self.config.memory_tokens,
            "memalpha.chunk_tokens": self.memalpha.chunk_tokens,
            "agent.completion_tokens": self.config.completion_tokens,
        }

    def template_tokens(self, tokenizer: PromptTokenizer) -> int:
        return _tokens(tokenizer, self.prompts.chunk_prompt("", ""))

    def completer_tokens(self, tokenizer: PromptTokenizer, *, judge: bool) -> int:
        prompts = self.prompts
        answer_tokens = self.memalpha.answer_tokens
        # A source's prefix is joined to its questions by two line ends.
        prefix = max((tokenizer.count(text) + 2 for text in prompts.prefixes.values()), default=0)
        question = prefix + self.config.question_tokens
        memory = self.memalpha.answer_memory_tokens
        needed = [_tokens(tokenizer, prompts.answer_prompt("", "")) + memory + question]
        if judge:
            # JSON's escapes may make a content longer than its completion; then it does not fit, fails, and is counted.
            content = self.config.completion_tokens
            needed += [_tokens(tokenizer, prompts.judge_prompt(store, "")) + content for store in Store]
            longest_rule = max(JUDGE_RULES.values(), key=len)
            case = self.config.question_tokens + 2 * answer_tokens  # with the golden answer and the given one
            needed.append(_tokens(tokenizer, prompts.grade_prompt("", "", "", longest_rule)) + case)
        return max(needed) + answer_tokens + 1

    def answer(self, pairs: Sequence[tuple[Memory, str]], scoring: Scoring) -> list[Completion]:
        no_stream = Stream("files", (), ())
        prompts = (self._answer_prompt(self._retriever(no_stream, memory, scoring), text) for memory, text in pairs)
        return _complete(scoring.answerer, prompts, "answers", scoring)

    def rewards(self, trajectories: Sequence[Trajectory], scoring: Scoring) -> list[ScoredTrajectory]:
        """One reward for each context. Without a judge the reward has no content term.

        A trajectory that did not reach the end of its stream has no reward. Two benchmarks are scored by other rules in
        evaluation.
        """
        read_to_end = [
            position
            for position, trajectory in enumerate(trajectories)
            if trajectory.outcome.stop is StopReason.STREAM_READ
        ]
        complete = [trajectories[position] for position in read_to_end]
        questions_RQ = self._scored_questions(complete, scoring)
        verdicts_RC = self._verdicts(complete, scoring)
        scored: dict[int, ScoredTrajectory] = {}
        for position, questions_Q, verdicts_C in zip(read_to_end, questions_RQ, verdicts_RC, strict=True):
            scored[position] = self._score(trajectories[position], questions_Q, verdicts_C)
        return [scored.get(position) or _unscored(trajectory) for position, trajectory in enumerate(trajectories)]

    def _retriever(self, stream: Stream, memory: Memory, scoring: Scoring) -> EvidenceRetriever:
        return EvidenceRetriever(stream, memory, self.memalpha, scoring.token_counter, self.prompts.tags)

    def _answer_prompt(self, retriever: EvidenceRetriever, question: str) -> Prompt:
        """Asks a question, with what is retrieved for it."""
        question = self.prompts.with_prefix(retriever.stream.source, question)
        return self.prompts.answer_prompt(retriever.retrieve(question), question)

    def _scored_questions(self, trajectories: Sequence[Trajectory], scoring: Scoring) -> list[list[ScoredQuestion]]:
        """The questions of each stream, answered from the memory that the trajectory wrote, and scored."""
        answered_RQ = self._answered_questions(trajectories, scoring)
        answered = [question for answered_Q in answered_RQ for question in answered_Q]
        grades = self._grades(answered, scoring)
        scored = [self._score_question(case, grade, scoring) for case, grade in zip(answered, grades, strict=True)]
        scored_RQ: list[list[ScoredQuestion]] = []
        first = 0
        for answered_Q in answered_RQ:
            scored_RQ.append(scored[first : first + len(answered_Q)])
            first += len(answered_Q)
        return scored_RQ

    def _answered_questions(self, trajectories: Sequence[Trajectory], scoring: Scoring) -> list[list[AnsweredQuestion]]:
        def prompts() -> Iterator[Prompt]:
            for trajectory in trajectories:
                stream = _stream(trajectory.problem)
                retriever = self._retriever(stream, _read(trajectory.outcome).memory, scoring)
                for question in stream.questions:
                    yield self._answer_prompt(retriever, question.text)

        answers = _complete(scoring.answerer, prompts(), "answers", scoring)
        answered_RQ: list[list[AnsweredQuestion]] = []
        first = 0
        for trajectory in trajectories:
            stream = _stream(trajectory.problem)
            answers_Q = answers[first : first + len(stream.questions)]
            first += len(stream.questions)
            pairs = zip(stream.questions, answers_Q, strict=True)
            answered_RQ.append([AnsweredQuestion(stream.source, question, answer) for question, answer in pairs])
        return answered_RQ

    def _grades(self, answered: Sequence[AnsweredQuestion], scoring: Scoring) -> list[Completion | None]:
        """The judge's reply on each answer; None for one that no judge scores, or that failed."""
        judged = []
        for position, case in enumerate(answered):
            rule = self._rule(case.source, evaluation=scoring.evaluation)
            if rule is AnswerRule.JUDGE and not case.answer.error:
                judged.append(position)
        prompts = (self._grade_prompt(answered[position]) for position in judged)
        replies = _complete(scoring.judge, prompts, "grades", scoring)
        reply_at = dict(zip(judged, replies, strict=True))
        return [reply_at.get(position) for position in range(len(answered))]

    def _grade_prompt(self, case: AnsweredQuestion) -> Prompt:
        question = case.question
        rule = judge_rule(case.source, question.kind)
        return self.prompts.grade_prompt(question.text, str(question.answer), after_thoughts(case.answer.text), rule)

    def _score_question(self, case: AnsweredQuestion, grade: Completion | None, scoring: Scoring) -> ScoredQuestion:
        """The score of an answer by the rule of its source; none if the answerer or the judge failed."""
        error = case.answer.error
        if grade and not _is_complete(grade):
            error = grade.error or "the judge's reply is empty or cut off: raise memalpha.answer_tokens"
        if error:
            return ScoredQuestion(case.question, case.answer, None, error)
        score = question_score(
            case.source,
            case.answer.text,
            case.question.answer,
            grade.text if grade else None,
            evaluation=scoring.evaluation,
            kind=case.question.kind,
            chosen=self._chosen_rules,
        )
        return ScoredQuestion(case.question, case.answer, score)

    def _verdicts(self, trajectories: Sequence[Trajectory], scoring: Scoring) -> list[list[list[Verdict]] | None]:
        """For each trajectory, chunk and call whether its content is valid; None without a judge."""
        if scoring.judge is None:
            return [None] * len(trajectories)
        verdicts_RC: list[list[list[Verdict]] | None] = []
        judged: list[JudgedCall] = []
        for trajectory in trajectories:
            verdicts_C: list[list[Verdict]] = []
            for calls in _read(trajectory.outcome).calls_C:
                verdicts: list[Verdict] = [False] * len(calls)  # of a call without content to judge
                for position, call in enumerate(calls):
                    if to_judge := content_to_judge(call):
                        judged.append(JudgedCall(*to_judge, verdicts, position))
                verdicts_C.append(verdicts)
            verdicts_RC.append(verdicts_C)
        prompts = (self.prompts.judge_prompt(call.store, call.content) for call in judged)
        replies = _complete(scoring.judge, prompts, "verdicts", scoring)
        for call, reply in zip(judged, replies, strict=True):
            call.verdicts[call.position] = parse_verdict(reply.text) if _is_complete(reply) else None
        return verdicts_RC

    def _score(
        self,
        trajectory: Trajectory,
        questions: Sequence[ScoredQuestion],
        verdicts_C: Sequence[Sequence[Verdict]] | None,
    ) -> ScoredTrajectory:
        settings = self.memalpha
        outcome = _read(trajectory.outcome)
        known = [question.score for question in questions if question.score is not None]
        counts = outcome.counts | {
            "questions": len(questions),
            "answers_failed": len(questions) - len(known),
            "verdicts_failed": sum(verdict is None for calls in verdicts_C or () for verdict in calls),
        }
        if settings.answer_from == "rag":  # it searches in the complete stream
            counts["memory_tokens"] = counts["stream_tokens"]
        elif settings.answer_from == "long_context":
            counts["memory_tokens"] = min(counts["stream_tokens"], settings.answer_memory_tokens)
        lines = "\n".join(map(str, questions))
        trajectory = replace(trajectory, outcome=replace(outcome, answer=lines, counts=counts))
        if not known:
            return _unscored(trajectory, f"no answer could be scored: {questions[0].error}")
        scores = {"accuracy": _mean(known), **_by_kind(_stream(trajectory.problem).source, questions)}
        if settings.answer_from != "memory":
            return ScoredTrajectory(trajectory, scores["accuracy"], "answered from the stream itself", scores)
        evidence = [question.asked.evidence for question in questions if question.asked.evidence]
        if evidence:
            text = _memory_text(outcome.memory)
            scores["evidence_recall"] = _mean([evidence_recall(text, texts) for texts in evidence])
        calls_C = [calls_reward(results, settings.reward) for results in outcome.results_C]
        content_C = None if verdicts_C is None else [content_reward(verdicts) for verdicts in verdicts_C]
        reward_C, compression = stream_reward(
            known,
            memory_tokens=counts["memory_tokens"],
            stream_tokens=counts["stream_tokens"],
            calls_C=calls_C,
            content_C=content_C,
            config=settings.reward,
        )
        scores |= {"compression_reward": compression, "calls_reward": _mean(calls_C)}
        if content_C is not None:
            scores["content_reward"] = _mean(content_C)
        reason = " ".join(f"{name} {value:.3f}" for name, value in scores.items() if "/" not in name)
        return ScoredTrajectory(trajectory, _mean(reward_C), reason, scores, reward_C)


def _memory_text(memory: Memory) -> str:
    return "\n".join((str(memory.core), *(item.text for item in (*memory.semantic, *memory.episodic))))


def _over_budget(problem: Problem, what: str, tokens: int, setting: str, budget: int) -> ValueError:
    return ValueError(
        f'stream "{problem.id}" has a {what} of {tokens} tokens and the budget is {budget}: raise {setting} (and what '
        "depends on it, such as sampling.context_tokens) or remove the stream"
    )


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
    errors = [completion.error for completion in completions if completion.error]
    lost_in_evaluation = scoring.evaluation and any(completion.lost for completion in completions)
    all_failed = len(completions) >= MIN_PROMPTS and len(errors) == len(completions)
    if lost_in_evaluation or all_failed:
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


def _by_kind(source: str, questions: Sequence[ScoredQuestion]) -> dict[str, float]:
    """The mean score of the data set, and by the kind of question where the data gives one."""
    scores = defaultdict[str, list[float]](list)
    for question in questions:
        if question.score is None:
            continue
        scores[f"accuracy/{source}"].append(question.score)
        for kind in filter(None, question_types(question.asked.kind)):
            scores[f"accuracy/{source}/{kind}"].append(question.score)
    return {name: _mean(values) for name, values in sorted(scores.items())}


def _unscored(trajectory: Trajectory, reason: str = "") -> ScoredTrajectory:
    reason = reason or f"the stream was not read to its end: {trajectory.outcome.stop.value}"
    return ScoredTrajectory(trajectory, math.nan, reason, {}, (math.nan,) * len(trajectory.contexts))
