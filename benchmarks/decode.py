"""Static-batch decoding: tokens per second of the engine and of transformers' `generate`, and memory bandwidth.

python benchmarks/decode.py                                # tiny, small and qwen05b in float32, against transformers
python benchmarks/decode.py --sizes qwen7b --dtype bfloat16 --batch 64 --no-transformers      # on an accelerator

Every row has the same number of prompt tokens and of new tokens; decoding is greedy. Both programs alternate, and
medians are reported. "end to end" includes the prompt; "decode" is the difference to a call that generates one token.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import common
import jax
import numpy as np
import tyro

from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.planning import roofline
from memsearcher_jax.sampling.config import SamplingConfig
from memsearcher_jax.sampling.engine import Engine

BATCHES = {"qwen05b": 4}


@dataclass(frozen=True)
class Flags(common.Flags):
    """Command-line options."""

    sizes: tuple[common.Size, ...] = ("tiny", "small", "qwen05b")
    """Models, with random weights."""
    batch: int = 0
    """Batch size; 0: 16, or 4 for qwen05b."""
    prompt: int = 256
    """Prompt tokens per row."""
    new: int = 128
    """Generated tokens per row."""
    dtype: str = "float32"
    """Data type of weights, activations and cache."""
    tensor: int = 1
    """Devices that share one copy of the weights."""
    transformers: bool = True
    """Also measure transformers on torch CPU (extra: parity)."""


def measure(size: common.Size, flags: Flags) -> dict:
    """The results of one model."""
    model = common.model_of(size, flags.dtype)
    batch = flags.batch or BATCHES.get(size, 16)
    prompts = np.random.default_rng(0).integers(0, model.vocab_size, (batch, flags.prompt)).tolist()
    programs: dict[str, Callable[[int], Any]] = {"engine": engine_program(model, prompts, flags)}
    if flags.transformers:
        programs["transformers"] = partial(common.transformers_generate(model), prompts, do_sample=False)
    calls = {(name, new): partial(programs[name], new) for name in programs for new in (1, flags.new)}
    runs = common.alternate(calls, flags.repeats + 1)
    # The first round warms up: compilation, allocation, caches.
    median = {key: statistics.median(seconds for seconds, _ in samples[1:]) for key, samples in runs.items()}
    result = {"size": size, "batch": batch, "prompt": flags.prompt, "new": flags.new, "dtype": flags.dtype}
    for name in programs:
        total, first = median[name, flags.new], median[name, 1]
        result[f"{name} end to end tokens/s"] = batch * flags.new / total
        result[f"{name} decode tokens/s"] = batch * (flags.new - 1) / (total - first)
    if flags.transformers:
        for kind in ("end to end", "decode"):
            result[f"{kind} ratio"] = result[f"engine {kind} tokens/s"] / result[f"transformers {kind} tokens/s"]
    step_seconds = (median["engine", flags.new] - median["engine", 1]) / (flags.new - 1)
    bandwidth = step_bytes(model, batch, flags) / step_seconds
    return result | {"read GB/s": bandwidth / 1e9, "share of copy bandwidth": bandwidth / copy_bandwidth()}


def engine_program(model: ModelConfig, prompts: list[list[int]], flags: Flags) -> Callable[[int], None]:
    """A function that generates a number of tokens in every row."""
    settings = SamplingConfig(
        slots=len(prompts),
        tensor=flags.tensor,
        context_tokens=flags.prompt + flags.new,
        decode_steps_per_call=flags.new,
        prefill_chunk=64,
        prefill_buckets=(512,),
        temperature=0.0,
    )
    mesh = common.mesh_of(flags.tensor)
    params = common.random_params(model, mesh)
    engine = Engine(model, settings, (), mesh)

    def generate(new: int) -> None:
        engine.start(params, jax.random.key(0))
        for slot, prompt in enumerate(prompts):
            engine.open_context(slot, prompt, (slot, 0), new)
        while engine.active:
            engine.step()
        assert all(len(engine.pop_context(slot).ids) == flags.prompt + new for slot in range(len(prompts)))

    return generate


def step_bytes(model: ModelConfig, batch: int, flags: Flags) -> float:
    """Bytes that one decoding step must read: all multiplied weights, and the cache at its mean length."""
    cache = 2 * model.layers * batch * model.kv_heads * model.head_size * (flags.prompt + flags.new / 2)
    return jax.numpy.dtype(flags.dtype).itemsize * (roofline.matmul_params(model) + cache)


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a large copy on one device; the best of five."""
    x = jax.numpy.zeros(1 << 27, jax.numpy.float32)
    copy = jax.jit(lambda x: x + 1)
    copy(x).block_until_ready()
    runs = common.alternate({"copy": lambda: jax.block_until_ready(copy(x))}, 5)
    return 2 * x.nbytes / min(seconds for seconds, _ in runs["copy"])


if __name__ == "__main__":
    flags = tyro.cli(Flags)
    common.report((measure(size, flags) for size in flags.sizes), flags.json)
