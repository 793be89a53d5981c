"""The scripted stream policy stores all statements without errors, and each kind of error has its effect alone."""

import json
import random
import re
from collections import Counter

from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.agent.memalpha import prompts
from memsearcher_jax.agent.memalpha.config import MemalphaConfig
from memsearcher_jax.agent.memalpha.workflow import memalpha
from memsearcher_jax.agent.run import run_workflow
from memsearcher_jax.data.synthetic.streams import FILLER, SyntheticStreamConfig, make_stories, select_statements
from memsearcher_jax.sft.config import NO_ERRORS, SFTConfig
from memsearcher_jax.sft.stream_demonstrator import STORE_ALL, STORE_ONE, StreamDemonstrator

STORIES = make_stories(SyntheticStreamConfig(seed=3, statements=3, filler=1), 6)
AGENT = AgentConfig(workflow="memalpha", prompts="terse_memalpha", memory_tokens=300)
PROMPTS = prompts.load(AGENT)


class WordCounter:
    def count(self, text):
        return len(text.split())

    def clip(self, text, limit):
        return text if self.count(text) <= limit else " ".join(text.split()[:limit])


def run_demonstrator(errors: SFTConfig, story=STORIES[0], seed: int = 0):
    policy = StreamDemonstrator(story, errors, random.Random(seed))
    config = MemalphaConfig(core_tokens=64)
    workflow = memalpha(story.stream, agent=AGENT, config=config, prompts=PROMPTS, token_counter=WordCounter())
    return run_workflow(workflow, policy, lambda request: ())


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


def test_store_one_error_stores_one_sentence_of_each_chunk():
    for store_filler in (0.0, 1.0):
        for story in STORIES:
            outcome = run_demonstrator(SFTConfig(store_one=1, store_filler=store_filler), story)
            assert all(turn.reply.startswith(STORE_ONE) and len(turn.calls) == 1 for turn in outcome.turns)
            stored = item_texts(outcome)
            assert stored <= set(FILLER) if store_filler else stored <= statement_texts(story) and len(stored) == 10
            for turn, chunk in zip(outcome.turns, story.stream.chunks, strict=True):
                assert json.loads(turn.calls[0].partition(" ")[2])["content"] in chunk


def test_filler_in_the_shown_memory_is_deleted():
    replies = Counter()
    for seed in range(20):
        outcome = run_demonstrator(SFTConfig(store_one=0.5, store_filler=1), STORIES[seed % len(STORIES)], seed)
        for turn in outcome.turns:
            shown = re.findall(rf"\[(\w+)\] (?:{'|'.join(map(re.escape, FILLER))})$", turn.memory, re.MULTILINE)
            deleted = [json.loads(call.partition(" ")[2])["memory_id"] for call in turn.calls if "delete" in call]
            assert deleted == (shown if turn.reply.startswith(STORE_ALL) else [])
            replies[bool(deleted)] += 1
        assert outcome.counts["calls_idle"] == outcome.counts["calls_failed"] == 0
    assert replies[True] > 20


def test_replies_depend_only_on_the_seed():
    once, again, other = (run_demonstrator(SFTConfig(), seed=seed) for seed in (1, 1, 2))
    assert once == again != other
