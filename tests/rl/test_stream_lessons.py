"""Lessons about streams: what is trained follows from what stands before it, and reads as it will read in a rollout."""

import re
from dataclasses import replace

import cli
import numpy as np
import pytest

from memsearcher_jax.agent import memalpha_prompts
from memsearcher_jax.agent.memalpha_tools import tool_calls
from memsearcher_jax.data.stream_demonstrator import PART, WHOLE, StreamErrors
from memsearcher_jax.data.stream_world import IDLE
from memsearcher_jax.rl import build, stream_tokenizer
from memsearcher_jax.rl.stream_lessons import UNKNOWN, StreamLessons
from memsearcher_jax.rl.tokens import ChatTokenizer

TOKENIZER = ChatTokenizer.load(stream_tokenizer.packaged_folder())
CONFIG = cli.load_preset("tiny_memalpha_warmstart")
PROMPTS = memalpha_prompts.load(CONFIG.agent)
LESSONS = StreamLessons(build.Run(CONFIG, None, TOKENIZER, PROMPTS, None, None))
FAULTLESS = StreamErrors(keep_part=0)


@pytest.fixture
def school():
    return LESSONS._school(7)


def text(sample, mask):
    return TOKENIZER.transcript(sample.ids[mask].tolist())


def whole(sample):
    return TOKENIZER.transcript(sample.ids.tolist())


def parts(sample):
    """The memory, the chunk and the reply of a lesson in reading."""
    found = re.fullmatch(
        r"<\|im_start\|>system\n(.*)<\|im_end\|>\n<\|im_start\|>user\n(.*)<\|im_end\|>\n<\|im_start\|>assistant\n"
        r"(.*)<\|im_end\|>",
        whole(sample),
        re.DOTALL,
    )
    return found.groups()


def contents(reply):
    return re.findall(r'"content": "(.*?)"}', reply)


def sentences(chunk):
    """Those of a chunk that can be asked about, in their order."""
    told = re.sub("|".join(map(re.escape, IDLE)), "", chunk.partition(". ")[2])
    return [one.strip() + "." for one in told.split(".") if one.strip()]


def test_a_faultless_reply_stores_the_chunk_and_cleans_what_the_memory_shows(school):
    deleted = 0
    for sample in school.demonstrations(FAULTLESS, 60):
        shown, chunk, reply = parts(sample)
        assert reply.startswith(WHOLE) and contents(reply) == sentences(chunk)
        idle = re.findall(rf"\[(\w+)\] (?:{'|'.join(map(re.escape, IDLE))})", shown)
        assert re.findall(r'"memory_id": "(\w+)"', reply) == idle
        known = set(re.findall(r"\w+", shown.partition("semantic")[0].partition("Labels: ")[2]))
        new = [label for label in re.findall(r"Label: (\w+)", chunk) if label not in known]
        assert ("new_content" in reply) == bool(new)
        assert len(tool_calls(reply)) == len(sentences(chunk)) + len(idle) + bool(new)
        deleted += len(idle)
    assert deleted > 5


def test_memories_are_as_large_as_those_of_short_and_of_long_streams(school):
    counts = [
        int((re.search(r"semantic_memory \(the latest 1 of (\d+)\)", whole(sample)) or [0, 1])[1])
        for sample in school.demonstrations(FAULTLESS, 80)
    ]
    assert min(counts) <= 1 and sum(count < 20 for count in counts) > 15 and max(counts) > 100


def test_a_demonstration_is_trained_from_its_first_word_on_and_errs_as_often_as_it_should(school):
    begun = []
    for sample in school.demonstrations(StreamErrors(keep_part=0.7, keep_idle=0.5), 200):
        said = text(sample, sample.sampled)
        assert parts(sample)[2] + "<|im_end|>" == said
        begun.append(said.startswith(PART))
        if begun[-1]:
            (stored,) = contents(said)
            assert stored in parts(sample)[1]
    assert 0.58 < sum(begun) / len(begun) < 0.82


def test_what_is_decided_in_a_reading_is_given(school):
    for sample in school.readings(10):
        assert whole(sample).partition(WHOLE)[2] == text(sample, sample.sampled)


def test_a_recitation_stores_what_it_follows(school):
    for sample in school.recitations(20):
        chunk, said = text(sample, ~sample.sampled), text(sample, sample.sampled)
        assert contents(said) == sentences(chunk.rstrip("\n"))


def test_a_repetition_tells_the_same_again_and_gives_nothing_away_but_the_beginning(school):
    for sample in school.repetitions(20):
        told = whole(sample).split(". ")[:-1]
        first, second = told[: len(told) // 2], told[len(told) // 2 :]
        assert sorted(first) == sorted(second)
        assert not sample.sampled[: len(sample.ids) // 2 - 1].any()
        runs = np.flatnonzero(np.diff(sample.sampled.astype(int)) == 1) + 1
        assert len(runs) == len(second)
        for start in runs:
            begun = TOKENIZER.transcript(sample.ids[:start].tolist()).rpartition(". ")[2]
            assert re.search(r"[A-Z][a-z]+$", begun) and not re.search(r"(?!The )[A-Z][a-z]+ [A-Z]", begun)


def test_every_answer_of_an_interview_stands_in_what_was_found(school):
    asked = unknown = 0
    for sample in school.interviews(80):
        found, *turns = whole(sample).split("<|im_start|>user\n")
        facts = re.findall(r"^\d\. (.*)$", found.replace("<|im_end|>", ""), re.MULTILINE)
        for turn in turns:
            question, answer = re.match(r"(.*)<\|im_end\|>\n<\|im_start\|>assistant\n(.*)<\|im_end\|>", turn).groups()
            names = re.findall(r"[A-Z]\w+ [A-Z]\w+(?= work| meet|\?)", question)
            about = [fact for fact in facts if all(name in fact for name in names)]
            asked, unknown = asked + 1, unknown + (answer == UNKNOWN)
            assert (about == []) == (answer == UNKNOWN), (question, answer)
            assert answer == UNKNOWN or answer in about[0]
    assert asked > 150 and 0 < unknown < 20


def test_what_is_measured_is_the_part_that_a_policy_should_be_sure_of():
    measured = LESSONS.measured()
    assert {text(sample, sample.sampled) for sample in measured["whole"]} == {WHOLE}
    assert all(text(sample, sample.sampled).count("✿FUNCTION✿") >= 2 for sample in measured["calls"])
    assert all(re.match(r"\d+ \w+ 203\d", text(sample, sample.sampled)) for sample in measured["answer/event"])
    assert min(map(len, measured.values())) > 10


def test_a_step_has_the_same_lessons_whenever_it_is_asked_for_and_no_name_of_another():
    once, again, other = (LESSONS.of_step(step)[0] for step in (3, 3, 4))
    assert [one.ids.tolist() for one in once] == [one.ids.tolist() for one in again]
    facts, others = ({fact for one in step for fact in sentences(_chunk(one))} for step in (once, other))
    assert facts and not facts & others
    assert max(len(one.ids) for one in once) <= CONFIG.training.row_tokens


def _chunk(sample):
    found = re.search(r"user\n(\d+ \w+ \d+\. .*)<\|im_end\|>", whole(sample))
    return found[1] if found else ""


def test_another_seed_has_other_lessons():
    other = replace(CONFIG, seed=1)
    lessons = StreamLessons(replace(LESSONS.run, config=other))
    assert lessons.of_step(0)[0][0].ids.tolist() != LESSONS.of_step(0)[0][0].ids.tolist()
