"""Rewards of Mem-alpha per chunk from answers and verdicts; failed requests give no reward instead of zero."""

import json
import math
from dataclasses import replace

import pytest

from memsearcher_jax.agent.base import Scoring
from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.agent.memalpha import agent as memalpha_agent
from memsearcher_jax.agent.memalpha.agent import Memalpha
from memsearcher_jax.agent.memalpha.config import MemalphaConfig
from memsearcher_jax.agent.run import run_workflow
from memsearcher_jax.logs.trajectories import summarize_trajectory
from memsearcher_jax.rl.advantages import mixed_groups, multi_context_advantages
from memsearcher_jax.rl.config import RLConfig
from memsearcher_jax.rl.metrics import trajectory_metrics
from memsearcher_jax.types import (
    Completion,
    Context,
    FinishReason,
    Outcome,
    Problem,
    StopReason,
    Stream,
    StreamQuestion,
    Trajectory,
)
from tests.support import byte_tokenizer

AGENT = AgentConfig(workflow="memalpha", memory_tokens=2_000)
CONFIG = MemalphaConfig()
TOKEN_COUNTER = byte_tokenizer()
STREAM = Stream(
    "generated",
    ("Ann works for Belkan Mills. It rained all day long, and all night.", "Bob lives in Kelford, a town by the sea."),
    (
        StreamQuestion("Who does Ann work for?", "Belkan Mills", "person"),
        StreamQuestion("Where is Bob?", "Kelford", "town"),
    ),
)


def insert(content, store="semantic_memory"):
    arguments = json.dumps({"memory_type": store, "content": content})
    return f"✿FUNCTION✿: new_memory_insert\n✿ARGS✿: {arguments}\n"


def trajectory(*replies, stream=STREAM, config=CONFIG):
    """The trajectory of the workflow when the policy gives these replies."""
    waiting = iter(replies)
    problem = Problem.of_stream("s", stream)
    workflow = Memalpha(AGENT, memalpha=config).start(problem, TOKEN_COUNTER)
    outcome = run_workflow(workflow, lambda request: next(waiting), None)
    context = Context((1, 2), (0.0, -0.5), (False, True))
    return Trajectory(problem, 0, outcome, (context,) * len(outcome.turns), "")


def completions(*replies):
    return [reply if isinstance(reply, Completion) else Completion(reply) for reply in replies]


class ReadingAnswerer:
    """Answers with its complete prompt; fails at prompts with a word of `failing`."""

    def __init__(self, *failing):
        self.failing, self.prompts = failing, []

    def __call__(self, prompts, draws):
        self.prompts += prompts
        texts = [prompt["memory"] + prompt["question"] for prompt in prompts]
        return [
            Completion(error="no luck") if any(word in text for word in self.failing) else Completion(text)
            for text in texts
        ]


class Judge:
    """Replies `replies[word]` to prompts with the word, and VALID to all others."""

    def __init__(self, **replies):
        self.replies, self.prompts = replies, []

    def __call__(self, prompts, draws):
        self.prompts += prompts
        valid = Completion('```json\n{"VALID": true}\n```')
        return [
            next((reply for word, reply in self.replies.items() if word in str(prompt)), valid) for prompt in prompts
        ]


def score(*trajectories, answerer=None, judge=None, config=CONFIG, evaluation=False):
    scoring = Scoring(TOKEN_COUNTER, answerer or ReadingAnswerer(), judge, evaluation=evaluation)
    return Memalpha(AGENT, memalpha=config).rewards(trajectories, scoring)


def metrics_of(batch):
    return trajectory_metrics(list(map(summarize_trajectory, batch)), Memalpha(AGENT))


def test_rewards_of_a_stream_by_hand():
    (scored,) = score(trajectory(*completions(insert("Ann: Belkan Mills"), insert("x", "core_memory"))), judge=Judge())
    memory, stream = TOKEN_COUNTER.count("Ann: Belkan Mills"), sum(map(TOKEN_COUNTER.count, STREAM.chunks))
    shared = 0.5 + 0.05 * (1 - memory / stream)
    assert scored.context_rewards == pytest.approx((shared + 1 + 0.1, shared + 0 + 0.1))
    assert scored.reward == pytest.approx(sum(scored.context_rewards) / 2)
    assert scored.scores == pytest.approx(
        {
            "accuracy": 0.5,
            "accuracy/generated": 0.5,
            "accuracy/generated/person": 1.0,
            "accuracy/generated/town": 0.0,
            "compression_reward": 1 - memory / stream,
            "calls_reward": 0.5,
            "content_reward": 1.0,
        }
    )
    assert scored.trajectory.outcome.answer.startswith(
        "[1] Who does Ann work for? -> semantic memory: 1. Ann: Belkan Mills"
    )
    assert scored.trajectory.outcome.counts["questions"] == 2


def test_a_failed_answer_is_counted_and_excluded_from_means():
    (scored,) = score(
        trajectory(*completions(insert("Ann: Belkan Mills"), "Done")), answerer=ReadingAnswerer("Where is Bob?")
    )
    assert scored.scores["accuracy"] == 1.0 and "accuracy/generated/town" not in scored.scores
    assert scored.trajectory.outcome.counts["answers_failed"] == 1
    assert "[?] Where is Bob? -> failed: no luck" in scored.trajectory.outcome.answer


def test_a_trajectory_without_answers_has_no_reward_and_is_not_trained():
    poor, rich = trajectory(*completions("Done", insert("Kelford"))), trajectory(*completions(insert("Mills"), "Done"))
    batch = score(poor, rich, answerer=ReadingAnswerer("Kelford"))
    assert math.isnan(batch[0].reward) and all(map(math.isnan, batch[0].context_rewards))
    assert batch[0].reason == "no answer could be scored: no luck"
    assert batch[0].trajectory.outcome.counts["answers_failed"] == 2
    for baseline in ("pooled", "position", "trajectory"):
        assert len(multi_context_advantages(batch, [0, 0], RLConfig(advantage_scope=baseline))) == 2
    summary = metrics_of(batch)
    assert (summary["unscored"], summary["accuracy"], summary["answers_failed"]) == (
        0.5,
        batch[1].scores["accuracy"],
        1.0,
    )
    assert mixed_groups([scored.reward for scored in batch], [0, 0]) == [False]


def test_an_unavailable_answerer_ends_the_run():
    with pytest.raises(ConnectionError, match="16 of 16 answers did not come; the last failure: no luck"):
        score(*[trajectory(*completions("Done", "Done"))] * 8, answerer=ReadingAnswerer("?"))
    (scored,) = score(trajectory(*completions("Done", "Done")), answerer=ReadingAnswerer("?"))
    assert math.isnan(scored.reward)
    with pytest.raises(ConnectionError, match="1 of 2 answers did not come"):  # the others' score is of other questions
        lost = completions("x", Completion(error="down", lost=True))
        score(trajectory(*completions("Done", "Done")), answerer=lambda prompts, draws: lost, evaluation=True)


def test_a_failure_at_the_end_of_many_prompts_does_not_end_the_run(monkeypatch):
    """The last chunk holds one prompt, and that fails."""
    monkeypatch.setattr(memalpha_agent, "CHUNK", 3)
    last = replace(STREAM, questions=(*STREAM.questions, StreamQuestion("Why?", "no reason")))
    read = [trajectory(*completions("Done", "Done"))] * 8 + [trajectory(*completions("Done", "Done"), stream=last)]
    batch = score(*read, answerer=ReadingAnswerer("Why?"))
    assert [one.trajectory.outcome.counts["answers_failed"] for one in batch] == [0] * 8 + [1]


def test_a_failed_verdict_is_counted_and_excluded_from_means():
    judge = Judge(
        broken=Completion(error="down"),
        odd=Completion('Maybe ```json\n{"VALID": true}\n```?', FinishReason.LENGTH),
        bad=Completion('```json\n{"VALID": false}\n```'),
    )
    first = insert("fine") + insert("broken") + insert("odd") + insert("bad")
    (scored,) = score(trajectory(*completions(first, insert("broken again"))), judge=judge)
    assert scored.scores["content_reward"] == 0.5, "first chunk: one valid and one invalid verdict, two failed verdicts"
    assert scored.trajectory.outcome.counts["verdicts_failed"] == 3
    assert not math.isnan(scored.context_rewards[0]) and math.isnan(scored.context_rewards[1])
    assert len(multi_context_advantages([scored], [0], RLConfig(advantage_scope="pooled"))) == 1


def test_a_judge_scores_the_answers_of_some_sources():
    stream = replace(STREAM, source="lme_train")
    judge = Judge(Bob=Completion("No."), Ann=Completion("Yes, it is."))
    (scored,) = score(trajectory(*completions("Done", "Done"), stream=stream), judge=judge)
    assert scored.scores["accuracy"] == 0.5 and scored.scores["accuracy/lme_train/person"] == 1.0
    for failing in (
        Judge(Bob=Completion(error="down"), Ann=Completion("yes")),
        Judge(Bob=Completion(" "), Ann=Completion("yes")),
        Judge(Bob=Completion("<think>Is it yes?"), Ann=Completion("<think>No?</think>yes")),
        Judge(Bob=Completion("Is it yes", FinishReason.LENGTH), Ann=Completion("yes")),
    ):
        (scored,) = score(trajectory(*completions("Done", "Done"), stream=stream), judge=failing)
        assert (scored.scores["accuracy"], scored.trajectory.outcome.counts["answers_failed"]) == (1.0, 1)
    judge = Judge(Ann=Completion("yes"))
    read = trajectory(*completions("Done", "Done"), stream=stream)
    (scored,) = score(read, answerer=ReadingAnswerer("Where is Bob?"), judge=judge)
    assert (scored.scores["accuracy"], len(judge.prompts)) == (1.0, 1), "no answer, nothing to judge"
    score(read, answerer=lambda prompts, draws: completions(*["<think>Hm.</think>At sea."] * 2), judge=judge)
    assert "At sea." in str(judge.prompts[-1]) and "Hm." not in str(judge.prompts[-1])


def test_a_partly_read_stream_has_no_reward():
    stopped = trajectory(Completion(insert("Mills")), Completion("", FinishReason.CONTEXT_FULL))
    fault = replace(stopped, outcome=Outcome(StopReason.FAULT, error="ValueError: no"), contexts=())
    batch = score(stopped, trajectory(*completions("Done", "Done")), fault)
    assert [math.isnan(scored.reward) for scored in batch] == [True, False, True]
    assert batch[0].reason == "the stream was not read to its end: context_full"
    assert [len(scored.context_rewards) for scored in batch] == [1, 2, 0]
    summary = metrics_of(batch)
    assert summary["stop/fault"] == pytest.approx(1 / 3) and summary["unscored"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("reader", ["long_context", "rag"])
def test_readers_without_memory_are_rewarded_for_accuracy_only(reader):
    config = replace(CONFIG, answer_from=reader)
    stream = replace(STREAM, questions=tuple(replace(one, evidence=STREAM.chunks) for one in STREAM.questions))
    (scored,) = score(trajectory(config=config, stream=stream), config=config)
    assert scored.scores["accuracy"] == 1.0 == scored.reward
    assert scored.context_rewards == () and scored.scores.keys().isdisjoint({"compression_reward", "evidence_recall"})


def test_an_evaluation_says_by_which_rule_the_answers_of_each_source_are_scored():
    problems = [Problem.of_stream("s", replace(STREAM, source=source)) for source in ("news_articles", "squad", "mine")]
    agent = Memalpha(AGENT, memalpha=replace(CONFIG, answer_rules=("mine=label",)))
    agent.check()
    assert agent.scored_by(problems) == {
        "mine": "label: its first box, else its text, is the number of the golden answer",
        "news_articles": "contains: it contains a golden answer, both normalised",
        "squad": "contains_text: it contains the first golden answer, in any case",
    }
    with pytest.raises(ValueError, match=r"memalpha\.answer_rules 'mine' is not SOURCE=RULE"):
        Memalpha(AGENT, memalpha=replace(CONFIG, answer_rules=("mine",))).check()


def test_a_rule_that_was_chosen_scores_the_answers_of_its_source():
    config = replace(CONFIG, answer_rules=("generated=label",))
    answer, label = StreamQuestion("Which class?", "3"), StreamQuestion("Which other class?", "4")
    read = trajectory(Completion(insert("Ann")), Completion(""), stream=replace(STREAM, questions=(answer, label)))
    answers = completions("\\boxed{3}", "class 4")
    (scored,) = score(read, answerer=lambda prompts, draws: answers, config=config)
    assert scored.scores["accuracy"] == 0.5
