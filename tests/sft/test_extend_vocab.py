"""The tokenizer for streams, which makes calls and shown memories short, and the initial weights for it."""

import re

import numpy as np
import pytest

from memsearcher_jax.data.synthetic.streams import FILLER, SyntheticStreamConfig, make_stories, select_statements
from memsearcher_jax.model import weights
from memsearcher_jax.rl.tokenizer import ChatTokenizer
from memsearcher_jax.sft import extend_vocab, small_tokenizer
from memsearcher_jax.sft.extend_vocab import EMBEDDING_ROWS, extend_embedding

OLD, NEW = map(ChatTokenizer.load, (small_tokenizer.FOLDER, extend_vocab.FOLDER))
STORIES = make_stories(SyntheticStreamConfig(seed=7), 6)


def test_packaged_tokenizer_is_reproducible(tmp_path):
    small_tokenizer.save(extend_vocab.make_tokenizer(), tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (extend_vocab.FOLDER / name).read_bytes(), (
            "assets/tiny or the streams have changed: run python -m memsearcher_jax.sft.extend_vocab"
        )


def test_fixed_parts_of_calls_and_shown_memories_are_single_tokens():
    for text in (*extend_vocab.CALL_PARTS, *extend_vocab.MEMORY_PARTS):
        assert NEW.count(text) == 1, text


def test_call_is_two_tokens_longer_than_its_content():
    for statement in (one for sentences in STORIES[0].sentences_C for one in select_statements(sentences)):
        call = extend_vocab.CALL_PARTS[0] + statement.text + extend_vocab.CALL_PARTS[-1]
        assert NEW.count(call) == NEW.count(statement.text) + 2
        assert NEW.transcript(NEW.encode_untrusted(call)) == call


def test_name_has_the_same_tokens_in_every_context():
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


def test_old_embeddings_are_kept_and_new_ones_are_means():
    embed_VD = np.random.default_rng(0).normal(size=(OLD.vocab_size, 4)).astype(np.float32)
    extended_VD = extend_embedding(embed_VD, OLD, NEW, EMBEDDING_ROWS)
    assert extended_VD.shape == (EMBEDDING_ROWS, 4) and extended_VD.dtype == np.float32
    np.testing.assert_array_equal(extended_VD[: OLD.vocab_size], embed_VD)
    for text in (*extend_vocab.CALL_PARTS, " met", "January"):
        (id,) = NEW.encode_untrusted(text)
        np.testing.assert_allclose(extended_VD[id], embed_VD[list(OLD.encode_untrusted(text))].mean(axis=0), atol=1e-6)


def test_incompatible_tokenizers_are_errors():
    embed_VD = np.zeros((OLD.vocab_size, 4), np.float32)
    with pytest.raises(ValueError, match="1580 rows are too few for the 1599 tokens"):
        extend_embedding(embed_VD, OLD, NEW, 1_580)
    with pytest.raises(ValueError, match="does not extend the one in"):
        extend_embedding(embed_VD, NEW, OLD, EMBEDDING_ROWS)


def test_written_folder_is_a_model_with_the_tokenizer(tmp_path):
    extend_vocab.write_model(tmp_path / "base")
    config, params = weights.load(tmp_path / "base", dtype="float32")
    assert config.vocab_size == len(params["embed"]) == EMBEDDING_ROWS
    written = (tmp_path / "base" / "tokenizer.json").read_bytes()
    assert written == (extend_vocab.FOLDER / "tokenizer.json").read_bytes()
