"""A stream of 420,000 tokens: contexts are bounded, time per chunk is constant, and only the memory grows.

pytest -m slow -s -n 0 tests/agent/memalpha/test_length.py      prints the measurements
"""

import json
import random
import statistics
import time
from itertools import pairwise

import pytest

from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.agent.memalpha import prompts
from memsearcher_jax.agent.memalpha.config import MemalphaConfig
from memsearcher_jax.agent.memalpha.memory import Store
from memsearcher_jax.agent.memalpha.search import BM25Index
from memsearcher_jax.agent.memalpha.view import EvidenceRetriever
from memsearcher_jax.agent.memalpha.workflow import memalpha
from memsearcher_jax.rl.setup import PACKAGED_TOKENIZER
from memsearcher_jax.runtime.tokenizer import ChatTokenizer
from memsearcher_jax.types import Completion, StopReason, Stream, StreamQuestion

STREAM_TOKENS, CHUNK_TOKENS, MEMORY_TOKENS = 420_000, 2_000, 130_000
CONFIG = MemalphaConfig(answer_memory_tokens=4_000)
AGENT = AgentConfig(workflow="memalpha", prompts="memalpha", memory_tokens=1_500, completion_tokens=2_048)
ITEM_WORDS, ITEMS = 20, 10  # of an entry, and entries of a reply


@pytest.fixture(scope="module")
def token_counter():
    return ChatTokenizer.load(PACKAGED_TOKENIZER)


@pytest.fixture(scope="module")
def stream(token_counter):
    rng = random.Random(0)
    words = ["".join(rng.choices("aeioulnrst", k=rng.randint(3, 7))) for _ in range(5_000)]
    chunks, tokens = [], 0
    while tokens < STREAM_TOKENS:
        chunks.append(token_counter.clip(" ".join(rng.choices(words, k=CHUNK_TOKENS)), CHUNK_TOKENS))
        tokens += token_counter.count(chunks[-1])
    questions = tuple(StreamQuestion(" ".join(rng.choices(words, k=6)), "x") for _ in range(20))
    return Stream("long", tuple(chunks), questions)


def reply_to(chunk, number):
    """Notes pieces of the chunk, and replaces the core: as much as makes the memory 130,000 tokens long."""
    words = chunk.split()
    calls = [{"memory_type": "core_memory", "new_content": " ".join(words[:40])}]
    calls += [
        {"memory_type": f"{store.value}_memory", "content": " ".join(words[at : at + ITEM_WORDS])}
        for at, store in zip(
            range(0, ITEMS * ITEM_WORDS, ITEM_WORDS), [Store.SEMANTIC, Store.EPISODIC] * ITEMS, strict=False
        )
    ]
    names = ["memory_update"] + ["new_memory_insert"] * ITEMS
    return "".join(f"✿FUNCTION✿: {name}\n✿ARGS✿: {json.dumps(call)}\n" for name, call in zip(names, calls, strict=True))


def read_stream(stream, token_counter, watch):
    """Reads the stream; `watch(prompt, number)` is called for every context before its reply."""
    workflow = memalpha(stream, agent=AGENT, config=CONFIG, prompts=prompts.load(AGENT), token_counter=token_counter)
    replies = [Completion(reply_to(chunk, number)) for number, chunk in enumerate(stream.chunks)]
    request = next(workflow)
    try:
        for number, reply in enumerate(replies):
            watch(request.text, number)
            request = workflow.send(reply)
    except StopIteration as end:
        return end.value


@pytest.mark.slow
def test_contexts_are_bounded_and_no_chunk_takes_longer_than_another(stream, token_counter):
    tokens, starts = [], []

    def watch(prompt, number):
        starts.append(time.process_time())
        tokens.append(sum(map(len, token_counter.prompt(prompt))))

    outcome = read_stream(stream, token_counter, watch)
    seconds = [after - before for before, after in pairwise(starts)]
    third = len(seconds) // 3
    first, last = statistics.median(seconds[:third]), statistics.median(seconds[-third:])
    print(f"\nper chunk {first * 1e3:.1f} ms in the first third, {last * 1e3:.1f} ms in the last; {outcome.counts}")
    assert outcome.stop is StopReason.STREAM_READ
    assert outcome.counts["stream_tokens"] >= STREAM_TOKENS and outcome.counts["memory_tokens"] >= MEMORY_TOKENS
    template = sum(map(len, token_counter.prompt(prompts.load(AGENT).chunk_prompt("", ""))))
    assert max(tokens) <= template + AGENT.memory_tokens + CHUNK_TOKENS
    assert max(tokens[20:]) - min(tokens[20:-1]) < 500, "the position in the stream is not seen in the context"
    # A cost that grows with the stream would be five times as large; other work on the same core makes it 1.7 times.
    assert last < 2 * first + 1e-3

    items = [item.text for item in (*outcome.memory.semantic, *outcome.memory.episodic)]
    began = time.process_time()
    BM25Index.build(items)
    assert time.process_time() - began < 1.0
    retriever = EvidenceRetriever(stream, outcome.memory, CONFIG, token_counter)
    retriever.retrieve(stream.questions[0].text)  # builds its indices
    began = time.process_time()
    shown = [retriever.retrieve(question.text) for question in stream.questions]
    assert time.process_time() - began < 0.5 * len(shown)
    assert all(token_counter.count(text) <= CONFIG.answer_memory_tokens for text in shown)
