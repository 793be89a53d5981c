"""Sources of an answer: passages that contain it as whole words, in any script and beside any punctuation."""

import pytest

from memsearcher_jax.report.sources import sources_of
from memsearcher_jax.types import Outcome, Passage, Query, SearchResult, StopReason, Turn


def is_source(answer, contents):
    """Whether a passage that two searches found is the only source of the answer."""
    results = (SearchResult((Passage("p", f'"Page"\n{contents}'),)), SearchResult((Passage("p", contents),)))
    turn = Turn("", "", queries=(Query("q", 1),) * 2, results=results)
    sources, found = sources_of(Outcome(StopReason.ANSWERED, answer, (turn,)))
    assert found == 1
    return len(sources) == 1


@pytest.mark.parametrize(
    ("answer", "contents"),
    [
        ("東京", "日本の首都は東京です。"),
        ("夏目漱石", "『坊っちゃん』は、夏目漱石による小説。"),
        ("北京", "中华人民共和国的首都是北京市。"),
        ("カメラ", "新しいカメラを買う"),
        ("ｶﾒﾗ", "新しいカメラを買う"),
        ("IBM", "東京のIBMで働く"),
        ("1999年", "彼は1999年に生まれた"),
        ("กรุงเทพ", "เมืองหลวงคือกรุงเทพมหานคร"),
        ("Heroes", "The album “Heroes” of 1977."),
        ("Ada", "She is called «Ada»."),
        ("rock 'n' roll", "It is rock ’n’ roll."),
        ("Ada's mill", "We saw Ada’s mill."),
        ("1990-1995", "From 1990–1995 it rained."),
        ("the AARE", "An Aare of old."),
        ("Łódź", "He lives in Łódź, Poland"),
        ("C++", "C++ is a language"),
    ],
)
def test_an_answer_is_found(answer, contents):
    assert is_source(answer, contents)


@pytest.mark.parametrize(
    ("answer", "contents"),
    [
        ("Ada", "Adamant and Canada"),
        ("art", "the part of Bart"),
        ("1999", "in 19990"),
        ("東京", "京都"),
        ("IBM", "東京のIBMXで働く"),
        ("", "anything"),
        ("the", "the end"),
        ("?!", "what?!"),
    ],
)
def test_a_part_of_a_word_and_an_answer_without_letters_have_no_source(answer, contents):
    assert not is_source(answer, contents)
