"""What a memory is worth: its questions are answered, its calls judged, and every chunk gets its reward.

The trajectories are over when this begins. Whoever answers reads the memory in contexts of its own, which no trajectory
holds and nobody trains. A question without an answer, or a call without a verdict, enters no mean and is counted; where
nothing is left of a mean there is no reward, which is NaN: such a context is not trained.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from memsearcher_jax.agent.memalpha_config import MemalphaConfig
from memsearcher_jax.agent.memalpha_judge import judged_content, read_verdict
from memsearcher_jax.agent.memalpha_prompts import MemalphaPrompts
from memsearcher_jax.agent.memalpha_reward import (
    calls_reward,
    content_reward,
    needs_judge,
    question_score,
    stream_reward,
)
from memsearcher_jax.agent.memalpha_view import Reader
from memsearcher_jax.agent.types import Prompt, Ruler, Stop, Stream, StreamQuestion, Trajectory
from memsearcher_jax.report.names import Name
from memsearcher_jax.report.page_facts import Facts
from memsearcher_jax.report.trajectories import Scored
from memsearcher_jax.rl.score import effort
from memsearcher_jax.rl.speakers import Said, Speaker

PART = 1_024  # prompts that exist at one time: each may be as long as a memory

Verdict = bool | None  # None: the judge failed


@dataclass(frozen=True)
class Exam:
    """Scores of trajectories that have read a stream. Without a `judge` the reward has no content term."""

    config: MemalphaConfig
    prompts: MemalphaPrompts
    ruler: Ruler
    answerer: Speaker
    judge: Speaker | None
    evaluation: bool = False  # two benchmarks are scored otherwise in evaluation

    def grade(self, trajectories: Sequence[Trajectory], key: jax.Array, tell: Callable[[str], None]) -> list[Scored]:
        """One `Scored` for each trajectory, in order, with one reward for each of its contexts.

        `tell` hears how far it is. Raises ConnectionError if nobody answers or judges at all: there would be nothing
        to learn from. A trajectory that did not come to the end of its stream has no reward.
        """
        read = [one for one in trajectories if one.outcome.stop is Stop.REMEMBERED]
        answers_RQ = self._answers(read, jax.random.fold_in(key, 0), tell)
        replies_RQ = self._grades(read, answers_RQ, jax.random.fold_in(key, 1), tell)
        verdicts_RC = self._verdicts(read, jax.random.fold_in(key, 2), tell)
        graded = iter([self._scored(*one) for one in zip(read, answers_RQ, replies_RQ, verdicts_RC, strict=True)])
        return [next(graded) if one.outcome.stop is Stop.REMEMBERED else _unscored(one) for one in trajectories]

    def _answers(self, read: Sequence[Trajectory], key: jax.Array, tell: Callable[[str], None]) -> list[list[Said]]:
        def prompts() -> Iterator[Prompt]:
            for trajectory in read:
                stream = Stream.of(trajectory.problem)
                reader = Reader(stream, trajectory.outcome.memory, self.config, self.ruler)
                for question in stream.questions:
                    asked = self.prompts.asked(stream.source, question.text)
                    yield self.prompts.answer(reader.about(asked), asked)

        said = iter(_ask(self.answerer, prompts(), key, tell, "answers"))
        return [list(itertools.islice(said, len(Stream.of(one.problem).questions))) for one in read]

    def _grades(
        self,
        read: Sequence[Trajectory],
        answers_RQ: Sequence[Sequence[Said]],
        key: jax.Array,
        tell: Callable[[str], None],
    ) -> list[list[Said]]:
        """What the judge says of the answers, for the sources that are scored so; empty lists for the others."""

        def graded(trajectory: Trajectory) -> bool:
            return needs_judge(Stream.of(trajectory.problem).source, evaluation=self.evaluation)

        def prompts() -> Iterator[Prompt]:
            for trajectory, answers in zip(read, answers_RQ, strict=True):
                if graded(trajectory):
                    for question, answer in zip(Stream.of(trajectory.problem).questions, answers, strict=True):
                        yield self.prompts.grade(question.text, str(question.answer), answer.text)

        replies = _ask(self.judge, prompts(), key, tell, "grades") if any(map(graded, read)) else []
        said = iter([one if one.text.strip() else Said(error=one.error or "the judge said nothing") for one in replies])
        return [
            list(itertools.islice(said, len(answers))) if graded(trajectory) else [Said()] * len(answers)
            for trajectory, answers in zip(read, answers_RQ, strict=True)
        ]

    def _verdicts(
        self, read: Sequence[Trajectory], key: jax.Array, tell: Callable[[str], None]
    ) -> list[list[list[Verdict]] | None]:
        """For each trajectory, chunk and call whether its content is valid; None without a judge."""
        if self.judge is None:
            return [None] * len(read)
        contents = [
            [[judged_content(call) for call in calls] for calls in trajectory.outcome.calls_C] for trajectory in read
        ]
        looked_at = [content for chunks in contents for calls in chunks for content in calls if content]
        prompts = (self.prompts.judge(*content) for content in looked_at)
        said = iter(_ask(self.judge, prompts, key, tell, "verdicts"))

        def verdict(content: object) -> Verdict:
            if not content:
                return False
            reply = next(said)
            return None if reply.error else read_verdict(reply.text)

        return [[[verdict(content) for content in calls] for calls in chunks] for chunks in contents]

    def _scored(
        self,
        trajectory: Trajectory,
        answers: Sequence[Said],
        replies: Sequence[Said],
        verdicts_C: Sequence[Sequence[Verdict]] | None,
    ) -> Scored:
        outcome, stream = trajectory.outcome, Stream.of(trajectory.problem)
        score_Q = [
            None
            if answer.error or reply.error
            else question_score(
                stream.source, answer.text, question.answer, reply.text or None, evaluation=self.evaluation
            )
            for question, answer, reply in zip(stream.questions, answers, replies, strict=True)
        ]
        known = [score for score in score_Q if score is not None]
        counts = {
            "questions": len(score_Q),
            "answers_failed": len(score_Q) - len(known),
            "verdicts_failed": sum(verdict is None for calls in verdicts_C or () for verdict in calls),
        }
        if self.config.reader != "memory":
            counts["memory_tokens"] = self._kept(outcome.counts["stream_tokens"])
        told = "\n".join(_told(*one) for one in zip(stream.questions, answers, score_Q, strict=True))
        graded = replace(trajectory, outcome=replace(outcome, answer=told, counts=outcome.counts | counts))
        if not known:
            failed = next(said.error for said in (*answers, *replies) if said.error)
            return _unscored(graded, f"no answer could be scored: {failed}")
        scores = {"accuracy": float(np.mean(known)), **_by_kind(stream, score_Q)}
        if self.config.reader != "memory":
            return Scored(graded, scores["accuracy"], "answered from the stream itself", scores)
        reward = stream_reward(
            known,
            memory_tokens=outcome.counts["memory_tokens"],
            stream_tokens=outcome.counts["stream_tokens"],
            calls_C=[calls_reward(results, self.config.reward) for results in outcome.results_C],
            content_C=None if verdicts_C is None else [_content(calls) for calls in verdicts_C],
            config=self.config.reward,
        )
        scores |= {"compression": reward.compression, "calls_reward": float(np.mean(reward.calls_C))}
        if reward.content_C is not None:
            scores["content_reward"] = _mean(reward.content_C)
        parts = " ".join(f"{name} {value:.3f}" for name, value in scores.items() if "/" not in name)
        return Scored(graded, _mean(reward.value_C), parts, scores, reward.value_C)

    def _kept(self, stream_tokens: int) -> int:
        """What the baselines have to keep of a stream: its end, or all of it to search in."""
        if self.config.reader == "rag":
            return stream_tokens
        return min(stream_tokens, self.config.answer_memory_tokens)


def _ask(
    speaker: Speaker, prompts: Iterator[Prompt], key: jax.Array, tell: Callable[[str], None], what: str
) -> list[Said]:
    """Every reply, in order. Raises ConnectionError if a whole part of them failed."""
    said: list[Said] = []
    while part := list(itertools.islice(prompts, PART)):
        replies = speaker.say(part, jax.random.fold_in(key, len(said)))
        if all(reply.error for reply in replies):
            raise ConnectionError(f"none of {len(replies)} {what} came; the last failure: {replies[-1].error}")
        said += replies
        tell(f"{len(said)} {what}")
    return said


def _content(verdicts: Sequence[Verdict]) -> float:
    """r4 over the calls that have a verdict; NaN where there were calls and all verdicts failed."""
    known = [verdict for verdict in verdicts if verdict is not None]
    return math.nan if verdicts and not known else content_reward(known)


def _by_kind(stream: Stream, score_Q: Sequence[float | None]) -> dict[str, float]:
    """The mean score by the data set, and by the kind of question where the data tells it."""
    held: dict[str, list[float]] = {}
    for question, score in zip(stream.questions, score_Q, strict=True):
        if score is not None:
            held.setdefault(f"accuracy/{stream.source}", []).append(score)
            if question.kind:
                held.setdefault(f"accuracy/{stream.source}/{question.kind}", []).append(score)
    return {name: float(np.mean(scores)) for name, scores in sorted(held.items())}


def _unscored(trajectory: Trajectory, reason: str = "") -> Scored:
    reason = reason or f"the stream was not read to its end: {trajectory.outcome.stop.value}"
    return Scored(trajectory, math.nan, reason, {}, (math.nan,) * len(trajectory.contexts))


def _told(question: StreamQuestion, answer: Said, score: float | None) -> str:
    """One line for people."""
    given = f"failed: {answer.error}" if answer.error else " ".join(answer.text.split())
    return f"[{'?' if score is None else format(score, 'g')}] {question.text} -> {given} (golden: {question.answer})"


def _mean(values: Sequence[float]) -> float:
    """Of those that are numbers; NaN where none is."""
    known = [value for value in values if not math.isnan(value)]
    return float(np.mean(known)) if known else math.nan


def summarise_facts(batch: Sequence[Facts]) -> dict[str, float]:
    """Means over the streams that have a number; `stop/` and `unscored` are shares of the trajectories.

    Operations and tokens (the policy's) are counts per stream; `calls_ok_share` is over all calls.
    """
    names = sorted({name for one in batch for name in one.scores})
    calls, worked = (sum(one.counts.get(name, 0) for one in batch) for name in ("calls", "calls_ok"))
    return {
        Name.REWARD: _mean([one.reward for one in batch]),
        **{name: _mean([one.scores.get(name, math.nan) for one in batch]) for name in names},
        **effort(batch),
        "calls_ok_share": worked / calls if calls else 0.0,
        "unscored": _mean([float(math.isnan(one.reward)) for one in batch]),
    }
