"""What the benchmarks share: models with random weights, alternating measurements, child processes, and reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from memsearcher_jax.model.config import MeshConfig, ModelConfig

REPOSITORY = Path(__file__).resolve().parents[1]
WEIGHTS = REPOSITORY / "memsearcher_jax" / "assets" / "tiny"
Size = Literal["tiny", "small", "smollm2", "qwen05b", "qwen3b", "qwen7b"]
TINY = ModelConfig(2_048, 64, 192, layers=2, heads=4, kv_heads=2, head_size=16, tie_embeddings=True)
SMALL = ModelConfig(8_192, 256, 768, layers=4, heads=8, kv_heads=2, head_size=32, tie_embeddings=True)
COPIES = MeshConfig(data=-1, fsdp=1)
SHARDS = MeshConfig(data=1, fsdp=-1)  # each device has the weights, or a part
LATE = (124, 137)  # exit statuses of `timeout`, for scripts that end in time and those that it kills


@dataclass(frozen=True)
class Flags:
    """Command-line options of every benchmark that compares programs."""

    repeats: int = 3
    """Alternating measurements of each program; the median is reported."""


def alternate(programs: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[Any]]:
    """The results of every program. They run in turn, `repeats` times, so that other work slows all alike."""
    rounds = [{name: program() for name, program in programs.items()} for _ in range(repeats)]
    return {name: [results[name] for results in rounds] for name in programs}


def timed(program: Callable[[], Any]) -> tuple[float, float, Any]:
    """Seconds, seconds of CPU time of all threads, and the result."""
    wall = time.perf_counter()
    cpu = time.process_time()
    result = program()
    return time.perf_counter() - wall, time.process_time() - cpu, result


def run_child(script: object, *arguments: object, seconds: float = 0.0, stop: bool = False, **environment: str) -> str:
    """The output of a Python script in another process, with these environment variables besides our own.

    A script that takes longer than `seconds`, if they are not 0, gets SIGTERM, and half a minute to save what it has.
    Raises SystemExit with the output of a script that fails or, unless `stop`, takes too long.
    """
    limit = ["timeout", "--kill-after=30", f"{seconds:.0f}"] if seconds else []
    words = [*limit, sys.executable, str(script), *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | environment)
    late = bool(seconds) and done.returncode in LATE
    if done.returncode and not (stop and late):
        why = f"took more than {seconds:.0f} s" if late else f"ended with status {done.returncode}"
        raise SystemExit(f"{Path(str(script)).name} {' '.join(map(str, arguments))} {why}:\n{done.stdout}{done.stderr}")
    return done.stdout


def in_process(function: Callable[..., Any], *arguments: Any, seconds: float = 0.0, **environment: str) -> Any:
    """What a function of a benchmark returns in another process, as `run_child`. All values are those of JSON."""
    module = Path(function.__code__.co_filename)
    call = f"{module.stem}.{function.__name__}(*json.loads({json.dumps(arguments, default=str)!r}))"
    environment["PYTHONPATH"] = os.pathsep.join([str(module.parent), os.environ.get("PYTHONPATH", "")])
    source = f"import json, {module.stem}; print(json.dumps({call}))"
    return json.loads(run_child("-c", source, seconds=seconds, **environment).splitlines()[-1])


def model_of(size: Size, dtype: str) -> ModelConfig:
    """The model config, with weights, activations and cache in one data type."""
    from memsearcher_jax.launch.cli import load_preset

    model = {"tiny": TINY, "small": SMALL}.get(size) or load_preset(size).model
    return replace(model, param_dtype=dtype, compute_dtype=dtype, remat="none", path="", adapter="", lora_rank=0)


def random_params(model: ModelConfig, mesh) -> dict:
    """Random weights, sharded over the mesh."""
    import jax

    from memsearcher_jax.model import qwen, sharding

    init = jax.jit(qwen.init, static_argnums=1, out_shardings=sharding.param_shardings(model, mesh))
    return jax.block_until_ready(init(jax.random.key(0), model))


def open_engine(
    model: ModelConfig, mesh: Any, params: Any, slots: Sequence[int], context_tokens: int, **settings: Any
) -> Any:
    """An engine without stop tokens, compiled for published weights and these numbers of active slots of a replica.

    The last number is that of all slots of the engine.
    """
    from memsearcher_jax.sampling.config import SamplingConfig
    from memsearcher_jax.sampling.engine import Engine

    sizes = {"slots": slots[-1], "decode_batch_sizes": tuple(slots[:-1]), "context_tokens": context_tokens}
    engine = Engine(model, SamplingConfig(**{"top_k": 0, "top_p": 1.0} | sizes | settings), (), mesh)
    engine.warm_up(params)
    return engine


def random_engine(model: ModelConfig, slots: Sequence[int], context_tokens: int, **settings: Any) -> tuple[Any, Any]:
    """An engine of all devices, and random weights as it reads them; the arguments are those of `open_engine`."""
    from memsearcher_jax.model import sharding

    mesh = sharding.make_mesh(COPIES)
    params = sharding.publish(random_params(model, mesh), model, mesh, model.compute_dtype)
    return open_engine(model, mesh, params, slots, context_tokens, **settings), params


def open_contexts(engine: Any, params: Any, prompts: Sequence[Sequence[int]], new: int, first: int = 0) -> list[int]:
    """Start a generation of `new` tokens after each prompt, and return their slots; `first`: number of the draws."""
    import jax

    engine.start(params, jax.random.key(0))
    slots = engine.scheduler.free_slots[: len(prompts)]
    for number, (slot, ids) in enumerate(zip(slots, prompts, strict=True), first):
        engine.scheduler.open_context(slot, ids, (number, 0), new)
    return slots


def generate(engine: Any, params: Any, prompts: Sequence[Sequence[int]], new: int, first: int = 0) -> list:
    """The contexts of all prompts after `new` tokens each."""
    slots = open_contexts(engine, params, prompts, new, first)
    while engine.scheduler.active:
        engine.step()
    return [engine.scheduler.pop_context(slot) for slot in slots]


def packed(contexts: Sequence[Any], seq_len: int) -> Any:
    """Contexts that an engine sampled, as the rows of a trainer."""
    from memsearcher_jax.training.packing import TrainingExample, pack

    examples = [TrainingExample(context.ids, context.logprobs, context.sampled, 1.0) for context in contexts]
    return pack(examples, seq_len, 1, np.random.default_rng(0))


def transformers_generate(model: ModelConfig) -> Callable[..., list[list[int]]]:
    """generate(prompts, new_tokens, **settings) -> the new ids of each prompt; prompts are padded on the left.

    By the same architecture in transformers with random weights, on a GPU if torch has one. Needs torch.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from memsearcher_jax.model.hf_config import config_json

    torch.manual_seed(0)
    settings = config_json(model) | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, model.param_dtype)
    with torch.device(device):
        torch_model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()

    @torch.inference_mode()
    def generate(prompts: Sequence[Sequence[int]], new_tokens: int, **settings: Any) -> list[list[int]]:
        width = max(map(len, prompts))
        ids_BT = np.array([[0] * (width - len(ids)) + list(ids) for ids in prompts])
        mask_BT = np.array([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
        settings |= {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens}
        ids = torch.from_numpy(ids_BT).to(device)
        mask = torch.from_numpy(mask_BT).to(device)
        return torch_model.generate(ids, attention_mask=mask, **settings)[:, width:].tolist()

    return generate
