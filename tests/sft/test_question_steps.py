"""The steps of questions."""

import pytest

from memsearcher_jax.sft.question_steps import decompose, steps
from memsearcher_jax.types import Problem


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


def test_the_steps_of_a_question_ask_one_page_each():
    two_hops = problem("When did Al Low's father die?", "1904", ("B. Hay (king)", "Al Low"))
    first, second = steps(two_hops)
    assert (first.question, first.golden_answers) == ("Who is Al Low's father?", ("B. Hay",))
    assert (second.question, second.golden_answers) == ("When did B. Hay die?", ("1904",))
    assert (first.supporting_titles, second.supporting_titles) == (("Al Low",), ("B. Hay (king)",))
    assert steps(problem("Who?", titles=("A", "B"))) == ()
    assert steps(problem("When did Al Low's father die?", titles=("Al Low",))) == ()
