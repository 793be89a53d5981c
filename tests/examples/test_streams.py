"""The scripted stream policy, its errors, and tasks whose trained tokens follow from their context."""

import json
import random
import re
from collections import Counter
from dataclasses import replace

import pytest

from examples.warmstart import streams
from examples.warmstart.record import open_run
from examples.warmstart.streams import NO_ERRORS, STORE_ALL, UNKNOWN, Errors, StreamDemonstrator, Tasks
from memsearcher_jax.agent.registry import make_agent
from memsearcher_jax.agent.run import run_workflow
from memsearcher_jax.data.synthetic.streams import FILLER, SyntheticStreamConfig, make_stories, select_statements
from memsearcher_jax.launch import cli
from memsearcher_jax.types import Problem

CONFIG = cli.load_preset("tiny_memalpha_warmstart")
RUN = open_run(CONFIG)
TOKENIZER = RUN.tokenizer
STORIES = make_stories(SyntheticStreamConfig(seed=3, statements=3, filler=1), 6)
AGENT = make_agent(
    replace(CONFIG.agent, memory_tokens=900), memalpha=replace(CONFIG.memalpha, core_tokens=64, shown_items=20)
)


def run_demonstrator(errors: Errors, story=STORIES[0], seed: int = 0):
    policy = StreamDemonstrator(story, errors, random.Random(seed))
    return run_workflow(AGENT.start(Problem.of_stream("s", story.stream), TOKENIZER), policy, lambda request: ())


def item_texts(outcome):
    return {item.text for item in (*outcome.memory.semantic, *outcome.memory.episodic)}


def statement_texts(story):
    return {statement.text for sentences in story.sentences_C for statement in select_statements(sentences)}


def test_without_errors_every_statement_is_stored_in_the_right_memory():
    for story in STORIES:
        outcome = run_demonstrator(NO_ERRORS, story)
        assert item_texts(outcome) == statement_texts(story)
        assert all(item.text.startswith("On ") for item in outcome.memory.episodic) and outcome.memory.episodic
        labels = {label for text in statement_texts(story) for label in re.findall(r"Label: (\w+)\.", text)}
        assert set(re.findall(r"\w+", outcome.memory.core)) == {"Labels", *labels}
        assert outcome.counts["calls_ok"] == outcome.counts["calls"]
        assert all(turn.reply.startswith(STORE_ALL) for turn in outcome.turns)


def test_filler_in_the_shown_memory_is_deleted():
    replies = Counter()
    for seed in range(20):
        outcome = run_demonstrator(Errors(store_one=0.5, store_filler=1), STORIES[seed % len(STORIES)], seed)
        for turn in outcome.turns:
            shown = re.findall(rf"\[(\w+)\] (?:{'|'.join(map(re.escape, FILLER))})$", turn.memory, re.MULTILINE)
            deleted = [json.loads(call.partition(" ")[2])["memory_id"] for call in turn.calls if "delete" in call]
            assert deleted == (shown if turn.reply.startswith(STORE_ALL) else [])
            replies[bool(deleted)] += 1
        assert outcome.counts["calls_idle"] == outcome.counts["calls_failed"] == 0
    assert replies[True] > 20


@pytest.fixture
def tasks():
    return Tasks.open(RUN, seed=7)


def text(task, sampled=None):
    """The text of a task, or its given or trained part."""
    (context,) = task.trajectory.contexts
    kept = [id for id, flag in zip(context.ids, context.sampled, strict=True) if sampled in (None, flag)]
    return TOKENIZER.transcript(kept)


def statements(chunk):
    """The statements of a chunk, in order."""
    body = re.sub("|".join(map(re.escape, FILLER)), "", chunk.partition(". ")[2])
    return [sentence.strip() + "." for sentence in body.split(".") if sentence.strip()]


def test_answers_are_in_the_retrieved_evidence(tasks):
    questions = unknown = 0
    for example in tasks.answers(80):
        evidence, *turns = text(example).split("<|im_start|>user\n")
        facts = re.findall(r"^\d\. (.*)$", evidence.replace("<|im_end|>", ""), re.MULTILINE)
        for turn in turns:
            question, answer = re.match(r"(.*)<\|im_end\|>\n<\|im_start\|>assistant\n(.*)<\|im_end\|>", turn).groups()
            names = re.findall(r"[A-Z]\w+ [A-Z]\w+(?= work| meet|\?)", question)
            relevant = [fact for fact in facts if all(name in fact for name in names)]
            questions, unknown = questions + 1, unknown + (answer == UNKNOWN)
            assert (relevant == []) == (answer == UNKNOWN), (question, answer)
            assert answer == UNKNOWN or answer in relevant[0]
    assert questions > 150 and 0 < unknown < 20


def test_steps_share_no_statement_and_follow_the_seed():
    once, other = streams.step(RUN, 3), streams.step(RUN, 4)
    facts, other_facts = ({fact for one in step for fact in statements(chunk_of(one))} for step in (once, other))
    assert facts and not facts & other_facts
    assert max(len(one.trajectory.contexts[0].ids) for one in once) <= CONFIG.training.seq_len
    assert text(streams.step(replace(RUN, config=replace(CONFIG, seed=1)), 3)[0]) != text(once[0])


def chunk_of(example):
    match = re.search(r"user\n(\d+ \w+ \d+\. .*)<\|im_end\|>", text(example))
    return match[1] if match else ""
