"""Decoding on a CPU, compared with llama.cpp on a GGUF file: SmolLM2-135M with random weights.

pip install llama-cpp-python gguf
python benchmarks/llama.py --dtype float32

Both decode the next tokens of the same number of contexts, whose lengths differ by 20, and alternate. Prints
milliseconds of wall and of CPU time per step, and ours as a multiple of llama.cpp's speed. On a busy machine compare
CPU time with --threads 1: two threads of llama.cpp wait for each other in a loop. Ours also draws the tokens.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import common
import numpy as np
import tyro

from memsearcher_jax.model import weights
from memsearcher_jax.model.config import ModelConfig

STEPS = 16
SLOTS = 16
CONTEXT = 1_024


@dataclass(frozen=True)
class Flags(common.Flags):
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Weights, and our activations and cache; the cache of llama.cpp is in float32 or float16."""
    tokens: int = 300
    """Tokens of the shortest context."""
    threads: int = 2
    """Threads of llama.cpp."""


def main(flags: Flags) -> None:
    model = common.model_of("smollm2", flags.dtype)
    programs = {"ours": engine_program(model, flags), "llama.cpp": llama_program(model, flags)}
    runs = common.alternate(programs, flags.repeats)
    # Seconds, and those of CPU time, are counted inside: starting again and prefilling are no part of a step.
    medians = {name: np.median([run[:2] for run in of], axis=0) / STEPS * 1e3 for name, of in runs.items()}
    for name, (wall, cpu) in medians.items():
        print(f"{name:10} wall {wall:.1f} ms  CPU {cpu:.1f} ms")
    print("ours is {:.2f}x by wall, {:.2f}x by CPU time".format(*(medians["llama.cpp"] / medians["ours"])))


def engine_program(model: ModelConfig, flags: Flags) -> Callable[[], tuple]:
    settings = {"prefill_buckets": (256,), "prefill_tokens_per_step": SLOTS * CONTEXT}
    engine, params = common.random_engine(model, (SLOTS,), CONTEXT, decode_steps_per_call=STEPS, **settings)
    rng = np.random.default_rng(0)
    lengths = range(flags.tokens, flags.tokens + 20 * SLOTS, 20)
    prompts = [[slot, *rng.integers(0, model.vocab_size, length - 1).tolist()] for slot, length in enumerate(lengths)]

    def run() -> tuple:
        common.open_contexts(engine, params, prompts, 2 * STEPS)
        engine.step()  # prefills, and decodes once
        measured = common.timed(engine.step)
        engine.stop()
        return measured

    return run


def llama_program(model: ModelConfig, flags: Flags) -> Callable[[], tuple]:
    import llama_cpp as llama

    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        write_gguf(file.name, model, flags.dtype)
        loaded = llama.llama_model_load_from_file(file.name.encode(), llama.llama_model_default_params())
    settings = llama.llama_context_default_params()
    settings.n_ctx = CONTEXT * SLOTS
    settings.n_seq_max = SLOTS
    settings.kv_unified = False
    settings.n_threads = settings.n_threads_batch = flags.threads
    settings.type_k = settings.type_v = int(flags.dtype == "bfloat16")  # GGML_TYPE_F32 and F16
    context = llama.llama_init_from_model(loaded, settings)
    batch = llama.llama_batch_init(CONTEXT, 0, 1)
    rng = np.random.default_rng(0)
    lengths = range(flags.tokens, flags.tokens + 20 * SLOTS, 20)

    def decode(tokens: list[tuple[int, int]]) -> None:
        """Adds a random token at (slot, position), each; logits are of the last of a slot."""
        batch.n_tokens = len(tokens)
        for i, (slot, position) in enumerate(tokens):
            batch.token[i] = int(rng.integers(model.vocab_size))
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = slot
            batch.logits[i] = (slot, position + 1) not in tokens[i + 1 : i + 2]
        assert llama.llama_decode(context, batch) == 0

    def run() -> tuple:
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        for slot, length in enumerate(lengths):
            decode([(slot, position) for position in range(length)])

        def steps() -> None:
            for step in range(STEPS):
                decode([(slot, length + step) for slot, length in enumerate(lengths)])

        return common.timed(steps)

    return run


def write_gguf(file: str, model: ModelConfig, dtype: str) -> None:
    """Random weights as a model of llama.cpp without a vocabulary."""
    import gguf

    writer: Any = gguf.GGUFWriter(file, "llama")
    sizes = {"block_count": model.layers, "embedding_length": model.embed_size, "feed_forward_length": model.ffn_size}
    sizes |= {"head_count": model.heads, "head_count_kv": model.kv_heads, "rope_dimension_count": model.head_size}
    sizes |= {"context_length": model.max_positions, "vocab_size": model.vocab_size}
    for name, value in (sizes | {"layer_norm_rms_eps": model.norm_eps, "rope_freq_base": model.rope_theta}).items():
        getattr(writer, f"add_{name}")(value)
    writer.add_tokenizer_model("none")
    rng = np.random.default_rng(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.layers)
    for tensor in weights.tensors(model):
        name = names.get_name(tensor.name, (".weight",))
        if len(tensor.shape) == 1:
            writer.add_tensor(name, np.ones(tensor.shape, np.float32))
            continue
        x = (rng.standard_normal(tensor.shape) / np.sqrt(tensor.shape[-1])).astype(np.float32)
        kind = gguf.GGMLQuantizationType.BF16 if dtype == "bfloat16" else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(x, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__))
