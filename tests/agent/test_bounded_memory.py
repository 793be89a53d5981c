"""A memory never holds more than its budget, and says what it lost."""

from hypothesis import given
from hypothesis import strategies as st

from memsearcher_jax.agent.memory import Memory

words = st.lists(st.sampled_from(["a", "bb", "c\n"]), max_size=30).map(" ".join)


def test_a_rewrite_replaces_the_text(ruler):
    memory = Memory(3).rewrite("one two", ruler).rewrite("three", ruler)
    assert memory == Memory(3, "three", tokens=1)


def test_over_the_budget_is_cut_and_counted(ruler):
    memory = Memory(2).rewrite("one two three four", ruler).rewrite("a b c", ruler)
    assert memory == Memory(2, "a b", tokens=2, cuts=2, tokens_cut=3)


@given(words, st.integers(0, 20))
def test_bounded(ruler, text, budget):
    memory = Memory(budget).rewrite(text, ruler)
    assert ruler.count(memory.text) <= budget
    assert text.startswith(memory.text)
    assert (memory.cuts == 0) == (memory.text == text)
    assert memory.rewrite(memory.text, ruler).text == memory.text
