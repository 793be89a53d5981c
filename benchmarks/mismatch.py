"""How far a sampler's log-probabilities are from those of the trainer, by the types of its weights and of its cache.

python benchmarks/mismatch.py --size qwen05b               # random weights and tokens
python benchmarks/mismatch.py --path smollm2 --text LICENSE --dtype float32

Of the tokens that the sampler draws, over the whole vocabulary at temperature 1: the k3 estimate of the divergence of
the trainer from the sampler in nats per token, and quantiles of the absolute difference.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import common
import numpy as np
import tyro

TYPES = ("compute_dtype", "int8")
CHUNK = 128


@dataclass(frozen=True)
class Mismatch:
    size: common.Size = "tiny"
    """Random weights of this shape."""
    path: Path | None = None
    """A Hugging Face folder in place of random weights."""
    text: Path | None = None
    """A text that the prompts are cut from; by default they are random tokens."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """The type of weights, activations and cache where they are not int8."""
    contexts: int = 16
    prompt: int = 256
    """Tokens of a prompt."""
    new: int = 64
    """Tokens that each context generates."""


def main(flags: Mismatch) -> None:
    import jax
    import jax.numpy as jnp

    from memsearcher_jax.model import sharding, weights
    from memsearcher_jax.tokenizer import ChatTokenizer
    from memsearcher_jax.training.logprobs import token_logprobs

    mesh = sharding.make_mesh(common.COPIES)
    if flags.path:
        model, params = weights.load(flags.path)
        model = replace(model, param_dtype=flags.dtype, compute_dtype=flags.dtype, remat="none")
        params = jax.tree.map(lambda x: jnp.asarray(x, flags.dtype), params)
    else:
        model = common.model_of(flags.size, flags.dtype)
        params = common.random_params(model, mesh)
    prompts = np.random.default_rng(0).integers(0, model.vocab_size, (flags.contexts, flags.prompt))
    if flags.text:
        ids = ChatTokenizer.load(flags.path).encode_untrusted(flags.text.read_text(encoding="utf-8"))
        starts = np.linspace(0, len(ids) - flags.prompt, flags.contexts).astype(int)
        prompts = np.stack([ids[start : start + flags.prompt] for start in starts])
    trainer = jax.jit(lambda params, row: token_logprobs(params, model, row, chunk=CHUNK, temperature=1.0)[0])
    print(f"{'weights':>14}{'cache':>14}{'KL':>10}{'50 %':>9}{'90 %':>9}{'99 %':>9}{'largest':>9}")
    for stored in TYPES:
        published = sharding.publish(params, model, mesh, model.compute_dtype if stored == TYPES[0] else stored)
        for cached in TYPES:
            tokens = flags.prompt + flags.new
            engine = common.open_engine(model, mesh, published, (flags.contexts,), tokens, weights=stored, kv=cached)
            contexts = common.generate(engine, published, prompts.tolist(), flags.new)
            batch = common.packed(contexts, -(-tokens // CHUNK) * CHUNK)
            logprob_BT = np.concatenate([trainer(params, row) for row in batch.split(1)])
            difference = (logprob_BT - batch.old_logprob_BT)[batch.mask_BT]
            kl = np.mean(np.expm1(difference) - difference)
            quantiles = "".join(f"{x:>9.4f}" for x in np.quantile(abs(difference), (0.5, 0.9, 0.99, 1)))
            print(f"{stored:>14}{cached:>14}{kl:>10.5f}{quantiles}", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Mismatch, description=__doc__))
