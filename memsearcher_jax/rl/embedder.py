"""Texts to unit vectors by a transformer: the tokenizer, the batches, the devices. The arrays are `model.encoder`'s.

Texts of a call are sorted by length and go through the model in blocks of a few fixed shapes, so that a short text
does not pay for a long one and nothing compiles again once every shape was seen. The rows of a block are spread over
the devices, each of which holds all weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh
from tokenizers import Tokenizer

from memsearcher_jax.model import encoder, encoder_weights, sharding
from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.model.encoder_config import EncoderConfig
from memsearcher_jax.retrieval.config import RetrievalConfig
from memsearcher_jax.retrieval.search import TextEncoder

E5_PROMPTS = ("query: ", "passage: ")
NARROWEST = 32  # tokens of the narrowest block; each further one is twice as wide
BLOCK_TOKENS = 8_192  # tokens of a full block on one device
FEW_ROWS = (1, 8, 64)  # rows on one device of blocks that are not full

_encode = jax.jit(encoder.encode, static_argnames="config")


@dataclass(frozen=True)
class Embedder:
    """An encoder with its tokenizer, on a mesh. `params` is the tree of `encoder.init`, whole on every device."""

    name: str  # of the vectors: see `_name`
    config: EncoderConfig
    params: dict
    mesh: Mesh
    definition: str  # the text of tokenizer.json
    query_tokens: int
    passage_tokens: int

    def queries(self, texts: list[str]) -> np.ndarray:
        """Float32 [len(texts), D] of norm 1; zeros for a blank text."""
        return self._embed(texts, self.config.query_prompt, self._query_tokenizer, self.query_tokens)

    def passages(self, texts: list[str]) -> np.ndarray:
        """As `queries`, with the prompt and the length of passages."""
        return self._embed(texts, self.config.passage_prompt, self._passage_tokenizer, self.passage_tokens)

    @cached_property
    def _query_tokenizer(self) -> Tokenizer:
        return _cutting(self.definition, self.query_tokens)

    @cached_property
    def _passage_tokenizer(self) -> Tokenizer:
        return _cutting(self.definition, self.passage_tokens)

    def _embed(self, texts: list[str], prompt: str, tokenizer: Tokenizer, limit: int) -> np.ndarray:
        out_BD = np.zeros((len(texts), self.config.embed_size), np.float32)
        kept = np.array([row for row, text in enumerate(texts) if text.strip()], np.int64)
        # Half of a surrogate pair, which JSON can smuggle in, is no text to the tokenizer.
        plain = (texts[row].encode("utf-8", "replace").decode() for row in kept)
        if self.config.lower_case:
            plain = (text.lower() for text in plain)
        tokens = [one.ids for one in tokenizer.encode_batch_fast([prompt + text for text in plain])]
        with jax.set_mesh(self.mesh):
            # All blocks are queued before the first is waited for: the host pads while the devices compute.
            queued = [(rows, self._start(ids_BT, length_B)) for rows, ids_BT, length_B in self._blocks(tokens, limit)]
            for rows, vector_BD in queued:
                out_BD[kept[rows]] = np.asarray(vector_BD)[: len(rows)]
        return out_BD

    def _start(self, ids_BT: np.ndarray, length_B: np.ndarray) -> jax.Array:
        ids_BT = jax.device_put(ids_BT, sharding.named_sharding(self.mesh, ("batch", None)))
        length_B = jax.device_put(length_B, sharding.named_sharding(self.mesh, ("batch",)))
        return _encode(self.params, self.config, ids_BT, length_B)

    def _blocks(self, tokens: list[list[int]], limit: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """(rows of `tokens`, ids_BT, length_B) of every block, longest texts first; B may exceed the rows."""
        lengths = np.array([len(ids) for ids in tokens], np.int64)
        order = np.argsort(-lengths, kind="stable")
        start = 0
        while start < len(order):
            width = _width(int(lengths[order[start]]), limit)
            rows = order[start : start + self._rows(width, len(order))]
            ids_BT = np.full((self._rows(width, len(rows)), width), self.config.pad_id, np.int32)
            length_B = np.ones(len(ids_BT), np.int32)
            length_B[: len(rows)] = lengths[rows]
            for ids_T, row in zip(ids_BT, rows, strict=False):
                ids_T[: lengths[row]] = tokens[row]
            yield rows, ids_BT, length_B
            start += len(rows)

    def _rows(self, width: int, wanted: int) -> int:
        """Rows of a block of this width: the smallest of the few sizes that holds `wanted`, or the largest."""
        devices = self.mesh.size
        full = max(BLOCK_TOKENS // width, 1)
        sizes = [rows * devices for rows in (*FEW_ROWS, full) if rows <= full]
        return next((size for size in sizes if size >= wanted), sizes[-1])


def load(config: RetrievalConfig, folder: str) -> TextEncoder:
    """The encoder in a Hugging Face folder, under the settings of a run, on this host's devices.

    Raises FileNotFoundError or ValueError, in one line, for a folder that is not whole or not of the BERT family.
    """
    embedder = load_embedder(config, folder)
    return TextEncoder(embedder.name, embedder.passages, embedder.queries)


def load_embedder(config: RetrievalConfig, folder: str) -> Embedder:
    """As `load`, with the parts in view."""
    shape, params = encoder_weights.load(folder)
    shape = replace(with_prompts(shape, Path(folder), config.encoder_prompts), compute_dtype=config.encoder_dtype)
    definition = _definition(Path(folder), shape)
    devices = jax.local_devices(backend="cpu" if config.encoder_device == "cpu" else None)
    mesh = sharding.make_mesh(MeshConfig(data=-1, fsdp=1, tensor=1), devices)
    return Embedder(
        name=_name(shape, params, definition),
        config=shape,
        params=jax.device_put(params, sharding.named_sharding(mesh, ())),
        mesh=mesh,
        definition=definition,
        query_tokens=min(config.query_tokens, shape.max_tokens),
        passage_tokens=min(config.passage_tokens, shape.max_tokens),
    )


def stand_in(tokens: int) -> Callable[[list[str]], np.ndarray]:
    """An encoder of the shape of e5-base-v2 with random weights, which takes every text to be `tokens` long.

    Its vectors mean nothing; it takes as long as the real one, and there is no folder to be had.
    """
    config = EncoderConfig()
    mesh = sharding.make_mesh(MeshConfig(data=-1, fsdp=1, tensor=1), jax.local_devices())
    params = jax.jit(encoder.init, static_argnames="config")(jax.random.key(0), config)
    params = jax.device_put(params, sharding.named_sharding(mesh, ()))

    def encode(texts: list[str]) -> np.ndarray:
        rows = -(-len(texts) // mesh.size) * mesh.size
        ids_BT = jax.device_put(np.ones((rows, tokens), np.int32), sharding.named_sharding(mesh, ("batch", None)))
        length_B = jax.device_put(np.full(rows, tokens, np.int32), sharding.named_sharding(mesh, ("batch",)))
        with jax.set_mesh(mesh):
            return np.asarray(_encode(params, config, ids_BT, length_B))[: len(texts)]

    return encode


def with_prompts(config: EncoderConfig, folder: Path, choice: str) -> EncoderConfig:
    """The config with the prompts that `retrieval.encoder_prompts` asks for.

    E5's folders do not state theirs, and without them its vectors are worse: "auto" goes by the folder's name.
    """
    stated = config.query_prompt or config.passage_prompt
    if choice == "auto" and (stated or "e5" not in folder.resolve().name.lower()):
        return config
    query, passage = ("", "") if choice == "none" else E5_PROMPTS
    return replace(config, query_prompt=query, passage_prompt=passage)


def _definition(folder: Path, config: EncoderConfig) -> str:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"no tokenizer.json in {folder}: write one with transformers' AutoTokenizer")
    definition = file.read_text(encoding="utf-8")
    try:
        tokenizer = Tokenizer.from_str(definition)
    except Exception as error:  # the library raises bare Exception for a file that it can not read
        raise ValueError(f"{file} is not a tokenizer: {error}") from error
    if (largest := max(tokenizer.get_vocab().values())) >= config.vocab_size:
        raise ValueError(f"{file} has the id {largest}, and the encoder a vocabulary of {config.vocab_size}")
    return definition


def _cutting(definition: str, tokens: int) -> Tokenizer:
    """The tokenizer with this limit, whatever padding and limit its file has; special tokens count and are kept."""
    tokenizer = Tokenizer.from_str(definition)
    tokenizer.no_padding()
    tokenizer.enable_truncation(tokens)
    # Of a page that spells [SEP], the letters are what it says.
    tokenizer.encode_special_tokens = True
    return tokenizer


def _width(tokens: int, limit: int) -> int:
    width = NARROWEST
    while width < tokens:
        width *= 2
    return max(min(width, limit), tokens)


def _name(config: EncoderConfig, params: dict, definition: str) -> str:
    """Names the vectors: a digest of all that they depend on but their length limit, in words a person can compare.

    The type of the computation is left out: it blurs the vectors less than storing them does.
    """
    decisive = asdict(replace(config, compute_dtype="float32", query_prompt="", max_tokens=0))
    digest = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode() + definition.encode())
    for path, weight in jax.tree.leaves_with_path(params):
        digest.update(jax.tree_util.keystr(path).encode())
        digest.update(np.ascontiguousarray(weight))
    return f"bert-{config.layers}x{config.embed_size}/{digest.hexdigest()[:16]}"
