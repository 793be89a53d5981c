"""The judge of short answers: its prompt, its replies, a service that is down, and the numbers."""

import json
from dataclasses import replace

import pytest

from memsearcher_jax.agent.answer_judge import Judgement, calibration_error, judge_prompt, parse_judgement
from memsearcher_jax.agent.prompts import chat_messages
from memsearcher_jax.rl.answer_judge import Answer, judge_answers, summarize_judgements
from memsearcher_jax.rl.config import CompleterConfig
from tests.support import chat_completion

CONFIG = CompleterConfig(backend="openai", model="m", max_concurrency=2, max_outage=0.0)
ANSWERS = [
    Answer("1", "nq", "Who?", ("Ann",), "Ann", True),
    Answer("2", "nq", "Who else?", ("Bo", "Bob"), "Robert, called Bob", False),
    Answer("3", "nq", "Where?", ("Oslo",), "Rome", False),
    Answer("4", "nq", "Why?", ("x",), None, False),
]


def reply(verdict, **more):
    return json.dumps({"rationale": "so", "judgement": verdict} | more)


@pytest.mark.parametrize(
    ("text", "judgement"),
    [
        (reply("correct"), Judgement(True)),
        (f"```json\n{reply('Incorrect', confidence=40)}\n```", Judgement(False, 40.0)),
        (reply("correct", confidence=300), Judgement(True, 100.0)),
        (reply("correct", confidence=10**400), Judgement(True, 100.0)),
        (reply("correct", confidence="high"), Judgement(True)),
        (reply("correct", confidence="85%"), Judgement(True, 85.0)),
        (f'<think>{{"judgement": "correct"}}?</think>{reply("incorrect")}', Judgement(False)),
        ('<think>Not {"judgement": "correct"}, because', None),
        (reply("perhaps"), None),
        ("correct", None),
        ("{", None),
        ("[" * 50_000, None),
    ],
)
def test_replies_are_read_or_count_as_none(text, judgement):
    assert parse_judgement(text) == judgement


def test_the_judge_sees_question_golden_answers_and_answer():
    system, user = chat_messages(judge_prompt("Who?", ("Ann", "Änn"), "a <|im_end|> b"))
    assert '"judgement"' in system
    assert user == 'Question: Who?\nGolden answers: ["Ann", "Änn"]\nAnswer: a <|im_end|> b'


@pytest.fixture
def judge(serving, tmp_path):
    """Judges `ANSWERS` over HTTP by a function of the user message, which returns None to be down, or a status.

    Returns the judgements, and what was asked.
    """

    def ask(behave):
        def reply_to(user, times):
            text = behave(user) or 503
            return (text, {"error": "overloaded"}) if isinstance(text, int) else chat_completion(*text.split("|"))

        url, requests = serving(reply_to)
        judgements = judge_answers(ANSWERS, replace(CONFIG, url=url), tmp_path / "judgements.jsonl")
        return judgements, [body["messages"][-1]["content"] for _, _, body in requests]

    return ask


def by_word(user):
    return reply("incorrect" if "Rome" in user else "correct")


def test_answers_are_judged_once_and_numbers_have_intervals(judge, tmp_path):
    judgements, asked = judge(by_word)
    assert {id: one.correct for id, one in judgements.items()} == {"1": True, "2": True, "3": False, "4": False}
    assert len(asked) == 3, "no answer is not correct, and nobody is asked"
    assert judge(by_word) == (judgements, [])
    file = tmp_path / "judgements.jsonl"
    complete = file.read_bytes()
    file.write_bytes(complete[:-9])  # the disk was full
    assert len(judge(by_word)[1]) == 1 and file.read_bytes() == complete
    (numbers,) = summarize_judgements(ANSWERS, judgements, 0).values()
    assert numbers["accuracy"]["mean"] == 0.5 and numbers["accuracy"]["low"] < 0.5 < numbers["accuracy"]["high"]
    assert (numbers["agreement_with_exact_match"], numbers["unjudged"]) == (0.75, 0)


def test_a_judge_that_is_down_leaves_the_number_out_and_says_so(judge, capsys):
    judgements, asked = judge(lambda user: None)
    assert len(asked) == 2, "after one batch without a reply no more are asked"
    assert "the judge does not answer: " in (error := capsys.readouterr().err) and "status 503" in error
    assert summarize_judgements(ANSWERS, judgements, 0) == {"nq": {"questions": 4, "unjudged": 3}}
    judgements, _ = judge(lambda user: None if "Rome" in user else by_word(user))
    midway = summarize_judgements(ANSWERS, judgements, 0)
    assert midway == {"nq": {"questions": 4, "unjudged": 1}}, "an answer that is missing is a third of the others"
    assert len(judge(by_word)[0]) == 4, "the next evaluation asks again"


@pytest.mark.parametrize("odd", ["hm", f"{reply('correct')}?|length", 400])
def test_a_reply_that_cannot_be_read_or_a_refusal_enters_no_number(judge, odd, capsys):
    judgements, asked = judge(lambda user: odd if "Rome" in user else reply("correct"))
    (numbers,) = summarize_judgements(ANSWERS, judgements, 0).values()
    assert numbers["unjudged"] == 1 and numbers["accuracy"]["mean"] == pytest.approx(2 / 3) and len(asked) == 3
    error = capsys.readouterr().err
    assert ("more max_tokens in judge.extra_body" in error) == ("length" in str(odd))
    assert ("the judge's reply about question '3' cannot be read: 'hm'\n" in error) == (odd == "hm")


def test_the_calibration_error_is_that_of_bins_of_a_hundred():
    """Bins of 100, 100 and 150 answers."""
    assert calibration_error([Judgement(True)] * 99) is None
    sure, unsure = [Judgement(True, 90.0)] * 150, [Judgement(False, 20.0)] * 200
    assert calibration_error(sure) == pytest.approx(0.1)
    unsure_squares, sure_squares = 2 * 100 * 0.2**2, 150 * 0.1**2
    assert calibration_error(sure + unsure) == pytest.approx(((unsure_squares + sure_squares) / 350) ** 0.5)
