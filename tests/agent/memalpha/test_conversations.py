"""Scores of answers about long conversations."""

import pytest

from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.agent.memalpha.conversations import (
    JUDGE_RULES,
    evidence_recall,
    judge_rule,
    locomo_score,
    question_types,
)
from memsearcher_jax.agent.memalpha.prompts import load
from memsearcher_jax.agent.memalpha.reward import AnswerRule, answer_rule, question_score
from memsearcher_jax.agent.prompts import chat_messages


@pytest.mark.parametrize(
    ("answer", "gold", "kind", "score"),
    [
        ("She paints lakes.", "the painting of lakes", "single-hop", 4 / 6),  # "the" goes, "of" stays; paint, lake
        ("7 May 2023", "7 May, 2023", "temporal", 1.0),
        ("cats and dogs", "dog, cat", "single-hop", 1.0),
        ("Yes, since she likes it", "Yes; she likes music", "open-domain", 2 / 6),
        ("dogs, a cat", "cat, bird", "multi-hop", 0.5),
        ("It is not mentioned anywhere.", "Not mentioned", "adversarial", 1.0),
        ("No information available", "Not mentioned", "adversarial", 1.0),
        ("A cat", "Not mentioned", "adversarial", 0.0),
        ("", "cat", "single-hop", 0.0),
    ],
)
def test_locomo_scores_by_category(answer, gold, kind, score):
    assert locomo_score(answer, gold, kind) == pytest.approx(score)
    assert question_score("locomo", answer, gold, kind=kind) == pytest.approx(score)


def test_longmemeval_is_judged_by_the_rule_of_the_type():
    assert answer_rule("longmemeval") is AnswerRule.JUDGE
    assert question_score("longmemeval", "x", "y", "Yes.", kind="multi-session") == 1.0
    prompts = load(AgentConfig(workflow="memalpha"))
    _, user = chat_messages(prompts.grade_prompt("q?", "gold", "given", JUDGE_RULES["abstention"]))
    assert user.endswith(f"Given answer: given\nRule: {JUDGE_RULES['abstention']}")
    asked = ("longmemeval", "multi-session_abs"), ("longmemeval", "multi-session"), ("lme_train", "multi-session_abs")
    assert [judge_rule(*one) for one in asked] == [JUDGE_RULES["abstention"], "", ""]
    assert question_types("multi-session_abs") == ("multi-session", "abstention")


def test_evidence_recall_counts_pairs_of_neighbouring_words():
    assert evidence_recall("Ada works for Marn, she said", ["Ada works for Marn."]) == 1.0
    assert evidence_recall("Marn: Ada works there", ["Ada works for Marn.", "one"]) == pytest.approx(1 / 3)
    assert evidence_recall("anything", ["one"]) == 0.0
