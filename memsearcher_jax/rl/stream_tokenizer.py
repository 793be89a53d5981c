"""The tokenizer for streams that ships in `assets/tiny_memalpha`: the one of `assets/tiny` with more added tokens.

The fixed parts of a call and of a memory are one token each, so that a call is as long as what it stores and a reply of
several calls is a dozen tokens for each. So are the words of the streams that would fall to pieces. Names are left to
the syllables.

python -m memsearcher_jax.rl.stream_tokenizer [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from memsearcher_jax.data.stream_world import FIRST_DAY, IDLE, MONTHS
from memsearcher_jax.rl import small_tokenizer
from memsearcher_jax.rl.run_folder import located

_STORE = '✿FUNCTION✿: new_memory_insert\n✿ARGS✿: {{"memory_type": "{0}_memory", "content": "'
_DELETE = '✿FUNCTION✿: memory_delete\n✿ARGS✿: {{"memory_type": "{0}_memory", "memory_id": "'
_UPDATE = '✿FUNCTION✿: memory_update\n✿ARGS✿: {{"memory_type": "{0}_memory", "new_content": "'
LISTS = ("semantic", "episodic")
CALLS = (
    *(_STORE.format(store) for store in LISTS),
    *(_DELETE.format(store) for store in LISTS),
    _UPDATE.format("core"),
    '"}\n',
)
VIEWS = (
    *(f"{store}_memory" for store in ("core", *LISTS)),
    *(f"{store} memory:\n" for store in ("core", *LISTS)),
    *(":\n", " (the latest ", " of ", "Empty.", "\n\n", "[0", "] ", ".\n"),
)
_YEARS = (str(FIRST_DAY.year), str(FIRST_DAY.year + 1))
_SAID = (
    *("All of it.\n", "A part.\n", "Labels: ", "Sample: a letter about", "; Label: ", " met", " meet", "On "),
    *("On which day did ", "Which label has a letter about ", "Who does ", "Who made "),
)


def make() -> Tokenizer:
    """Returns the tokenizer, the same in every process while the one it is made of stays."""
    tokenizer = Tokenizer.from_file(str(small_tokenizer.packaged_folder() / "tokenizer.json"))
    words = dict.fromkeys(word for sentence in IDLE for word in _words(sentence))
    broken = [word for word in words if len(tokenizer.encode(word, add_special_tokens=False).ids) > 1]
    added = dict.fromkeys((*CALLS, *VIEWS, *_SAID, *MONTHS, *_YEARS, *broken))
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in added])
    return tokenizer


def packaged_folder() -> Path:
    """Where the tokenizer of the package is."""
    return located("package:tiny_memalpha")


def _words(sentence: str) -> list[str]:
    """The first as it stands, the others each with the blank before it, the last without its full stop."""
    first, *others = sentence.rstrip(".").split(" ")
    return [first, *(f" {word}" for word in others)]


if __name__ == "__main__":
    small_tokenizer.save(make(), Path(sys.argv[1]) if len(sys.argv) > 1 else packaged_folder())
