"""The small tokenizers of the packaged weights, and initial weights for the one of streams.

python -m examples.warmstart.tokenizers tiny DIR             # of assets/tiny, trained on generated text
python -m examples.warmstart.tokenizers tiny_memalpha DIR    # that of assets/tiny with more tokens
python -m examples.warmstart.tokenizers extend DIR           # the weights of assets/tiny with rows for these tokens

The first is a byte-level BPE with the chat tokens of Qwen2.5, trained on the packaged prompt templates and on
encyclopedias of many seeds with different names, so that syllables become tokens and names do not. It differs from
Qwen2.5's in two ways, so that a model of a million parameters can learn with it within an hour. Names are split at
syllables and never merged with a preceding space, quote or brace: a name has the same tokens in a question, a title, a
query and an answer, and copying it is copying ids. And the fixed parts of a reply are one token each, so that most
sampled tokens are decisions of the policy.

In the second the fixed parts of calls and of the shown memory become one token each, and so do the words of streams
that are several tokens otherwise. A small model takes long to learn copying, which the weights of assets/tiny can do;
the embedding of a new token is the mean over the tokens that its text had before.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from memsearcher_jax.data.synthetic.encyclopedia import EncyclopediaConfig, make_encyclopedia
from memsearcher_jax.data.synthetic.streams import FILLER, FIRST_DAY, MONTHS
from memsearcher_jax.launch import cli
from memsearcher_jax.model import weights
from memsearcher_jax.runs.run_dir import located
from memsearcher_jax.tokenizer import ChatTokenizer

TINY = located("package:tiny")
MEMALPHA = located("package:tiny_memalpha")
VOCAB_SIZE = 1_536  # of the first one, including the added tokens
EMBEDDING_ROWS = 1_600  # of the second one, a few more than there are tokens
ENCYCLOPEDIA_SEEDS = range(1, 65)  # without seed 0, the default of training
TEMPLATE_REPEATS = 8  # per encyclopedia, because every context contains the templates
ROLES = ("system", "user", "assistant")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = (  # added but not special, as <tool_call> in Qwen2.5, so that decoding keeps them
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<memory>", "</memory>"),
    *("<tool_response>", "</tool_response>", "<question>", "</question>", "\\boxed{"),
    *('{"name": "wikipedia_search", "arguments": {"query": "', '"}}'),
)
# A capitalised word after a syllable, with its space; a syllable; other letters, with a preceding space if lowercase; a
# digit; punctuation; line breaks; spaces.
_PRETOKENS = r"(?<=[A-Z][a-z]{2}) [A-Z][a-z]+|[A-Z][a-z]{0,2}| ?\p{Ll}+|\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|[\r\n]+|\s+"
_CALL = '✿FUNCTION✿: {}\n✿ARGS✿: {{"memory_type": "{}_memory", "{}": "'
CALL_PARTS = (
    _CALL.format("new_memory_insert", "semantic", "content"),
    _CALL.format("new_memory_insert", "episodic", "content"),
    _CALL.format("memory_delete", "semantic", "memory_id"),
    _CALL.format("memory_delete", "episodic", "memory_id"),
    _CALL.format("memory_update", "core", "new_content"),
    '"}\n',
)
_STORE_NAMES = ("core_memory", "semantic_memory", "episodic_memory")
_STORE_HEADINGS = ("core memory:\n", "semantic memory:\n", "episodic memory:\n")
_MEMORY_MARKS = (":\n", " (the latest ", " of ", "Empty.", "\n\n", "[0", "] ", ".\n")
MEMORY_PARTS = _STORE_NAMES + _STORE_HEADINGS + _MEMORY_MARKS
_STREAM_TEXTS = ("All of it.\n", "A part.\n", "Labels: ", "Sample: a letter about", "; Label: ", " met", " meet", "On ")
_STREAM_QUESTIONS = ("On which day did ", "Which label has a letter about ", "Who does ", "Who made ")
_STREAM_DATES = (*MONTHS, str(FIRST_DAY.year), str(FIRST_DAY.year + 1))
_STREAM_PARTS = _STREAM_TEXTS + _STREAM_QUESTIONS + _STREAM_DATES


def train() -> Tokenizer:
    """The tokenizer of `assets/tiny`. Training is deterministic."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(_PRETOKENS), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL) - len(MARKUP),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in MARKUP])
    return tokenizer


def extend() -> Tokenizer:
    """The tokenizer of `assets/tiny_memalpha`: that of `assets/tiny` with added tokens."""
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    words = []
    for sentence in FILLER:
        first, *others = sentence.rstrip(".").split(" ")
        words += [first, *(f" {word}" for word in others)]
    split_words = [word for word in words if len(tokenizer.encode(word, add_special_tokens=False).ids) > 1]
    added = dict.fromkeys((*CALL_PARTS, *MEMORY_PARTS, *_STREAM_PARTS, *split_words))
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in added])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer.json`, and the `tokenizer_config.json` that transformers' AutoTokenizer needs."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True) + "\n", encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": None, "eos_token": "<|im_end|>"}
    settings |= {"pad_token": "<|endoftext|>", "unk_token": None, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def extend_weights(folder: Path) -> None:
    """Write the weights of `assets/tiny` for the tokenizer of `assets/tiny_memalpha`, with it, to a new folder."""
    old, new = map(ChatTokenizer.load, (TINY, MEMALPHA))
    config, params = weights.load(TINY, dtype="float32")
    embed_VD = np.asarray(params["embed"])
    texts = [new.id_to_token(id) or "" for id in range(old.vocab_size, new.vocab_size)]
    added = [embed_VD[list(old.encode_untrusted(text))].mean(axis=0) for text in texts]
    unused = np.tile(embed_VD.mean(axis=0), (EMBEDDING_ROWS - new.vocab_size, 1))
    embed_VD = np.concatenate([embed_VD[: old.vocab_size], np.array(added), unused]).astype(np.float32)
    config = replace(config, vocab_size=EMBEDDING_ROWS)
    params = {**params, "embed": embed_VD}
    weights.save(folder, config, params, new.folder, end_ids=new.end_ids)


def _texts() -> Iterator[str]:
    """What a policy reads and writes: templates, passages, questions and answers."""
    # Added tokens are never split, so no merges are spent on them.
    markup = re.compile("|".join(map(re.escape, MARKUP)))
    # A fixed list of template sets: a new set must not change the ids that the packaged weights were trained on.
    sets = [f"{style}/{workflow}" for style in ("default", "brief", "terse") for workflow in ("memsearcher", "react")]
    root = Path(str(files("memsearcher_jax") / "agent" / "templates"))
    paths = sorted(path for name in sets for path in root.glob(f"{name}/*.txt"))
    templates = [markup.sub("\n", path.read_text(encoding="utf-8")) for path in paths]
    for seed in ENCYCLOPEDIA_SEEDS:
        encyclopedia = make_encyclopedia(EncyclopediaConfig(seed=seed))
        yield from (*templates, *ROLES) * TEMPLATE_REPEATS
        for passage in encyclopedia.passages:
            yield passage.contents
        for problem in (*encyclopedia.train, *encyclopedia.test):
            yield f" {problem.question} "
            yield problem.golden_answers[0]


def main(argv: Sequence[str]) -> None:
    makers = {"tiny": lambda folder: save(train(), folder), "tiny_memalpha": lambda folder: save(extend(), folder)}
    makers["extend"] = extend_weights
    if len(argv) != 2 or argv[0] not in makers:
        sys.exit(f"usage: python -m examples.warmstart.tokenizers {'|'.join(makers)} DIR")
    with cli.one_line_errors():
        makers[argv[0]](Path(argv[1]))


if __name__ == "__main__":
    cli.run(main)
