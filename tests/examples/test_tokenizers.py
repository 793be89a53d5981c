"""The small tokenizers of the packaged weights, and the initial weights for the one of streams."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from examples.warmstart import tokenizers
from examples.warmstart.tokenizers import CALL_PARTS, EMBEDDING_ROWS, MEMALPHA, MEMORY_PARTS, TINY
from memsearcher_jax.data.synthetic.encyclopedia import EncyclopediaConfig, make_encyclopedia
from memsearcher_jax.data.synthetic.streams import FILLER, SyntheticStreamConfig, make_stories, select_statements
from memsearcher_jax.model import weights
from memsearcher_jax.rl.tokenizer import ChatTokenizer

TOKENIZER = Tokenizer.from_file(str(TINY / "tokenizer.json"))
OLD, NEW = map(ChatTokenizer.load, (TINY, MEMALPHA))
STORIES = make_stories(SyntheticStreamConfig(seed=7), 6)
ENCYCLOPEDIA = make_encyclopedia(EncyclopediaConfig(seed=0))
CHAT = '<|im_start|>assistant\n<think>a</think>\n<tool_call>{"name": "x"}</tool_call><|im_end|>'


@pytest.mark.parametrize(("name", "packaged"), [("tiny", TINY), ("tiny_memalpha", MEMALPHA)])
def test_packaged_tokenizers_are_reproducible(name, packaged, tmp_path):
    tokenizers.main([name, str(tmp_path)])
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / file).read_bytes() == (packaged / file).read_bytes(), "what it was made from has changed"


def test_wrong_words_are_answered_with_the_usage(tmp_path):
    with pytest.raises(SystemExit, match=r"usage: .* tiny\|tiny_memalpha\|extend DIR"):
        tokenizers.main(["large", str(tmp_path)])


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_round_trips(text):
    normal = TOKENIZER.normalizer.normalize_str(text)
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == normal


def test_chat_tokens():
    assert TOKENIZER.get_vocab_size() == tokenizers.VOCAB_SIZE
    ids = {token: TOKENIZER.token_to_id(token) for token in (*tokenizers.SPECIAL, *tokenizers.MARKUP)}
    assert sorted(ids.values()) == list(range(tokenizers.VOCAB_SIZE - len(ids), tokenizers.VOCAB_SIZE))
    encoded = TOKENIZER.encode(CHAT).ids
    assert (encoded[0], encoded[-1], encoded[-2]) == (ids["<|im_start|>"], ids["<|im_end|>"], ids["</tool_call>"])
    assert TOKENIZER.decode(encoded) == CHAT.removeprefix("<|im_start|>").removesuffix("<|im_end|>")


def test_a_name_has_the_same_tokens_in_every_text():
    """So that copying a name is copying ids."""
    for name in ENCYCLOPEDIA.entities:
        name_ids = TOKENIZER.encode(name).ids
        for text in (
            f'"{name}"\n',
            f"Where is {name} based?",
            f"{name}'s",
            f'"query": "{name}"}}}}',
            f"\\boxed{{{name}}}.",
        ):
            ids = TOKENIZER.encode(text).ids
            assert any(ids[start : start + len(name_ids)] == name_ids for start in range(len(ids))), (name, text)


def test_fixed_parts_of_replies_are_single_tokens():
    reply = '<think>a</think>\n<tool_call>{"name": "wikipedia_search", "arguments": {"query": "b"}}</tool_call>'
    assert len(TOKENIZER.encode(reply).ids) == 9
    assert TOKENIZER.decode(TOKENIZER.encode(reply).ids) == reply


def test_encyclopedia_takes_few_tokens():
    """Measured: 42 tokens per passage, 13 per question, 2.7 per name, with a seed that was not trained on."""

    def mean(texts):
        return sum(len(TOKENIZER.encode(text).ids) for text in texts) / len(texts)

    assert mean([passage.contents for passage in ENCYCLOPEDIA.passages]) < 46
    assert mean([problem.question for problem in ENCYCLOPEDIA.test]) < 15
    assert 2 <= mean(ENCYCLOPEDIA.entities) < 3
    vocabulary = {token.replace("Ġ", " ").strip() for token in TOKENIZER.get_vocab()}
    assert not vocabulary & set(ENCYCLOPEDIA.entities), "a name that is one token could only be memorised"


@pytest.mark.parity
def test_transformers_loads_the_same_tokenizer():
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(TINY)
    assert (reference.eos_token, reference.pad_token) == ("<|im_end|>", "<|endoftext|>")
    for text in (CHAT, "Zoë 漢字 \U0001f600 don't  \n\n x 12"):
        assert reference(text)["input_ids"] == TOKENIZER.encode(text).ids
        assert reference.decode(reference(text)["input_ids"]) == text


def test_fixed_parts_of_calls_and_shown_memories_are_single_tokens():
    for text in (*CALL_PARTS, *MEMORY_PARTS):
        assert NEW.count(text) == 1, text


def test_call_is_two_tokens_longer_than_its_content():
    for statement in (one for sentences in STORIES[0].sentences_C for one in select_statements(sentences)):
        call = CALL_PARTS[0] + statement.text + CALL_PARTS[-1]
        assert NEW.count(call) == NEW.count(statement.text) + 2
        assert NEW.transcript(NEW.encode_untrusted(call)) == call


def test_a_name_of_a_stream_has_the_same_tokens_everywhere():
    """So that copying a name is copying ids."""
    text = " ".join(chunk for story in STORIES for chunk in story.stream.chunks)
    names = set(re.findall(r"(?!The )[A-Z]\w+ [A-Z]\w+(?= works| met)", text))
    assert len(names) > 50
    for name in names:
        name_ids = NEW.encode_untrusted(name)
        for frame in (
            "{}",
            "5 May 2030. {} works for X.",
            '"content": "{} met',
            "Who does {} work for?",
            "[0001] {}\n",
        ):
            ids = NEW.encode_untrusted(frame.format(name))
            assert any(ids[start : start + len(name_ids)] == name_ids for start in range(len(ids))), (name, frame)
    assert sum(map(NEW.count, names)) / len(names) < 2.1


def test_filler_has_one_token_per_word():
    for sentence in FILLER:
        assert NEW.count(sentence) == len(sentence.split()) + 1


def test_the_extended_weights_keep_old_embeddings_and_new_ones_are_means(tmp_path):
    tokenizers.main(["extend", str(tmp_path / "base")])
    config, params = weights.load(tmp_path / "base", dtype="float32")
    embed_VD = np.asarray(params["embed"])
    old_VD = np.asarray(weights.load(TINY, dtype="float32")[1]["embed"])[: OLD.vocab_size]
    assert config.vocab_size == len(embed_VD) == EMBEDDING_ROWS >= NEW.vocab_size
    np.testing.assert_array_equal(embed_VD[: OLD.vocab_size], old_VD)
    for text in (*CALL_PARTS, " met", "January"):
        (id,) = NEW.encode_untrusted(text)
        np.testing.assert_allclose(embed_VD[id], old_VD[list(OLD.encode_untrusted(text))].mean(axis=0), atol=1e-6)
    assert (tmp_path / "base" / "tokenizer.json").read_bytes() == (MEMALPHA / "tokenizer.json").read_bytes()
