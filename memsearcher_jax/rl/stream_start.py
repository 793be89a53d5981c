"""What the warm start for streams begins with: the weights of `assets/tiny` with rows for the tokens that streams add.

Copying takes a small model long to learn, and that one can copy, names of the same syllables among them. The row of a
new token is the mean of the rows that its text had before.

python -m memsearcher_jax.rl.stream_start FOLDER
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from memsearcher_jax.model import weights
from memsearcher_jax.rl import small_tokenizer, stream_tokenizer
from memsearcher_jax.rl.tokens import ChatTokenizer

ROWS = 1_600  # of the table of tokens: a few are left over


def widened(embed_VD: np.ndarray, old: ChatTokenizer, new: ChatTokenizer, rows: int) -> np.ndarray:
    """float32 [rows, D]: the table with a row for each token of `new`, whose first ids are those of `old`.

    Raises ValueError if they are not, or if there are too few rows.
    """
    if new.vocab_size > rows:
        raise ValueError(f"{rows} rows are too few for the {new.vocab_size} tokens of {new.folder}")
    texts = [new.text_of(id) for id in range(new.vocab_size)]
    if texts[: old.vocab_size] != [old.text_of(id) for id in range(old.vocab_size)]:
        raise ValueError(f"the tokenizer in {new.folder} does not go on from the one in {old.folder}")
    added = [embed_VD[list(old.encode_outside(text))].mean(axis=0) for text in texts[old.vocab_size :]]
    unused = np.tile(embed_VD.mean(axis=0), (rows - new.vocab_size, 1))
    return np.concatenate([embed_VD[: old.vocab_size], np.array(added), unused]).astype(np.float32)


def make(folder: Path) -> None:
    """Writes the weights and the tokenizer as a Hugging Face folder. Raises OSError if it cannot."""
    old, new = map(ChatTokenizer.load, (small_tokenizer.packaged_folder(), stream_tokenizer.packaged_folder()))
    config, params = weights.load(small_tokenizer.packaged_folder(), dtype="float32")
    params = {**params, "embed": widened(np.asarray(params["embed"]), old, new, ROWS)}
    weights.save(folder, replace(config, vocab_size=ROWS), params, new.folder, end_ids=new.end_ids)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
