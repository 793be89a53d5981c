"""Questions made from passages, and splits of questions that share no entity."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.warmstart.questions import check_disjoint
from examples.warmstart.split_questions import page_questions, split
from memsearcher_jax.types import Passage, Problem

FILM = "Ave Caesar (film) is a 1919 Hungarian comedy film directed by Alexander Korda and starring Oscar Beregi."
KORDA = (
    "Sir Alexander Korda (16 September 1893 – 23 January 1956) was a British director, the son of Henrik Kellner. "
    "He was born in Túrkeve, Hungary, married Merle Oberon, and died at his home in London."
)


def asked(pages: dict[str, str], seed: int = 0) -> dict[str, str]:
    """Question -> answer."""
    passages = [Passage(title, f'"{title}"\n{text}') for title, text in pages.items()]
    problems = page_questions(passages, seed)
    assert len({problem.id for problem in problems}) == len(problems)
    return {problem.question: problem.golden_answers[0] for problem in problems}


def test_each_fact_of_the_named_page_is_asked_once():
    answers = asked({"Ave Caesar (film)": FILM, "Alexander Korda": KORDA})
    dates = {"16 September 1893", "23 January 1956"}
    assert {*answers.values()} == dates | {"British", "Henrik Kellner", "London", "Merle Oberon", "Túrkeve"}
    assert len(answers) == 7
    assert answers["Who is the spouse of the director of film Ave Caesar (Film)?"] == "Merle Oberon"
    assert all("the director of film Ave Caesar (Film)" in question for question in answers)


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("Ava Low is the daughter of Carl Ito.", "Carl Ito was born in Kyoto. She was a singer."),
        ("Ava Low is the mother of Carl Ito.", "Carl Ito was born in Kyoto."),
        ("Ava Low is a song about the daughter of Carl Ito.", "Carl Ito was born in Kyoto."),
        ("Ava Low is a daughter of Kyoto.", "Carl Ito was born in Kyoto."),
    ],
)
def test_pages_that_are_not_sure_to_be_meant_are_not_asked(text, other):
    assert asked({"Ava Low": text, "Carl Ito": other}) == {}


def problem(number: int, question: str = "", answer: str = "Paris", titles=()) -> Problem:
    return Problem(str(number), question or f"Question {number}?", (answer,), {"supporting_titles": list(titles)})


@given(st.lists(st.sets(st.integers(0, 12), max_size=3), min_size=8, max_size=20), st.integers(0, 5))
def test_splits_share_no_question_and_no_entity(titles, seed):
    problems = [problem(number, titles=map(str, names)) for number, names in enumerate(titles)]
    try:
        test, train = split(problems, [3], seed)
    except ValueError as error:
        pytest.fail(str(error))
    assert len(test) >= 3 and sorted(test + train, key=problems.index) == problems
    check_disjoint(train, test)
    assert split(problems, [3], seed) == [test, train]


@pytest.mark.parametrize(
    ("train", "shared"),
    [
        (problem(1, titles=("Ábel (film)",)), "abel film"),
        (problem(2, "Where was  the director of Abel born?"), "where was the director of abel born"),
    ],
)
def test_a_shared_question_or_entity_is_refused_by_name(train, shared):
    test = problem(9, "Where was the director of Abel born?", titles=("Abel (Film)", "Alex"))
    with pytest.raises(ValueError, match=f'test question "9" and training question "{train.id}" share "{shared}"'):
        check_disjoint([train], [test])
    check_disjoint([problem(1, titles=("Alexa",))], [test])
