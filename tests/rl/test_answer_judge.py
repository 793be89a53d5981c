"""The judge of short answers: its prompt, its replies, a service that is down, and the numbers."""

import json

import pytest

from memsearcher_jax.agent.answer_judge import Judgement, calibration_error, judge_prompt, parse_judgement
from memsearcher_jax.agent.prompts import chat_messages
from memsearcher_jax.rl import answer_judge
from memsearcher_jax.rl.answer_judge import Answer, judge_answers, summarize_judgements
from memsearcher_jax.rl.config import CompleterConfig
from memsearcher_jax.types import Completion

CONFIG = CompleterConfig(backend="openai", url="http://host", model="m", max_concurrency=2)
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
        (reply("correct", confidence="high"), Judgement(True)),
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


class Service:
    """Judges by a function of the user message; what it raises is an error."""

    def __init__(self, behave):
        self.behave, self.asked = behave, []

    def complete(self, prompts, key):
        self.asked += (users := [chat_messages(prompt)[1] for prompt in prompts])
        return [Completion(text) if (text := self.behave(user)) else Completion(error="down") for user in users]


@pytest.fixture
def service(monkeypatch):
    def start(behave):
        made = Service(behave)
        monkeypatch.setattr(answer_judge, "open_judge", lambda config: made)
        return made

    return start


def test_answers_are_judged_once_and_numbers_have_intervals(service, tmp_path):
    judge = service(lambda user: reply("incorrect" if "Rome" in user else "correct"))
    judgements = judge_answers(ANSWERS, CONFIG, tmp_path / "j.jsonl")
    assert {id: one.correct for id, one in judgements.items()} == {"1": True, "2": True, "3": False, "4": False}
    assert len(judge.asked) == 3, "no answer is not correct, and nobody is asked"
    assert judge_answers(ANSWERS, CONFIG, tmp_path / "j.jsonl") == judgements and len(judge.asked) == 3
    (numbers,) = summarize_judgements(ANSWERS, judgements, 0).values()
    assert numbers["accuracy"]["mean"] == 0.5 and numbers["accuracy"]["low"] < 0.5 < numbers["accuracy"]["high"]
    assert (numbers["agreement_with_exact_match"], numbers["unjudged"]) == (0.75, 0)


def test_a_judge_that_is_down_leaves_the_number_out_and_says_so(service, tmp_path, capsys):
    judge = service(lambda user: "")
    judgements = judge_answers(ANSWERS, CONFIG, tmp_path / "j.jsonl")
    assert len(judge.asked) == 2, "after one batch without a reply no more are asked"
    assert "the judge does not answer: down" in capsys.readouterr().err
    assert summarize_judgements(ANSWERS, judgements, 0) == {"nq": {"questions": 4, "unjudged": 3}}
    service(lambda user: reply("correct"))
    assert len(judge_answers(ANSWERS, CONFIG, tmp_path / "j.jsonl")) == 4, "the next evaluation asks again"


def test_a_reply_that_cannot_be_read_enters_no_number(service, tmp_path):
    service(lambda user: "hm" if "Rome" in user else reply("correct"))
    (numbers,) = summarize_judgements(ANSWERS, judge_answers(ANSWERS, CONFIG, tmp_path / "j.jsonl"), 0).values()
    assert numbers["unjudged"] == 1 and numbers["accuracy"]["mean"] == pytest.approx(2 / 3)


def test_the_calibration_error_is_that_of_bins_of_a_hundred():
    assert calibration_error([Judgement(True)] * 99) is None
    sure, unsure = [Judgement(True, 100.0)] * 100, [Judgement(False, 20.0)] * 150
    assert calibration_error(sure) == 0.0
    assert calibration_error(sure + unsure) == pytest.approx((1 / 250 * (100 * 0.2**2 + 150 * (1 / 15) ** 2)) ** 0.5)
