"""Trains the small tokenizer that ships beside the small weights in `assets/tiny`, from text that this package makes.

It is a byte-level BPE with the chat tokens of Qwen2.5, so that any text survives, and speaks the language of the
packaged templates and of the embedded world. It sees many worlds of other seeds, each with names of its own, so that
syllables become tokens and whole names do not. It lives here, in the room that knows all others and `tokenizers`,
because it reads both the world and the templates.

Two things are unlike Qwen2.5, because a model of a million weights must learn with it in an hour. A name is cut at its
syllables and never takes the blank, quote or brace before it along: so it has the same tokens in a question, a title,
a call and a box, and copying it is copying ids. And the fixed parts of a reply are one token each: what is sampled is
then mostly what the policy decides.

python -m memsearcher_jax.rl.small_tokenizer [FOLDER]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from memsearcher_jax.data.world import WorldConfig, make_world
from memsearcher_jax.rl.run_folder import located

VOCABULARY = 1_536  # ids, the added tokens included
WORLDS = range(1, 65)  # seeds; the world of seed 0, where training happens by default, is not among them
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = (  # added and not special, as <tool_call> is in Qwen2.5: decoding keeps them
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<memory>", "</memory>"),
    *("<tool_response>", "</tool_response>", "<question>", "</question>", "\\boxed{"),
    *('{"name": "wikipedia_search", "arguments": {"query": "', '"}}'),
)

SAID_OFTEN = 8  # how often each world's texts are joined by the templates, which every context holds
ROLES = ("system", "user", "assistant")

# A name that follows a syllable, with its blank; a capital with two letters; other letters, with a blank in front if
# they are small; digits; marks; line ends; blanks.
_PIECES = r"(?<=[A-Z][a-z]{2}) [A-Z][a-z]+|[A-Z][a-z]{0,2}| ?\p{Ll}+|\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|[\r\n]+|\s+"


def train() -> Tokenizer:
    """Return the tokenizer, the same to the last bit in every process."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL) - len(MARKUP),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in MARKUP])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer.json` and the settings that transformers' AutoTokenizer reads."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True) + "\n", encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def packaged_folder() -> Path:
    """Where the tokenizer of the package is."""
    return located("package:tiny")


def _texts() -> Iterator[str]:
    """What a policy reads and writes: templates, passages, questions, calls, boxed answers."""
    wording = [path.read_text(encoding="utf-8") for path in _templates()]
    for seed in WORLDS:
        world = make_world(WorldConfig(seed=seed))
        yield from (*map(_without_markup, wording), *ROLES) * SAID_OFTEN
        for passage in world.passages:
            yield passage.contents
        for problem in (*world.train, *world.test):
            yield f" {problem.question} "
            yield problem.golden_answers[0]


def _templates() -> list[Path]:
    """By name: weights were trained on these ids, and a set that the package gets later must not change them."""
    root = Path(str(files("memsearcher_jax") / "agent" / "templates"))
    sets = [style + workflow for workflow in ("", "_react") for style in ("brief", "terse")]
    return sorted(path for name in ("memsearcher", "react", *sets) for path in root.glob(f"{name}/*.txt"))


def _without_markup(text: str) -> str:
    """The added tokens are never cut into pieces, so no merge is spent on them."""
    for token in MARKUP:
        text = text.replace(token, "\n")
    return text


if __name__ == "__main__":
    save(train(), Path(sys.argv[1]) if len(sys.argv) > 1 else packaged_folder())
