"""What is shown of a Mem-alpha memory, or of the stream itself: the latest, the best, the last, within budgets."""

from dataclasses import replace

import pytest

from memsearcher_jax.agent.memalpha_config import MemalphaConfig
from memsearcher_jax.agent.memalpha_memory import Memory, Store
from memsearcher_jax.agent.memalpha_view import Reader, shown_memory
from memsearcher_jax.agent.types import Stream

CONFIG = MemalphaConfig()


def test_the_latest_items_are_shown_and_fewer_where_the_budget_is_small(ruler):
    memory = Memory()
    for number in range(9):
        memory, _ = memory.insert(Store.SEMANTIC, f"fact {number} " + "word " * 10, ruler)
    memory, _ = memory.update(Store.CORE, "the core stays whole", None, ruler)
    whole = shown_memory(memory, 5, 1_000, ruler)
    assert "semantic_memory (the latest 5 of 9):" in whole
    assert [f"[{number:04x}]" in whole for number in range(9)] == [False] * 4 + [True] * 5
    tokens = {items: ruler.count(shown_memory(memory, items, 1_000, ruler)) for items in (5, 2, 1, 0)}
    for budget, left in ((tokens[5], 5), (tokens[5] - 1, 2), (tokens[2] - 1, 1), (tokens[1] - 1, 0)):
        text = shown_memory(memory, 5, budget, ruler)
        assert (text.count("fact"), ruler.count(text) <= budget) == (left, True), budget
        assert "the core stays whole" in text


def filled(texts, ruler):
    memory = Memory()
    for text in texts:
        memory, _ = memory.insert(Store.SEMANTIC, text, ruler)
    return memory


def test_questions_are_answered_from_the_best_items_of_each_list(ruler):
    memory = filled(["Ann sails", "Bob cooks", "Eve reads", "Kim runs"], ruler)
    memory, _ = memory.insert(Store.EPISODIC, "1 May: Ann left", ruler)
    memory, _ = memory.update(Store.CORE, "four friends", None, ruler)
    reader = Reader(Stream("s", (), ()), memory, replace(CONFIG, retrieved_items=2), ruler)
    assert reader.about("Who cooks, Bob?") == (
        "core memory:\nfour friends\n\nsemantic memory:\n1. Bob cooks\n2. Ann sails\n\n"
        "episodic memory:\n1. 1 May: Ann left"
    )
    assert reader.about("?!").endswith("semantic memory:\nEmpty.\n\nepisodic memory:\nEmpty.")


@pytest.mark.parametrize("budget", [5, 25, 60])
def test_what_questions_are_answered_from_keeps_its_budget(budget, ruler):
    memory = filled([f"item {number} about apples" for number in range(30)], ruler)
    reader = Reader(Stream("s", (), ()), memory, replace(CONFIG, answer_memory_tokens=budget), ruler)
    text = reader.about("apples")
    assert ruler.count(text) <= budget
    assert ("1. item" in text) == (budget > 5)


def test_the_baselines_read_the_stream(ruler):
    stream = Stream("s", ("one apple here", "two pears there", "three plums", "a last apple pie"), ())
    rag = Reader(stream, Memory(), replace(CONFIG, reader="rag"), ruler)
    assert rag.about("which apple pie") == "a last apple pie\n\none apple here"
    whole = Reader(stream, Memory(), replace(CONFIG, reader="long_context"), ruler)
    assert whole.about("?") == "\n\n".join(stream.chunks)
    for budget, end in (
        (6, "three plums\n\na last apple pie"),
        (5, "plums\n\na last apple pie"),
        (1, "pie"),
        (4, "a last apple pie"),
    ):
        cut = Reader(stream, Memory(), replace(CONFIG, reader="long_context", answer_memory_tokens=budget), ruler)
        assert cut.about("?") == end
