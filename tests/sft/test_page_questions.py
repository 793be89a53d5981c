"""Questions made from passages: relations that lead to another page, facts of that page, and the wording."""

import re

import pytest

from memsearcher_jax.sft.page_questions import page_questions
from memsearcher_jax.types import Passage

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
    assert sorted(answers.values()) == [
        "16 September 1893",
        "23 January 1956",
        "British",
        "Henrik Kellner",
        "London",
        "Merle Oberon",
        "Túrkeve",
    ]
    assert answers["Who is the spouse of the director of film Ave Caesar (Film)?"] == "Merle Oberon"
    assert all("the director of film Ave Caesar (Film)" in question for question in answers)


def test_the_pages_are_the_supporting_titles():
    passages = [Passage("1", f'"Ave Caesar (film)"\n{FILM}'), Passage("2", f'"Alexander Korda"\n{KORDA}')]
    titles = {problem.supporting_titles for problem in page_questions(passages, 0)}
    assert titles == {("Ave Caesar (film)", "Alexander Korda")}


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Alexander Korda (born May 4, 1950) is a Danish film director.", "May 4, 1950"),
        ("Alexander Korda (born 4 May 1950 in Delft) is an actor.", "4 May 1950"),
        ("Alexander Korda was a painter.", None),
    ],
)
def test_a_birthday_is_read_where_the_page_states_it(text, answer):
    found = asked({"Ave Caesar (film)": FILM, "Alexander Korda": text})
    births = [found[question] for question in found if re.search("date of birth|When was", question)]
    assert births == ([answer] if answer else [])


@pytest.mark.parametrize(
    ("text", "grandparents"),
    [
        ("Ava Low is the daughter of painter Carl Ito.", ("paternal grandfather", "paternal grandmother")),
        ("Ava Low was married to Carl Ito.", ("father-in-law", "mother-in-law")),
    ],
)
def test_parents_of_relatives_are_asked_for_by_their_word(text, grandparents):
    carl = "Carl Ito was the son of Ed Ito and his second wife Mia Ono. He died in June 1842 in Kyoto, Japan."
    worded = {
        question.removeprefix("Who is ").removesuffix("?") for question in asked({"Ava Low": text, "Carl Ito": carl})
    }
    for word in grandparents:
        assert worded & {f"Ava Low's {word}", f"the {word} of Ava Low"}


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


def test_the_seed_chooses_order_and_wording():
    pages = {"Ave Caesar (film)": FILM, "Alexander Korda": KORDA}
    assert asked(pages) == asked(pages)
    assert len({tuple(asked(pages, seed)) for seed in range(20)}) > 10
