"""The reward for the answer and for the pages that support it."""

import pytest

from examples.supporting_pages import reward
from memsearcher_jax.types import Outcome, Passage, Problem, SearchResult, StopReason, Trajectory, Turn

TITLES = ("Tower Bridge", "Horace Jones")


@pytest.mark.parametrize(
    ("answer", "found", "titles", "expected"),
    [
        ("1894", ["tower bridge", "Horace Jones"], TITLES, 1.0),
        ("1894", ["London"], TITLES, 0.5),
        ("1819", ["Tower Bridge", "Tower Bridge"], TITLES, 0.25),
        ("1894", [], (), 1.0),
    ],
)
def test_half_is_for_the_answer_and_half_for_the_pages(answer, found, titles, expected):
    problem = Problem("q", "When did it open?", ("1894",), {"supporting_titles": list(titles)})
    results = tuple(SearchResult((Passage("0", f'"{title}"\nText.'),)) for title in found)
    turns = (Turn("", "a search", results=results[:1]), Turn("", "another", results=results[1:]))
    right = Trajectory(problem, 0, Outcome(StopReason.ANSWERED, answer, turns), (), "")
    no_answer = Trajectory(problem, 1, Outcome(StopReason.MAX_TURNS, "", turns), (), "")
    assert reward([right, no_answer]) == [expected, 0.0]
