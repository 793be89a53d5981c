"""The exam of a memory: rewards of every chunk from answers and verdicts, and failures that are no zeros."""

import json
import math
from dataclasses import replace

import jax
import pytest

from memsearcher_jax.agent import memalpha_prompts
from memsearcher_jax.agent.memalpha import memalpha
from memsearcher_jax.agent.memalpha_config import MemalphaConfig
from memsearcher_jax.agent.play import play
from memsearcher_jax.agent.types import (
    AgentConfig,
    Context,
    Finish,
    Outcome,
    Reply,
    Stop,
    Stream,
    StreamQuestion,
    Trajectory,
)
from memsearcher_jax.report.page_facts import facts_of
from memsearcher_jax.rl import exam as exams
from memsearcher_jax.rl.assemble import samples_of
from memsearcher_jax.rl.config import RLConfig
from memsearcher_jax.rl.exam import Exam
from memsearcher_jax.rl.score import spread
from memsearcher_jax.rl.speakers import Said
from memsearcher_jax.testing import byte_tokenizer

AGENT = AgentConfig(workflow="memalpha", prompts="memalpha", memory_tokens=2_000)
CONFIG = MemalphaConfig()
PROMPTS = memalpha_prompts.load(AGENT)
RULER = byte_tokenizer()
KEY = jax.random.key(0)
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
    """What the workflow leaves behind when the policy says this."""
    waiting = iter(replies)
    workflow = memalpha(stream, agent=AGENT, config=config, prompts=PROMPTS, ruler=RULER)
    outcome = play(workflow, lambda say: next(waiting), find=None)
    context = Context((1, 2), (0.0, -0.5), (False, True))
    return Trajectory(stream.problem("s"), 0, outcome, (context,) * len(outcome.turns), "")


def said(*replies):
    return [one if isinstance(one, Reply) else Reply(one) for one in replies]


class Reads:
    """Answers with all that it is shown; fails at what holds one of its words."""

    def __init__(self, *failing):
        self.failing, self.heard = failing, []

    def say(self, prompts, key):
        self.heard += prompts
        texts = [prompt.question + prompt.memory for prompt in prompts]
        return [Said(error="no luck") if any(w in text for w in self.failing) else Said(text) for text in texts]


class Judge:
    """Replies by the words of what it judges."""

    def __init__(self, **replies):
        self.replies, self.heard = replies, []

    def say(self, prompts, key):
        self.heard += prompts
        valid = Said('```json\n{"VALID": true}\n```')
        return [next((r for w, r in self.replies.items() if w in prompt.memory), valid) for prompt in prompts]


def graded(*trajectories, answerer=None, judge=None, config=CONFIG, evaluation=False):
    exam = Exam(config, PROMPTS, RULER, answerer or Reads(), judge, evaluation)
    return exam.grade(trajectories, KEY, lambda text: None)


def test_rewards_of_a_stream_by_hand():
    (one,) = graded(trajectory(*said(insert("Ann: Belkan Mills"), insert("x", "core_memory"))), judge=Judge())
    memory, stream = RULER.count("Ann: Belkan Mills"), sum(map(RULER.count, STREAM.chunks))
    shared = 0.5 + 0.05 * (1 - memory / stream)
    assert one.context_rewards == pytest.approx((shared + 1 + 0.1, shared + 0 + 0.1))
    assert one.reward == pytest.approx(sum(one.context_rewards) / 2)
    assert one.scores == pytest.approx(
        {
            "accuracy": 0.5,
            "accuracy/generated": 0.5,
            "accuracy/generated/person": 1.0,
            "accuracy/generated/town": 0.0,
            "compression": 1 - memory / stream,
            "calls_reward": 0.5,
            "content_reward": 1.0,
        }
    )
    assert one.trajectory.outcome.answer.startswith(
        "[1] Who does Ann work for? -> semantic memory: 1. Ann: Belkan Mills"
    )
    assert one.trajectory.outcome.counts["questions"] == 2


def test_without_a_judge_there_is_no_content_term():
    (one,) = graded(trajectory(*said(insert("Ann: Belkan Mills"), "Done")))
    assert "content_reward" not in one.scores
    assert one.context_rewards[0] - one.context_rewards[1] == pytest.approx(1.0)


def test_an_answer_that_failed_enters_no_mean_and_is_counted():
    (one,) = graded(trajectory(*said(insert("Ann: Belkan Mills"), "Done")), answerer=Reads("Where is Bob?"))
    assert one.scores["accuracy"] == 1.0 and "accuracy/generated/town" not in one.scores
    assert one.trajectory.outcome.counts["answers_failed"] == 1
    assert "[?] Where is Bob? -> failed: no luck" in one.trajectory.outcome.answer


def test_a_trajectory_without_any_answer_is_not_trained():
    poor, rich = trajectory(*said("Done", insert("Kelford"))), trajectory(*said(insert("Mills"), "Done"))
    batch = graded(poor, rich, answerer=Reads("Kelford"))
    assert math.isnan(batch[0].reward) and all(map(math.isnan, batch[0].context_rewards))
    assert batch[0].reason == "no answer could be scored: no luck"
    assert batch[0].trajectory.outcome.counts["answers_failed"] == 2
    for baseline in ("pooled", "position", "trajectory"):
        assert len(samples_of(batch, [0, 0], RLConfig(baseline=baseline))) == 2
    summary = exams.summarise_facts([facts_of(one) for one in batch])
    assert (summary["unscored"], summary["accuracy"], summary["answers_failed"]) == (
        0.5,
        batch[1].scores["accuracy"],
        1.0,
    )
    assert spread([one.reward for one in batch], [0, 0]) == 0.0


def test_nobody_answers_at_all():
    with pytest.raises(ConnectionError, match="none of 2 answers came; the last failure: no luck"):
        graded(trajectory(*said("Done", "Done")), answerer=Reads("?"))


def test_a_verdict_that_failed_enters_no_mean():
    judge = Judge(broken=Said(error="down"), odd=Said("I would say so."), bad=Said('```json\n{"VALID": false}\n```'))
    first = insert("fine") + insert("broken") + insert("odd") + insert("bad")
    (one,) = graded(trajectory(*said(first, insert("broken again"))), judge=judge)
    assert one.scores["content_reward"] == 0.5, "of the first chunk: one is fine, one is bad, two verdicts failed"
    assert one.trajectory.outcome.counts["verdicts_failed"] == 3
    assert not math.isnan(one.context_rewards[0]) and math.isnan(one.context_rewards[1])
    assert len(samples_of([one], [0], RLConfig(baseline="pooled"))) == 1


def test_what_a_judge_never_sees_is_invalid():
    judge = Judge()
    said_ = insert("fine") + '✿FUNCTION✿: memory_delete\n✿ARGS✿: {"memory_type": "core_memory"}'
    (one,) = graded(trajectory(*said(said_, "Done")), judge=judge)
    assert one.scores["content_reward"] == 0.25 and len(judge.heard) == 1


def test_sources_that_a_judge_scores():
    stream = replace(STREAM, source="lme_train")
    judge = Judge(Bob=Said("No."), Ann=Said("Yes, it is."))
    (one,) = graded(trajectory(*said("Done", "Done"), stream=stream), judge=judge)
    assert one.scores["accuracy"] == 0.5 and one.scores["accuracy/lme_train/person"] == 1.0
    for failing in (Judge(Bob=Said(error="down"), Ann=Said("yes")), Judge(Bob=Said(" "), Ann=Said("yes"))):
        (one,) = graded(trajectory(*said("Done", "Done"), stream=stream), judge=failing)
        assert (one.scores["accuracy"], one.trajectory.outcome.counts["answers_failed"]) == (1.0, 1)


def test_a_stream_that_was_not_read_to_its_end_has_no_reward():
    stopped = trajectory(Reply(insert("Mills")), Reply("", Finish.NO_ROOM))
    fault = replace(stopped, outcome=Outcome(Stop.FAULT, error="ValueError: no"), contexts=())
    batch = graded(stopped, trajectory(*said("Done", "Done")), fault)
    assert [math.isnan(one.reward) for one in batch] == [True, False, True]
    assert batch[0].reason == "the stream was not read to its end: context_full"
    assert [len(one.context_rewards) for one in batch] == [1, 2, 0]
    summary = exams.summarise_facts([facts_of(one) for one in batch])
    assert summary["stop/fault"] == pytest.approx(1 / 3) and summary["unscored"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("reader", ["long_context", "rag"])
def test_the_baselines_have_an_accuracy_and_no_memory(reader):
    config = replace(CONFIG, reader=reader)
    (one,) = graded(trajectory(config=config), config=config)
    assert one.scores["accuracy"] == 1.0 == one.reward
    assert one.context_rewards == () and "compression" not in one.scores


def test_long_exams_are_asked_in_parts(monkeypatch):
    monkeypatch.setattr(exams, "PART", 3)
    answerer = Reads()
    batch = graded(*[trajectory(*said(insert("Kelford"), "Done"))] * 4, answerer=answerer)
    assert [one.scores["accuracy"] for one in batch] == [0.5] * 4 and len(answerer.heard) == 8
