"""Static-batch decoding: tokens per second of our sampler and of transformers' `generate`, and the bandwidth used.

python benchmarks/decode.py                                # tiny, small and qwen05b in float32, against transformers
python benchmarks/decode.py --sizes qwen7b --dtype bfloat16 --batch 64 --no-transformers      # on an accelerator

Every row has the same number of prompt tokens and of new tokens; draws are greedy. Both programs take turns, and the
medians count. "whole call" includes the prompt; "decode" is the difference to a call that generates one token.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import sizes
import tyro

from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.sampling.buffer import PromptIds, PromptWidths
from memsearcher_jax.sampling.config import SamplingConfig
from memsearcher_jax.sampling.engine import Engine

BATCHES = {"qwen05b": 4}


@dataclass(frozen=True)
class Flags:
    """What to measure."""

    sizes: tuple[sizes.Size, ...] = ("tiny", "small", "qwen05b")
    """Models, all with random weights."""
    batch: int = 0
    """Rows; 0: 16, and 4 for qwen05b."""
    prompt: int = 256
    """Prompt tokens of a row."""
    new: int = 128
    """Tokens to generate in each row."""
    dtype: str = "float32"
    """Type of weights, activations and cache."""
    tensor: int = 1
    """Devices that share one copy of the weights."""
    repeats: int = 3
    """Measurements of each; the median counts."""
    transformers: bool = True
    """Also measure transformers on torch CPU (extra: parity)."""
    json: Path | None = None
    """Also write the numbers to this file."""


def main(flags: Flags) -> None:
    results = [measure(size, flags) for size in flags.sizes]
    for result in results:
        print(
            "  ".join(
                f"{name} {value:,.4g}" if isinstance(value, float) else f"{name} {value}"
                for name, value in result.items()
            )
        )
    if flags.json:
        flags.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def measure(size: sizes.Size, flags: Flags) -> dict:
    """One line of the table."""
    model = sizes.model_of(size, flags.dtype)
    batch = flags.batch or BATCHES.get(size, 16)
    prompt_BT = np.random.default_rng(0).integers(0, model.vocab_size, (batch, flags.prompt))
    programs = {"ours": ours(model, prompt_BT, flags)}
    if flags.transformers:
        programs["transformers"] = theirs(model, prompt_BT)
    seconds = {(name, new): [] for name in programs for new in (1, flags.new)}
    for _ in range(flags.repeats + 1):
        for (name, new), taken in seconds.items():
            began = time.perf_counter()
            programs[name](new)
            taken.append(time.perf_counter() - began)
    # The first round warms up: compilation, allocation, caches.
    middle = {key: statistics.median(taken[1:]) for key, taken in seconds.items()}
    result = {"size": size, "batch": batch, "prompt": flags.prompt, "new": flags.new, "dtype": flags.dtype}
    for name in programs:
        whole, first = middle[name, flags.new], middle[name, 1]
        result[f"{name} whole call tokens/s"] = batch * flags.new / whole
        result[f"{name} decode tokens/s"] = batch * (flags.new - 1) / (whole - first)
    if flags.transformers:
        for kind in ("whole call", "decode"):
            result[f"{kind} ratio"] = result[f"ours {kind} tokens/s"] / result[f"transformers {kind} tokens/s"]
    step = (middle["ours", flags.new] - middle["ours", 1]) / (flags.new - 1)
    read = step_bytes(model, batch, flags) / step
    return result | {"read GB/s": read / 1e9, "share of copy bandwidth": read / copy_bandwidth()}


def ours(model: ModelConfig, prompt_BT: np.ndarray, flags: Flags) -> Callable[[int], None]:
    """Generates that many tokens in every row."""
    batch, length = prompt_BT.shape
    settings = SamplingConfig(
        slots=batch,
        tensor=flags.tensor,
        context_tokens=length + flags.new,
        decode_tokens=flags.new,
        rows_per_call=batch,
        prefill_piece=64,
        prefill_buckets=(512,),
        temperature=0.0,
    )
    mesh = sizes.mesh_of(flags.tensor)
    params = sizes.random_params(model, mesh)
    engine = Engine(model, settings, PromptWidths(1, length, 1, 1, 1), (), mesh)
    prompts = [PromptIds((), tuple(ids_T.tolist()), (), (), ()) for ids_T in prompt_BT]

    def generate(new: int) -> None:
        engine.start(params, jax.random.key(0))
        for slot, prompt in enumerate(prompts):
            engine.begin(slot, prompt, (slot, 0), new)
        while engine.speaking:
            engine.tick()
        assert all(len(engine.take(slot).ids) == length + new for slot in range(batch))

    return generate


def theirs(model: ModelConfig, prompt_BT: np.ndarray) -> Callable[[int], None]:
    """The same by transformers."""
    import torch

    twin, ids_BT = sizes.transformers_twin(model), torch.from_numpy(prompt_BT)

    @torch.inference_mode()
    def generate(new: int) -> None:
        ids = twin.generate(
            ids_BT, attention_mask=torch.ones_like(ids_BT), do_sample=False, min_new_tokens=new, max_new_tokens=new
        )
        assert ids.shape[1] == ids_BT.shape[1] + new

    return generate


def step_bytes(model: ModelConfig, batch: int, flags: Flags) -> float:
    """What one decode step must read: every weight that is multiplied, and the cache as long as it is on average."""
    m, itemsize = model, np.dtype(jax.numpy.dtype(flags.dtype)).itemsize
    layer = m.embed_size * m.head_size * 2 * (m.heads + m.kv_heads) + 3 * m.embed_size * m.ffn_size
    cache = 2 * m.layers * batch * m.kv_heads * m.head_size * (flags.prompt + flags.new / 2)
    return itemsize * (m.layers * layer + m.vocab_size * m.embed_size + cache)


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a large copy on one device; the best of several."""
    x = jax.numpy.zeros(1 << 27, jax.numpy.float32)
    copy = jax.jit(lambda x: x + 1)
    copy(x).block_until_ready()
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        copy(x).block_until_ready()
        best = min(best, time.perf_counter() - began)
    return 2 * x.nbytes / best


if __name__ == "__main__":
    main(tyro.cli(Flags))
