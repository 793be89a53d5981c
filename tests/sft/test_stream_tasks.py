"""Examples for stream policies: trained tokens follow from their context, in the format of a rollout."""

import re
from dataclasses import replace

import numpy as np
import pytest

from memsearcher_jax.agent.memalpha import prompts
from memsearcher_jax.agent.memalpha.tools import tool_calls
from memsearcher_jax.data.synthetic.streams import FILLER
from memsearcher_jax.launch import cli
from memsearcher_jax.rl import setup
from memsearcher_jax.rl.tokenizer import ChatTokenizer
from memsearcher_jax.sft import extend_vocab, stream_tasks
from memsearcher_jax.sft.config import NO_ERRORS, SFTConfig
from memsearcher_jax.sft.stream_demonstrator import STORE_ALL, STORE_ONE
from memsearcher_jax.sft.stream_tasks import UNKNOWN

TOKENIZER = ChatTokenizer.load(extend_vocab.FOLDER)
CONFIG = cli.load_preset("tiny_memalpha_warmstart")
PROMPTS = prompts.load(CONFIG.agent)
RUN = setup.Run(CONFIG, None, TOKENIZER, PROMPTS, None, None)


@pytest.fixture
def tasks():
    return stream_tasks.make_tasks(RUN, seed=7)


def text(example, mask):
    return TOKENIZER.transcript(example.ids[mask].tolist())


def full_text(example):
    return TOKENIZER.transcript(example.ids.tolist())


def memory_chunk_reply(example):
    match = re.fullmatch(
        r"<\|im_start\|>system\n(.*)<\|im_end\|>\n<\|im_start\|>user\n(.*)<\|im_end\|>\n<\|im_start\|>assistant\n"
        r"(.*)<\|im_end\|>",
        full_text(example),
        re.DOTALL,
    )
    return match.groups()


def contents(reply):
    return re.findall(r'"content": "(.*?)"}', reply)


def statements(chunk):
    """The statements of a chunk, in order."""
    body = re.sub("|".join(map(re.escape, FILLER)), "", chunk.partition(". ")[2])
    return [sentence.strip() + "." for sentence in body.split(".") if sentence.strip()]


def test_reply_without_errors_stores_the_chunk_and_deletes_shown_filler(tasks):
    deleted = 0
    for example in tasks.demonstration_examples(NO_ERRORS, 60):
        shown, chunk, reply = memory_chunk_reply(example)
        assert reply.startswith(STORE_ALL) and contents(reply) == statements(chunk)
        filler = re.findall(rf"\[(\w+)\] (?:{'|'.join(map(re.escape, FILLER))})", shown)
        assert re.findall(r'"memory_id": "(\w+)"', reply) == filler
        known = set(re.findall(r"\w+", shown.partition("semantic")[0].partition("Labels: ")[2]))
        new = [label for label in re.findall(r"Label: (\w+)", chunk) if label not in known]
        assert ("new_content" in reply) == bool(new)
        assert len(tool_calls(reply)) == len(statements(chunk)) + len(filler) + bool(new)
        deleted += len(filler)
    assert deleted > 5


def test_memory_sizes_cover_short_and_long_streams(tasks):
    counts = [
        int((re.search(r"semantic_memory \(the latest 1 of (\d+)\)", full_text(example)) or [0, 1])[1])
        for example in tasks.demonstration_examples(NO_ERRORS, 80)
    ]
    assert min(counts) <= 1 and sum(count < 20 for count in counts) > 15 and max(counts) > 100


def test_demonstrations_train_complete_replies_with_the_configured_error_rate(tasks):
    stores_one = []
    for example in tasks.demonstration_examples(SFTConfig(store_one=0.7, store_filler=0.5), 200):
        _, chunk, reply = memory_chunk_reply(example)
        assert text(example, example.sampled) == reply + "<|im_end|>"
        stores_one.append(reply.startswith(STORE_ONE))
        if stores_one[-1]:
            (stored,) = contents(reply)
            assert stored in chunk
    assert 0.58 < sum(stores_one) / len(stores_one) < 0.82


def test_storing_examples_do_not_train_the_decision(tasks):
    for example in tasks.storing_examples(10):
        assert full_text(example).partition(STORE_ALL)[2] == text(example, example.sampled)


def test_extraction_examples_store_every_statement(tasks):
    for example in tasks.extraction_examples(20):
        chunk, calls = text(example, ~example.sampled), text(example, example.sampled)
        assert contents(calls) == statements(chunk.rstrip("\n"))


def test_reordering_examples_train_what_follows_the_first_name(tasks):
    for example in tasks.reordering_examples(20):
        sentences = full_text(example).split(". ")[:-1]
        first, second = sentences[: len(sentences) // 2], sentences[len(sentences) // 2 :]
        assert sorted(first) == sorted(second)
        assert not example.sampled[: len(example.ids) // 2 - 1].any()
        runs = np.flatnonzero(np.diff(example.sampled.astype(int)) == 1) + 1
        assert len(runs) == len(second)
        for start in runs:
            given = TOKENIZER.transcript(example.ids[:start].tolist()).rpartition(". ")[2]
            assert re.search(r"[A-Z][a-z]+$", given) and not re.search(r"(?!The )[A-Z][a-z]+ [A-Z]", given)


def test_answers_are_in_the_retrieved_evidence(tasks):
    questions = unknown = 0
    for example in tasks.qa_examples(80):
        evidence, *turns = full_text(example).split("<|im_start|>user\n")
        facts = re.findall(r"^\d\. (.*)$", evidence.replace("<|im_end|>", ""), re.MULTILINE)
        for turn in turns:
            question, answer = re.match(r"(.*)<\|im_end\|>\n<\|im_start\|>assistant\n(.*)<\|im_end\|>", turn).groups()
            names = re.findall(r"[A-Z]\w+ [A-Z]\w+(?= work| meet|\?)", question)
            relevant = [fact for fact in facts if all(name in fact for name in names)]
            questions, unknown = questions + 1, unknown + (answer == UNKNOWN)
            assert (relevant == []) == (answer == UNKNOWN), (question, answer)
            assert answer == UNKNOWN or answer in relevant[0]
    assert questions > 150 and 0 < unknown < 20


def test_held_out_examples_train_only_determined_tokens():
    held_out = stream_tasks.held_out_examples(RUN)
    assert {text(example, example.sampled) for example in held_out["store_all"]} == {STORE_ALL}
    assert all(text(example, example.sampled).count("✿FUNCTION✿") >= 2 for example in held_out["calls"])
    assert all(re.match(r"\d+ \w+ 203\d", text(example, example.sampled)) for example in held_out["answer/event"])
    assert min(map(len, held_out.values())) > 10


def test_steps_are_reproducible_and_share_no_statement():
    once, again, other = (stream_tasks.step_examples(RUN, step)[0] for step in (3, 3, 4))
    assert [example.ids.tolist() for example in once] == [example.ids.tolist() for example in again]
    facts, other_facts = (
        {fact for example in step for fact in statements(chunk_of(example))} for step in (once, other)
    )
    assert facts and not facts & other_facts
    assert max(len(example.ids) for example in once) <= CONFIG.training.seq_len


def chunk_of(example):
    match = re.search(r"user\n(\d+ \w+ \d+\. .*)<\|im_end\|>", full_text(example))
    return match[1] if match else ""


def test_another_seed_gives_other_examples():
    other = replace(RUN, config=replace(CONFIG, seed=1))
    first, second = (stream_tasks.step_examples(run, 0)[0][0] for run in (RUN, other))
    assert first.ids.tolist() != second.ids.tolist()
