"""The tokenizer of streams: calls and views are few tokens, and names are the same wherever they stand."""

import re

from memsearcher_jax.data.stream_world import IDLE, StreamConfig, make_stories
from memsearcher_jax.rl import small_tokenizer, stream_tokenizer
from memsearcher_jax.rl.tokens import ChatTokenizer

TOKENIZER = ChatTokenizer.load(stream_tokenizer.packaged_folder())
STORIES = make_stories(StreamConfig(seed=7), 6)


def test_the_packaged_files_are_what_the_module_makes(tmp_path):
    small_tokenizer.save(stream_tokenizer.make(), tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (stream_tokenizer.packaged_folder() / name).read_bytes(), (
            "assets/tiny or the streams have changed: run python -m memsearcher_jax.rl.stream_tokenizer"
        )


def test_the_fixed_parts_of_calls_and_views_are_single_tokens():
    for text in (*stream_tokenizer.CALLS, *stream_tokenizer.VIEWS):
        assert TOKENIZER.count(text) == 1, text


def test_a_call_costs_two_tokens_more_than_what_it_stores():
    for sentence in (one for sentences in STORIES[0].sentences_C for one in sentences if one.question):
        call = stream_tokenizer.CALLS[0] + sentence.text + stream_tokenizer.CALLS[-1]
        assert TOKENIZER.count(call) == TOKENIZER.count(sentence.text) + 2
        assert TOKENIZER.transcript(TOKENIZER.encode_outside(call)) == call


def test_a_name_has_the_same_tokens_wherever_it_stands():
    """So that copying a name is copying ids."""
    text = " ".join(chunk for story in STORIES for chunk in story.stream.chunks)
    names = set(re.findall(r"(?!The )[A-Z]\w+ [A-Z]\w+(?= works| met)", text))
    assert len(names) > 50
    for name in names:
        alone = TOKENIZER.encode_outside(name)
        for frame in (
            "{}",
            "5 May 2030. {} works for X.",
            '"content": "{} met',
            "Who does {} work for?",
            "[0001] {}\n",
        ):
            ids = TOKENIZER.encode_outside(frame.format(name))
            assert any(ids[start : start + len(alone)] == alone for start in range(len(ids))), (name, frame)
    assert sum(map(TOKENIZER.count, names)) / len(names) < 2.1


def test_idle_sentences_are_words():
    for sentence in IDLE:
        assert TOKENIZER.count(sentence) == len(sentence.split()) + 1
