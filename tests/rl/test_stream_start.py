"""The weights that the warm start for streams begins with: those of the small agent, with rows for more tokens."""

import numpy as np
import pytest

from memsearcher_jax.model import weights
from memsearcher_jax.rl import small_tokenizer, stream_start, stream_tokenizer
from memsearcher_jax.rl.stream_start import ROWS, widened
from memsearcher_jax.rl.tokens import ChatTokenizer

OLD, NEW = map(ChatTokenizer.load, (small_tokenizer.packaged_folder(), stream_tokenizer.packaged_folder()))


def test_old_rows_stay_and_new_ones_are_means_of_what_their_text_was():
    embed_VD = np.random.default_rng(0).normal(size=(OLD.vocab_size, 4)).astype(np.float32)
    wide_VD = widened(embed_VD, OLD, NEW, ROWS)
    assert wide_VD.shape == (ROWS, 4) and wide_VD.dtype == np.float32
    np.testing.assert_array_equal(wide_VD[: OLD.vocab_size], embed_VD)
    for text in (*stream_tokenizer.CALLS, " met", "January"):
        (id,) = NEW.encode_outside(text)
        np.testing.assert_allclose(wide_VD[id], embed_VD[list(OLD.encode_outside(text))].mean(axis=0), atol=1e-6)


def test_tokenizers_that_do_not_go_together():
    embed_VD = np.zeros((OLD.vocab_size, 4), np.float32)
    with pytest.raises(ValueError, match="1580 rows are too few for the 1599 tokens"):
        widened(embed_VD, OLD, NEW, 1_580)
    with pytest.raises(ValueError, match="does not go on from the one in"):
        widened(embed_VD, NEW, OLD, ROWS)


def test_the_folder_holds_a_model_of_the_right_shape(tmp_path):
    stream_start.make(tmp_path / "base")
    config, params = weights.load(tmp_path / "base", dtype="float32")
    assert config.vocab_size == len(params["embed"]) == ROWS
    assert (tmp_path / "base" / "tokenizer.json").read_bytes() == (
        stream_tokenizer.packaged_folder() / "tokenizer.json"
    ).read_bytes()
