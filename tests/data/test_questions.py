"""Kinds of questions, and names in texts."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.warmstart.questions import find_title
from memsearcher_jax.data.config import DataConfig
from memsearcher_jax.data.problems import load
from memsearcher_jax.data.questions import find_name, is_choice
from memsearcher_jax.types import Problem


def problem(number: int, question: str = "", answer: str = "Paris", titles=()) -> Problem:
    return Problem(str(number), question or f"Question {number}?", (answer,), {"supporting_titles": list(titles)})


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("Princess Helena of Nassau", "the father of Princess Helena Of Nassau?", "Princess Helena Of Nassau"),
        ("Pere Marti", "by Père Martí.", "Père Martí"),
        ("T-Rex", "Tammy and the T Rex", "T Rex"),
        ("Tiger Cage (film)", "director of Tiger Cage (Film)?", "Tiger Cage (Film)"),
        ("Rome", "Romeo in Jerome", ""),
        ("!", "!", ""),
    ],
)
def test_names_are_found_as_written_in_the_text(name, text, found):
    assert find_name(name, text) == found


@pytest.mark.parametrize(
    ("title", "question", "is_page"),
    [
        ("Place of birth", "What is the place of birth of the director of film Rome?", False),
        ("Place of birth", "Who wrote Place of birth?", True),
        ("Rome", "who lived in rome?", True),
        ("First Congress", "Where was the first congress?", True),
    ],
)
def test_a_title_that_is_a_phrase_of_the_question_is_no_page(title, question, is_page):
    assert problem(0, question, titles=[title, "Other"]).supporting_titles == ((title,) if is_page else ()) + ("Other",)


@given(st.text("ab éÉ,-()ǅßİ", max_size=8), st.text("abc éÉ,-()ǅßİ", max_size=8))
def test_a_name_between_spaces_is_found(before, after):
    assert find_name("Ab c", f"{before} ab C {after}") == "ab C"


@pytest.mark.parametrize(
    ("title", "text", "found"),
    [
        ("Ave Caesar! (1919 film)", "the film Ave Caesar!", "Ave Caesar"),
        ("Delft, Netherlands", "born in Delft in 1900", "Delft"),
        ("John (film) (1999)", "nothing of it", ""),
    ],
)
def test_titles_are_also_found_without_parenthesis_or_after_the_comma(title, text, found):
    assert find_title(title, text) == found


@pytest.mark.parametrize(
    ("question", "answer", "choice"),
    [
        ("Are A and B in the same country?", "yes", True),
        ("Which film is older, The Man or Ave Caesar!?", "Ave Caesar", True),
        ("Where was the director of Ave Caesar! born?", "Túrkeve", False),
    ],
)
def test_a_question_is_a_choice_if_its_answer_can_be_guessed(question, answer, choice):
    assert is_choice(problem(1, question, answer)) is choice
    assert not is_choice(Problem("1", "What country is Ibsen from?", ("Norway", "no"))), "an alias can be guessed"


@pytest.mark.parametrize(("kind", "count"), [("all", 3), ("span", 1)])
def test_the_loader_keeps_questions_of_the_kind(kind, count, tmp_path):
    asked = [("Where?", "Paris"), ("Is it?", "no"), ("Which is older, Rome or Delft?", "Rome")]
    rows = [{"id": text, "question": text, "golden_answers": [answer]} for text, answer in asked]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = str(tmp_path / "q.jsonl")
    splits = load(DataConfig(train=(file,), test=(file,), questions=kind), tmp_path / "data")
    assert (len(splits.train), len(splits.test)) == (count, count)
