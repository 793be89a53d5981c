"""Facts that pages state: the questions that ask for them, in two hops and alone."""

import pytest

from memsearcher_jax.sft.page_facts import other_questions
from memsearcher_jax.types import Problem

KORDA = (
    "Sir Alexander Korda (16 September 1893 – 23 January 1956) was a British director, the son of Henrik Kellner. "
    "He was born in Túrkeve, Hungary, married Merle Oberon, and died at his home in London."
)
TITLES = {"supporting_titles": ["Ave Caesar! (film)", "Alexander Korda"]}


def asked(question, text, title="Alexander Korda"):
    pairs = other_questions(Problem("7", question, ("x",), TITLES), title, text)
    return {whole.question: (alone.question, *alone.golden_answers) for whole, alone in pairs}


def test_each_fact_is_asked_in_two_hops_and_alone():
    director = "the director of film Ave Caesar!"
    assert asked(f"Where did {director} study?", KORDA) == {
        f"What is the date of birth of {director}?": (
            "What is the date of birth of Alexander Korda?",
            "16 September 1893",
        ),
        f"When did {director} die?": ("When did Alexander Korda die?", "23 January 1956"),
        f"What is the date of death of {director}?": (
            "What is the date of death of Alexander Korda?",
            "23 January 1956",
        ),
        f"Where was {director} born?": ("Where was Alexander Korda born?", "Túrkeve, Hungary"),
        f"Where was the place of death of {director}?": (
            "Where was the place of death of Alexander Korda?",
            "London",
        ),
        f"What nationality is {director}?": ("What nationality is Alexander Korda?", "British"),
        f"Which country {director} is from?": ("Which country Alexander Korda is from?", "British"),
        f"Who is the father of {director}?": ("Who is the father of Alexander Korda?", "Henrik Kellner"),
        f"Who is the spouse of {director}?": ("Who is the spouse of Alexander Korda?", "Merle Oberon"),
    }


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Alexander Korda (born May 4, 1950) is a Danish film director.", "May 4, 1950"),
        ("Alexander Korda (born 4 May 1950 in Delft) is an actor.", "4 May 1950"),
        ("Alexander Korda was a painter.", None),
    ],
)
def test_a_birthday_is_read_where_the_page_states_it(text, answer):
    found = asked("Who is the father of the director of film Ave Caesar!?", text)
    assert found.get("When was the director of film Ave Caesar! born?", (None, None))[1] == answer


def test_the_question_itself_is_not_repeated():
    question = "Where was the director of film Ave Caesar! born?"
    assert question not in asked(question, KORDA)


@pytest.mark.parametrize(
    ("question", "title"),
    [("Who is older?", "Alexander Korda"), ("Where was the director of film Ave Caesar! born?", "Another Page")],
)
def test_questions_that_do_not_lead_to_the_page_have_none(question, title):
    assert asked(question, KORDA, title) == {}
