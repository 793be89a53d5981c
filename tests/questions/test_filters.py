"""Filters of a question's text, each with a question that it must strike."""

import pytest

from memsearcher_jax.questions.evidence import Evidence
from memsearcher_jax.questions.filters import is_answered, text_reason, words_of
from memsearcher_jax.questions.writer import Written, parse
from memsearcher_jax.types import Passage

EVIDENCE = Evidence(
    (Passage("0", '"Kestrel"\nThe _Kestrel_ was built by Ada Kern in 1902, of oak and of fir.'),), "train"
)


@pytest.mark.parametrize(
    ("question", "answer", "reason"),
    [
        ("Who built the Kestrel?", "Ada Kern", ""),
        ("What is the ship that Ada Kern built?", "kestrel", ""),
        ("Who built the Kestrel?", "Bo Kern", "answer_not_in_passages"),
        ("Who built the Kestrel?", "Ker", "answer_not_in_passages"),
        ("Who built the Kestrel?", "?!", "answer_not_in_passages"),
        ("What is said of it?", "was built by Ada Kern in 1902 of oak and", "answer_too_long"),
        ("Why " * 61, "Ada Kern", "answer_too_long"),
        ("Who is named in the passage?", "Ada Kern", "names_its_text"),
        ("According to the text, who built it?", "Ada Kern", "names_its_text"),
        ("Who is named in passage 2?", "Ada Kern", "names_its_text"),
        ("Was it Ada Kern who built it?", "Ada Kern", "can_be_guessed"),
    ],
)
def test_the_text_of_a_question(question, answer, reason):
    assert text_reason(question, answer, EVIDENCE) == reason


@pytest.mark.parametrize(
    ("question", "answer", "is_like"),
    [
        ("In 1902, who built the brig _Kestrel_?", "Bo", True),
        ("Who built the old brig Kestrel in 1902?", "ada kern", True),
        ("Who built the old brig Kestrel in 1902?", "Bo", False),
        ("Who built the brig Falcon in 1902?", "Bo", False),
        ("Which port did the Kestrel sail to?", "Ada Kern", False),
    ],
)
def test_questions_that_ask_the_same(question, answer, is_like):
    assert words_of(question, answer).is_like(words_of("Who built the brig Kestrel in 1902?", "Ada Kern")) == is_like


def test_an_answer_is_words_in_a_row():
    assert is_answered("It was Ada Kern.", "ada kern") and is_answered("7", "7")
    assert not is_answered("1947", "7") and not is_answered("unknown", "Ada Kern") and not is_answered("", "x")


@pytest.mark.parametrize(
    ("reply", "written"),
    [
        ('{"question": "Who?", "answer": "Ada Kern."}', Written("Who?", "Ada Kern")),
        ('```json\n{"question": " Who\\n is it?", "answer": 1902}\n```', Written("Who is it?", "1902")),
        ('<think>{"question": "no"}</think>{"question": "Who?", "answer": "A"}', Written("Who?", "A")),
        ("I cannot.", None),
        ('{"question": "Who?"}', None),
        ('{"question": "Who?", "answer": true}', None),
        ('{"question": "", "answer": "A"}', None),
        ('{"question": ["Who?"], "answer": "A"}', None),
        ("{broken}", None),
        ('[{"question"}', None),
        ("", None),
    ],
)
def test_a_reply_is_a_json_object(reply, written):
    assert parse(reply) == written
