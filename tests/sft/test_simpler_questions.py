"""The steps of questions, and the questions that ask for other facts of their pages."""

import pytest

from memsearcher_jax.sft.simpler_questions import decompose, other_questions, steps
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
        f"Where was {director} born?": ("Where was Alexander Korda born?", "Túrkeve"),
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


def problem(question, answer="x", titles=()):
    return Problem("7", question, (answer,), {"supporting_titles": list(titles)})


@pytest.mark.parametrize(
    ("question", "name", "first", "rest"),
    [
        ("When did Al Low's father die?", "Al Low", "Who is Al Low's father?", "When did B. Hay die?"),
        (
            "Who is the father of the director of film Rare Bird (Film)?",
            "Rare Bird (Film)",
            "Who is the director of film Rare Bird (Film)?",
            "Who is the father of B. Hay?",
        ),
        (
            "Who is the maternal grandfather of Al Low?",
            "Al Low",
            "Who is the mother of Al Low?",
            "Who is the father of B. Hay?",
        ),
        ("Who is Al Low's stepmother?", "Al Low", "Who is Al Low's father?", "Who is B. Hay's spouse?"),
        ("Who is the father of Al Low's wife?", "Al Low", "Who is Al Low's wife?", "Who is the father of B. Hay?"),
        ("Who is Al Low's father-in-law?", "Al Low", "Who is Al Low's spouse?", "Who is B. Hay's father?"),
    ],
)
def test_a_question_about_a_described_person_has_two_steps(question, name, first, rest):
    assert decompose(question, name, "B. Hay") == (first, rest)


@pytest.mark.parametrize(
    "question",
    [
        "Who wrote Al Low?",
        "Who is Al Low's father-figure?",
        "Who is the father of Al Lowe?",
        "Who is Al Low's father?",
        "Who is the father of Al Low?",
    ],
)
def test_other_questions_have_no_steps(question):
    assert decompose(question, "Al Low", "B. Hay") is None


@pytest.mark.parametrize(
    ("asked_first", "expected"),
    [
        ("Ava Low's father", {"Ava Low's paternal grandfather", "Ava Low's paternal grandmother"}),
        ("the mother of Ava Low", {"the maternal grandfather of Ava Low", "the maternal grandmother of Ava Low"}),
        ("Ava Low's husband", {"Ava Low's father-in-law", "Ava Low's mother-in-law"}),
        ("the director of film Ava Low", {"the father of the director of film Ava Low"}),
    ],
)
def test_parents_of_relatives_are_asked_for_by_their_word(asked_first, expected):
    text = "Carl Ito was the son of Ed Ito and his second wife Mia Ono. He died in June 1842 in Kyoto, Japan."
    found = {
        whole.question: (alone.question, alone.golden_answers)
        for whole, alone in other_questions(
            Problem("7", f"Where did {asked_first} study?", ("x",), {"supporting_titles": ["Ava Low", "Carl Ito"]}),
            "Carl Ito",
            text,
        )
    }
    assert expected <= {question.removeprefix("Who is ").removesuffix("?") for question in found}
    assert ("Who is the mother of Carl Ito?", ("Mia Ono",)) in found.values()
    assert ("Where was the place of death of Carl Ito?", ("Kyoto",)) in found.values()


def test_the_steps_of_a_question_ask_one_page_each():
    two_hops = problem("When did Al Low's father die?", "1904", ("B. Hay (king)", "Al Low"))
    first, second = steps(two_hops)
    assert (first.question, first.golden_answers) == ("Who is Al Low's father?", ("B. Hay",))
    assert (second.question, second.golden_answers) == ("When did B. Hay die?", ("1904",))
    assert (first.supporting_titles, second.supporting_titles) == (("Al Low",), ("B. Hay (king)",))
    assert steps(problem("Who?", titles=("A", "B"))) == ()
    assert steps(problem("When did Al Low's father die?", titles=("Al Low",))) == ()
