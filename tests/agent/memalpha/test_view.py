"""What is shown of a Mem-alpha memory, or of the stream itself: the latest, the best, the last, within budgets."""

import hashlib
from dataclasses import replace

import pytest

from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.agent.memalpha.config import MemalphaConfig
from memsearcher_jax.agent.memalpha.memory import Memory, Store
from memsearcher_jax.agent.memalpha.prompts import load
from memsearcher_jax.agent.memalpha.view import EvidenceRetriever, render_memory
from memsearcher_jax.agent.prompts import chat_messages
from memsearcher_jax.types import Stream

CONFIG = MemalphaConfig()


def test_the_latest_items_are_shown_within_the_budget(token_counter):
    memory = Memory()
    for number in range(9):
        memory, _ = memory.insert(Store.SEMANTIC, f"fact {number} " + "word " * 10, token_counter)
    memory, _ = memory.update(Store.CORE, "the core stays whole", None, token_counter)
    whole = render_memory(memory, 5, 1_000, token_counter)
    assert "semantic_memory (the latest 5 of 9):" in whole
    assert [f"[{number:04x}]" in whole for number in range(9)] == [False] * 4 + [True] * 5
    tokens = {items: token_counter.count(render_memory(memory, items, 1_000, token_counter)) for items in (5, 2, 1, 0)}
    for budget, left in ((tokens[5], 5), (tokens[5] - 1, 2), (tokens[2] - 1, 1), (tokens[1] - 1, 0)):
        text = render_memory(memory, 5, budget, token_counter)
        assert (text.count("fact"), token_counter.count(text) <= budget) == (left, True), budget
        assert "the core stays whole" in text


def filled(texts, token_counter):
    memory = Memory()
    for text in texts:
        memory, _ = memory.insert(Store.SEMANTIC, text, token_counter)
    return memory


def test_retrieval_of_the_best_items_of_each_list(token_counter):
    memory = filled([["Ann", "sails"], "Bob cooks", "Eve reads", "Kim runs"], token_counter)
    memory, _ = memory.insert(Store.EPISODIC, "1 May: Ann left", token_counter)
    memory, _ = memory.update(Store.CORE, "four friends", None, token_counter)
    retriever = EvidenceRetriever(Stream("s", (), ()), memory, replace(CONFIG, retrieved_items=2), token_counter)
    assert retriever.retrieve("Who cooks, Bob?") == (
        "core memory:\nfour friends\n\nsemantic memory:\n1. Bob cooks\n2. ['Ann', 'sails']\n\n"
        "episodic memory:\n1. 1 May: Ann left"
    )
    assert retriever.retrieve("?!").endswith("semantic memory:\nEmpty.\n\nepisodic memory:\nEmpty.")


@pytest.mark.parametrize("budget", [5, 25, 60])
def test_retrieved_text_keeps_its_budget(budget, token_counter):
    memory = filled([f"item {number} about apples" for number in range(30)], token_counter)
    retriever = EvidenceRetriever(
        Stream("s", (), ()), memory, replace(CONFIG, answer_memory_tokens=budget), token_counter
    )
    text = retriever.retrieve("apples")
    assert token_counter.count(text) <= budget
    assert ("1. item" in text) == (budget > 5)


def test_the_baselines_retrieve_from_the_stream(token_counter):
    stream = Stream("s", ("one apple here", "two pears there", "three plums", "a last apple pie"), ())
    rag = EvidenceRetriever(stream, Memory(), replace(CONFIG, answer_from="rag"), token_counter)
    assert rag.retrieve("which apple pie") == "a last apple pie\n\none apple here"
    single = EvidenceRetriever(stream, Memory(), replace(rag.config, retrieved_chunks=1), token_counter)
    assert single.retrieve("which apple pie") == "a last apple pie"
    whole = EvidenceRetriever(stream, Memory(), replace(CONFIG, answer_from="long_context"), token_counter)
    assert whole.retrieve("?") == "\n\n".join(stream.chunks)
    for budget, end in (
        (6, "three plums\n\na last apple pie"),
        (5, "plums\n\na last apple pie"),
        (1, "pie"),
        (4, "a last apple pie"),
    ):
        cut = EvidenceRetriever(
            stream, Memory(), replace(CONFIG, answer_from="long_context", answer_memory_tokens=budget), token_counter
        )
        assert cut.retrieve("?") == end


def test_the_original_set_equals_what_the_originals_code_renders(token_counter):
    """Digests of what commit 9c0e1f6 of wangyu-ustc/Mem-alpha makes of this memory with Qwen-Agent 0.0.29."""
    memory = filled([f"fact {number}" for number in range(7)], token_counter)
    memory, _ = memory.insert(Store.EPISODIC, "1 May: Ann left", token_counter)
    memory, _ = memory.update(Store.CORE, "Ann sails.", None, token_counter)
    prompts = load(AgentConfig(workflow="memalpha", prompts="original"))

    def digest(text):
        return hashlib.sha256(text.encode()).hexdigest()

    reading = prompts.chunk_prompt(render_memory(memory, 5, 1_000, token_counter, tags=prompts.tags), "Bob cooks.")
    assert digest("\0".join(chat_messages(reading))) == (
        "4d62634e8c780758701dada0b0293edc36b98b57e96dfd79ea3bf5ed3470a918"
    )
    assert prompts.opening == "<think>\n\n</think>\n\n", "of the chat template of Qwen3 without thinking"
    two_facts = replace(memory, semantic=memory.semantic[:2], episodic=memory.episodic[:0])
    shown = EvidenceRetriever(Stream("s", (), ()), two_facts, CONFIG, token_counter, prompts.tags).retrieve("fact")
    assert digest(chat_messages(prompts.answer_prompt(shown, "?"))[0]) == (
        "11a778bbd9769af539bfe22b88e5460e9192e0d0fef2362881b14757103db908"
    )
    system, user = chat_messages(prompts.grade_prompt("q", "g", "a"))
    assert (system, digest(user)) == ("", "5665086bb7ea17b91ef630c37fb8863575e167312caef4f76a70f904f9097fb1")
    assert prompts.with_prefix("pubmed-rct", "Which?").endswith("is a single number.\n\nWhich?")
    assert prompts.with_prefix("pubmed-rct", "Which?").count("\n\n") == 2
