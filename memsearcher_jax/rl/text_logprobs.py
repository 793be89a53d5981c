"""Log-probabilities of texts after prompts, by the weights that a host samples with: what `scoring.logprobs` returns.

A host computes them on its own sampling mesh, at its own pace: no other host takes part. Every text has a row of its
own, in one of a few widths, and every call of a width has equally many rows. So at most one program is compiled for
each width, and the number of a text does not depend on the texts around it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.stages import Wrapped

from memsearcher_jax.model import sharding
from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.model.qwen import Params
from memsearcher_jax.ops.axes import LANES, shard_map_by_rows
from memsearcher_jax.ops.kernel_errors import way_around_kernels
from memsearcher_jax.tokenizer import ChatTokenizer
from memsearcher_jax.training.logprobs import token_logprobs
from memsearcher_jax.training.packing import PackedBatch
from memsearcher_jax.types import Prompt

WIDTH_FACTOR = 4  # between two widths


@dataclass(frozen=True)
class TextLogprobs:
    """Scores texts on the sampling mesh of this host."""

    model: ModelConfig
    weights_dtype: str  # in which the weights are published: `dtype` of `qwen.publish`
    mesh: Mesh
    tokenizer: ChatTokenizer
    context_tokens: int  # of the longest context
    logit_chunk: int  # tokens of a replica whose logits exist at a time

    def __call__(self, params: Params, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[float]:
        """For each text the sum of the log-probabilities of its tokens after its prompt, in nats, at temperature 1.

        `params`: the weights as they are published to the sampler, on the mesh. Raises ValueError for lists of
        different lengths, a prompt without a token and a text that does not fit the longest context,
        FloatingPointError where a number is not finite.
        """
        if len(prompts) != len(texts):
            raise ValueError(f"logprobs takes as many texts as prompts, not {len(texts)} texts for {len(prompts)}")
        pairs = list(zip(prompts, texts, strict=True))
        distinct = list(dict.fromkeys(pairs))  # rollouts with equal memories ask for equal numbers
        rows = [self._encode(prompt, text) for prompt, text in distinct]
        logprobs = dict(zip(distinct, self._score(params, rows), strict=True))
        return [logprobs[pair] for pair in pairs]

    def _encode(self, prompt: Prompt, text: str) -> _Row:
        prompt_T = self.tokenizer.span_ids(prompt.segments)
        text_T = np.array(self.tokenizer.encode_untrusted(text), np.int32)
        length = len(prompt_T) + len(text_T)
        if not len(prompt_T):
            raise ValueError("a prompt has no token: nothing predicts the first token of its text")
        if length > self.context_tokens:
            raise ValueError(
                f"a prompt of {len(prompt_T)} tokens and its text of {len(text_T)} have {length} together, more than "
                f"the longest context, sampling.context_tokens {self.context_tokens}"
            )
        return _Row(np.concatenate([prompt_T, text_T]), len(prompt_T))

    def _score(self, params: Params, rows: Sequence[_Row]) -> list[float]:
        """The log-probability of each row, those of one width in calls of as many rows as the devices take."""
        all_widths = widths(self.context_tokens)
        numbers_by_width: dict[int, list[int]] = {}
        for number, row in enumerate(rows):
            width = next(width for width in all_widths if width >= len(row.ids_T))
            numbers_by_width.setdefault(width, []).append(number)
        logprobs = [0.0] * len(rows)
        for width, numbers in numbers_by_width.items():
            rows_per_replica = all_widths[-1] // width
            size = rows_per_replica * self.mesh.shape["data"]
            for start in range(0, len(numbers), size):
                of_call = numbers[start : start + size]
                batch = _batch([rows[number] for number in of_call], size, width)
                for number, logprob in zip(of_call, self._call(params, batch, rows_per_replica), strict=False):
                    logprobs[number] = logprob
        if not all(map(math.isfinite, logprobs)):
            raise FloatingPointError("the policy's log-probabilities are not finite")
        return logprobs

    def _call(self, params: Params, batch: TextBatch, rows_per_replica: int) -> list[float]:
        chunk = chunk_tokens(self.logit_chunk, rows_per_replica, batch.ids_BT.shape[1])
        score = program(self.model, self.weights_dtype, self.mesh, batch.ids_BT.shape[1], chunk)
        with jax.set_mesh(self.mesh), way_around_kernels("model.attention"):
            # Programs that run at the same time on several CPU devices can wait for each other for ever.
            jax.block_until_ready(params)
            return jax.device_get(score(params, batch)).tolist()


class _Row(NamedTuple):
    """A prompt and the text after it."""

    ids_T: np.ndarray
    prompt_tokens: int


class TextBatch(NamedTuple):
    """Rows of one call. A row without a token is padding."""

    ids_BT: np.ndarray  # int32: a prompt, its text, then padding
    prompt_B: np.ndarray  # int32, tokens of the prompt
    length_B: np.ndarray  # int32, tokens of prompt and text


def _batch(rows: Sequence[_Row], size: int, width: int) -> TextBatch:
    """`size` rows of `width` tokens, the last ones of which may be padding."""
    batch = TextBatch(np.zeros((size, width), np.int32), np.zeros(size, np.int32), np.zeros(size, np.int32))
    for place, row in enumerate(rows):
        batch.ids_BT[place, : len(row.ids_T)] = row.ids_T
        batch.prompt_B[place] = row.prompt_tokens
        batch.length_B[place] = len(row.ids_T)
    return batch


def widths(context_tokens: int) -> list[int]:
    """The widths of rows, ascending, in tokens: multiples of 128, as kernels need them. The last fits any context."""
    longest = -(-context_tokens // LANES) * LANES
    shorter = list[int]()
    width = LANES
    while width < longest:
        shorter.append(width)
        width *= WIDTH_FACTOR
    return [*shorter, longest]


def chunk_tokens(logit_chunk: int, rows: int, width: int) -> int:
    """Tokens of each of a replica's rows whose logits exist at a time: at most `logit_chunk` of all rows together.

    A power of 2 that divides `width`, and at least 1.
    """
    largest = max(1, logit_chunk // rows)
    return math.gcd(1 << largest.bit_length() - 1, width)


@lru_cache(maxsize=16)
def program(model: ModelConfig, weights_dtype: str, mesh: Mesh, width: int, chunk: int) -> Wrapped:
    """A compiled (params, TextBatch) -> logprob_B, float32, the sum over the tokens of each text."""
    model = sharding.select_attention(model, mesh, width)
    param_axes = jax.tree.map(lambda spec: spec.axes, sharding.sampler_specs(model, mesh, weights_dtype))
    axes_B = ("batch",)
    in_axes = (param_axes, ("batch", None), axes_B, axes_B)

    def local_logprobs(params: Params, ids_BT: jax.Array, prompt_B: jax.Array, length_B: jax.Array) -> jax.Array:
        batch = _packed(ids_BT, prompt_B, length_B)
        scores = token_logprobs(params, model, batch, chunk=chunk, temperature=1.0)
        return jnp.sum(scores.logprob_BT, axis=1)

    @jax.jit
    def logprobs(params: Params, batch: TextBatch) -> jax.Array:
        return shard_map_by_rows(local_logprobs, in_axes, axes_B)(params, *batch)

    return logprobs


def _packed(ids_BT: jax.Array, prompt_B: jax.Array, length_B: jax.Array) -> PackedBatch:
    """The rows with one segment each, in which the tokens of the text are scored. Arguments: see `TextBatch`."""
    position_BT = jnp.broadcast_to(jnp.arange(ids_BT.shape[1]), ids_BT.shape)
    is_token_BT = position_BT < length_B[:, None]
    nothing_BT = jnp.zeros(ids_BT.shape, jnp.float32)
    return PackedBatch(
        ids_BT=ids_BT,
        position_BT=jnp.where(is_token_BT, position_BT, 0),
        segment_BT=is_token_BT.astype(jnp.int32),
        mask_BT=is_token_BT & (position_BT >= prompt_B[:, None]),
        count_BT=nothing_BT,
        advantage_BT=nothing_BT,
        old_logprob_BT=nothing_BT,
    )
