"""The script that reads streams: faultless it stores all that is asked; each kind of error does what its name says."""

import json
import random
import re
from collections import Counter

from memsearcher_jax.agent import memalpha_prompts
from memsearcher_jax.agent.memalpha import memalpha
from memsearcher_jax.agent.memalpha_config import MemalphaConfig
from memsearcher_jax.agent.play import play
from memsearcher_jax.agent.types import AgentConfig
from memsearcher_jax.data.stream_demonstrator import PART, WHOLE, StreamDemonstrator, StreamErrors
from memsearcher_jax.data.stream_world import IDLE, StreamConfig, make_stories

STORIES = make_stories(StreamConfig(seed=3, facts=3, idle=1), 6)
AGENT = AgentConfig(workflow="memalpha", prompts="terse_memalpha", memory_tokens=300)
PROMPTS = memalpha_prompts.load(AGENT)


class Words:
    """A ruler that counts words."""

    def count(self, text):
        return len(text.split())

    def clip(self, text, limit):
        return text if self.count(text) <= limit else " ".join(text.split()[:limit])


def read(errors: StreamErrors, story=STORIES[0], seed: int = 0):
    script = StreamDemonstrator(story, errors, random.Random(seed))
    config = MemalphaConfig(core_tokens=64)
    workflow = memalpha(story.stream, agent=AGENT, config=config, prompts=PROMPTS, ruler=Words())
    return play(workflow, script, lambda find: ())


def items(outcome):
    return {item.text for item in (*outcome.memory.semantic, *outcome.memory.episodic)}


def statements(story):
    return {one.text for sentences in story.sentences_C for one in sentences if one.question}


def test_without_errors_everything_that_can_be_asked_is_stored_where_it_belongs():
    for story in STORIES:
        outcome = read(StreamErrors(keep_part=0), story)
        assert items(outcome) == statements(story)
        assert all(item.text.startswith("On ") for item in outcome.memory.episodic) and outcome.memory.episodic
        labels = {label for text in statements(story) for label in re.findall(r"Label: (\w+)\.", text)}
        assert set(re.findall(r"\w+", outcome.memory.core)) == {"Labels", *labels}
        assert outcome.counts["calls_ok"] == outcome.counts["calls"]
        assert all(turn.reply.startswith(WHOLE) for turn in outcome.turns)


def test_who_is_content_with_a_part_stores_one_sentence_of_each_chunk():
    for keep_idle in (0.0, 1.0):
        for story in STORIES:
            outcome = read(StreamErrors(keep_part=1, keep_idle=keep_idle), story)
            assert all(turn.reply.startswith(PART) and len(turn.calls) == 1 for turn in outcome.turns)
            stored = items(outcome)
            assert stored <= set(IDLE) if keep_idle else stored <= statements(story) and len(stored) == 10
            for turn, chunk in zip(outcome.turns, story.stream.chunks, strict=True):
                assert json.loads(turn.calls[0].partition(" ")[2])["content"] in chunk


def test_what_is_idle_is_deleted_when_it_is_seen_again():
    replies = Counter()
    for seed in range(20):
        outcome = read(StreamErrors(keep_part=0.5, keep_idle=1), STORIES[seed % len(STORIES)], seed)
        for turn in outcome.turns:
            seen = re.findall(rf"\[(\w+)\] (?:{'|'.join(map(re.escape, IDLE))})$", turn.memory, re.MULTILINE)
            deleted = [json.loads(call.partition(" ")[2])["memory_id"] for call in turn.calls if "delete" in call]
            assert deleted == (seen if turn.reply.startswith(WHOLE) else [])
            replies[bool(deleted)] += 1
        assert outcome.counts["calls_idle"] == outcome.counts["calls_failed"] == 0
    assert replies[True] > 20


def test_the_same_seed_reads_alike():
    once, again, other = (read(StreamErrors(), seed=seed) for seed in (1, 1, 2))
    assert once == again != other
