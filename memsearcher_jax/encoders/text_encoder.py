"""Text embeddings from a transformer: tokenizer, batches and devices. `encoders.bert` computes the arrays.

The texts of a call are sorted by length and encoded in blocks of a few fixed shapes, so that a short text is not padded
to a long one and few programs are compiled. The rows of a block are split over the devices, each of which stores all
weights. A vector depends on the shape of its block in its last bits.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from tokenizers import Tokenizer

from memsearcher_jax.encoders import bert
from memsearcher_jax.encoders.bert import EncoderConfig, Params
from memsearcher_jax.model import sharding
from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.retrieval.config import HASHING, RetrievalConfig
from memsearcher_jax.retrieval.hashing_encoder import TextEncoder
from memsearcher_jax.types import encodable

E5_PROMPTS = ("query: ", "passage: ")
E5_NAME = re.compile(r"e5-\w+-v2|(multilingual-)?e5-(small|base|large)(-unsupervised)?", re.IGNORECASE)
"""The models of intfloat on the Hub that were trained with these prompts; those that follow instructions were not."""


class Override(NamedTuple):
    """The setting of tokenizer.json that transformers replaces by a key of tokenizer_config.json."""

    part: str  # of tokenizer.json
    type: str  # of that part; parts of other types are not changed
    key: str  # in that part
    default: bool | None  # where tokenizer_config.json lacks its key


OVERRIDES = {
    "do_lower_case": Override("normalizer", "BertNormalizer", "lowercase", True),
    "strip_accents": Override("normalizer", "BertNormalizer", "strip_accents", None),
    "tokenize_chinese_chars": Override("normalizer", "BertNormalizer", "handle_chinese_chars", True),
    "add_prefix_space": Override("pre_tokenizer", "ByteLevel", "add_prefix_space", False),
}
"""By key of tokenizer_config.json."""
MIN_BLOCK_LEN = 32  # tokens per row of the narrowest block; the widths of blocks double
BLOCK_TOKENS = 8_192  # tokens of a full block on one device
PARTIAL_BLOCK_ROWS = (1, 8, 64)  # rows on one device of blocks that are not full

_encode = jax.jit(bert.encode, static_argnames="config")


def embed(
    texts: list[str], *, config: EncoderConfig, params: Params, mesh: Mesh, prompt: str, tokenizer: Tokenizer
) -> np.ndarray:
    """Float32 [len(texts), D] of norm 1; zeros for a blank text.

    Args:
      params: the tree of `bert.param_specs`, on every device of `mesh`.
      prompt: comes before every text.
      tokenizer: truncates.
    """
    out_BD = np.zeros((len(texts), config.embed_size), np.float32)
    kept = np.array([row for row, text in enumerate(texts) if text.strip()], np.int64)
    # JSON may contain lone surrogates, which the tokenizer rejects.
    valid = [(prompt + encodable(texts[row])).strip() for row in kept]  # as sentence-transformers does
    if config.lower_case:
        valid = [text.lower() for text in valid]
    limit = tokenizer.truncation["max_length"]  # pyright: ignore[reportOptionalSubscript] (always set)
    token_ids = [encoding.ids for encoding in tokenizer.encode_batch_fast(valid)]
    ids_sharding = sharding.named_sharding(mesh, ("batch", None))
    length_sharding = sharding.named_sharding(mesh, ("batch",))
    with jax.set_mesh(mesh):
        # All blocks are dispatched before the first result is read: the host pads while the devices compute.
        results = list[tuple[np.ndarray, jax.Array]]()
        for block in _blocks(token_ids, limit, config.pad_id, mesh.size):
            arrays = (block.ids_BT, block.length_B)
            ids_BT, length_B = jax.device_put(arrays, (ids_sharding, length_sharding))
            results.append((block.rows, _encode(params, config, ids_BT, length_B)))
        for rows, vector_BD in results:
            out_BD[kept[rows]] = np.asarray(vector_BD)[: len(rows)]
    return out_BD


@dataclass(frozen=True)
class Block:
    """Texts that are encoded in one call, padded to one of a few shapes; B may exceed the number of texts."""

    rows: np.ndarray  # numbers of the texts
    ids_BT: np.ndarray
    length_B: np.ndarray


def _blocks(token_ids: list[list[int]], limit: int, pad_id: int, devices: int) -> Iterator[Block]:
    """The blocks of all texts, the longest texts first."""
    lengths = np.array([len(ids) for ids in token_ids], np.int64)
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        longest = int(lengths[order[start]])
        doubled = MIN_BLOCK_LEN << ((longest - 1) // MIN_BLOCK_LEN).bit_length()
        width = max(min(doubled, limit), longest)
        full = max(BLOCK_TOKENS // width, 1)
        sizes = [rows * devices for rows in (*PARTIAL_BLOCK_ROWS, full) if rows <= full]
        rows = order[start : start + sizes[-1]]
        size = min(size for size in sizes if size >= len(rows))
        ids_BT = np.full((size, width), pad_id, np.int32)
        length_B = np.ones(size, np.int32)
        length_B[: len(rows)] = lengths[rows]
        for number, row in enumerate(rows):
            ids_BT[number, : lengths[row]] = token_ids[row]
        yield Block(rows, ids_BT, length_B)
        start += len(rows)


def load(config: RetrievalConfig) -> TextEncoder:
    """The encoder in the Hugging Face folder `config.encoder`, on this host's devices.

    Raises FileNotFoundError or ValueError, in one line, for an incomplete folder or one not of the BERT family.
    """
    if not config.encoder:
        raise ValueError(f"retrieval.encoder is missing: give the folder of E5, or {HASHING}")
    shape, params = bert.load(config.encoder)
    folder = Path(config.encoder)
    shape = with_prompts(shape, folder, config.encoder_prompts)
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"no tokenizer.json in {folder}: write one with transformers' AutoTokenizer")
    try:
        tokenizer_json = file.read_text(encoding="utf-8")
        tokenizer = Tokenizer.from_str(tokenizer_json)
        largest = max(tokenizer.get_vocab().values())
    except Exception as error:  # the library raises no more specific exception
        raise ValueError(f"{file} is not a tokenizer: {error}") from error
    if largest >= shape.vocab_size:
        raise ValueError(f"{file} contains id {largest}, but the vocabulary of the encoder has {shape.vocab_size}")
    if not tokenizer.num_special_tokens_to_add(is_pair=False):
        raise ValueError(f"{file} adds no special tokens to a text: write it with transformers' AutoTokenizer")
    _check_overrides(folder, json.loads(tokenizer_json))
    mesh = sharding.make_mesh(MeshConfig(data=-1, fsdp=1, tensor=1), jax.local_devices())
    placed = jax.device_put(params, sharding.named_sharding(mesh, ()))

    def embedder(prompt: str, max_tokens: int) -> Callable[[list[str]], np.ndarray]:
        tokenizer = _truncating_tokenizer(tokenizer_json, min(max_tokens, shape.max_tokens))
        return partial(embed, config=shape, params=placed, mesh=mesh, prompt=prompt, tokenizer=tokenizer)

    passages = embedder(shape.passage_prompt, config.max_passage_tokens)
    queries = embedder(shape.query_prompt, config.max_query_tokens)
    return TextEncoder(_encoder_name(shape, params, tokenizer_json), passages, queries)


def _check_overrides(folder: Path, tokenizer: dict[str, Any]) -> None:
    """Raises ValueError where tokenizer_config.json would change what tokenizer.json, `tokenizer`, says."""
    stated = bert.optional_json(folder / "tokenizer_config.json")
    if stated.get("tokenizer_class") in ("PreTrainedTokenizerFast", "TokenizersBackend"):
        return  # classes that read tokenizer.json alone
    for key, override in OVERRIDES.items():
        rules = tokenizer.get(override.part) or {}
        value = stated.get(key, override.default)
        found = rules.get(override.key)
        if rules.get("type") == override.type and value != found:
            raise ValueError(
                f"{folder}: {key} is {value} in tokenizer_config.json, and {override.key} {found} in tokenizer.json: "
                "set both to what the encoder was trained with"
            )


def with_prompts(config: EncoderConfig, folder: Path, choice: str) -> EncoderConfig:
    """Return the config with the prompts that `retrieval.encoder_prompts` selects, and say on stderr which these are.

    E5's folders do not define their prompts, and its vectors are worse without: "auto" knows the published by name.
    """
    folder = folder.resolve()
    # In the Hub's cache: models--OWNER--NAME/snapshots/COMMIT.
    name = folder.parents[1].name.rpartition("--")[2] if folder.parent.name == "snapshots" else folder.name
    reason = f"retrieval.encoder_prompts {choice}"
    if choice == "auto" and (config.query_prompt or config.passage_prompt):
        reason = "as its folder defines"
    elif choice == "none" or (choice == "auto" and not E5_NAME.fullmatch(name)):
        config = replace(config, query_prompt="", passage_prompt="")
    else:
        config = replace(config, query_prompt=E5_PROMPTS[0], passage_prompt=E5_PROMPTS[1])
    used = config.query_prompt or config.passage_prompt
    chosen = f"{config.query_prompt!r} and {config.passage_prompt!r}" if used else "none"
    how = f"{config.pooling} pooling, prefixes of queries and passages: {chosen} ({reason})"
    print(f"encoder {name}: {how}", file=sys.stderr, flush=True)
    return config


def _truncating_tokenizer(tokenizer_json: str, tokens: int) -> Tokenizer:
    """The tokenizer with this limit instead of the padding and limit in its file; special tokens count towards it."""
    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.no_padding()
    tokenizer.enable_truncation(tokens)
    # A page that contains the text "[SEP]" must not create a special token.
    tokenizer.encode_special_tokens = True
    return tokenizer


def _encoder_name(config: EncoderConfig, params: Params, tokenizer_json: str) -> str:
    """Identify stored vectors by a hash of weights, tokenizer and config, without what hardly changes them."""
    relevant = asdict(replace(config, query_prompt="", max_tokens=0))
    digest = hashlib.sha256(json.dumps(relevant, sort_keys=True).encode() + tokenizer_json.encode())
    for path, weight in jax.tree.leaves_with_path(params):
        digest.update(jax.tree_util.keystr(path).encode())
        digest.update(np.ascontiguousarray(weight).data)
    return f"bert-{config.layers}x{config.embed_size}/{digest.hexdigest()[:16]}"
