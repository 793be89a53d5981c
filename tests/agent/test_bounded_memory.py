"""A memory never holds more than its budget, and says what it lost."""

from hypothesis import given
from hypothesis import strategies as st

from memsearcher_jax.agent.memsearcher import BoundedMemory

words = st.lists(st.sampled_from(["a", "bb", "c\n"]), max_size=30).map(" ".join)


def test_a_rewrite_replaces_the_text(token_counter):
    memory = BoundedMemory(3).rewrite("one two", token_counter).rewrite("three", token_counter)
    assert memory == BoundedMemory(3, "three", tokens=1)


def test_a_rewrite_over_the_budget_is_cut_and_counted(token_counter):
    memory = BoundedMemory(2).rewrite("one two three four", token_counter).rewrite("a b c", token_counter)
    assert memory == BoundedMemory(2, "a b", tokens=2, cuts=2, tokens_cut=3)


@given(words, st.integers(0, 20))
def test_a_memory_never_exceeds_its_budget(token_counter, text, budget):
    memory = BoundedMemory(budget).rewrite(text, token_counter)
    assert token_counter.count(memory.text) <= budget
    assert text.startswith(memory.text)
    assert (memory.cuts == 0) == (memory.text == text)
    assert memory.rewrite(memory.text, token_counter).text == memory.text
