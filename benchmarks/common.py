"""What the benchmarks share: models with random weights, alternating measurements, child processes, and reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from memsearcher_jax.model.config import MeshConfig, ModelConfig

REPOSITORY = Path(__file__).resolve().parents[1]
Size = Literal["tiny", "small", "smollm2", "qwen05b", "qwen3b", "qwen7b"]
TINY = ModelConfig(2_048, 64, 192, layers=2, heads=4, kv_heads=2, head_size=16, tie_embeddings=True)
SMALL = ModelConfig(8_192, 256, 768, layers=4, heads=8, kv_heads=2, head_size=32, tie_embeddings=True)

K, T = TypeVar("K"), TypeVar("T")


@dataclass(frozen=True)
class Flags:
    """Command-line options of every benchmark that compares programs."""

    repeats: int = 3
    """Alternating measurements of each program; the median is reported."""
    json: Path | None = None
    """Also write the results to this file."""


def alternate(programs: Mapping[K, Callable[[], T]], repeats: int) -> dict[K, list[tuple[float, T]]]:
    """Run all programs in turn, `repeats` times. Returns (seconds, result) of every run of each."""
    runs: dict[K, list[tuple[float, T]]] = {name: [] for name in programs}
    for _ in range(repeats):
        for name, program in programs.items():
            start = time.perf_counter()
            result = program()
            runs[name].append((time.perf_counter() - start, result))
    return runs


def report(rows: Iterable[Mapping[str, Any]], file: Path | None) -> None:
    """Print a line per row as soon as it is measured, then write all of them to `file`."""
    reported = []
    for row in rows:
        reported.append(row)
        print("  ".join(f"{name} {f'{x:,.4g}' if isinstance(x, float) else x}" for name, x in row.items()), flush=True)
    write_json(reported, file)


def write_json(value: Any, file: Path | None) -> None:
    if file:
        file.write_text(json.dumps(value, indent=2, default=str) + "\n", encoding="utf-8")


def run_child(
    script: str | Path,
    *arguments: object,
    environment: Mapping[str, str] | None = None,
    seconds: float | None = None,
    stop: bool = False,
) -> str:
    """The output of a Python script in another process, with these environment variables besides our own.

    With `stop` a script that takes longer gets SIGTERM, and half a minute to save what it has. Raises SystemExit with
    the output of a script that fails or takes too long.
    """
    words, own = [sys.executable, str(script), *map(str, arguments)], os.environ | (environment or {})
    late = False
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=own) as process:
        while True:
            try:
                output, errors = process.communicate(timeout=30 if late else seconds)
                break
            except subprocess.TimeoutExpired:
                process.terminate() if stop and not late else process.kill()
                late = True
    if process.returncode and not (stop and late):
        why = f"took more than {seconds:.0f} s" if late else f"ended with status {process.returncode}"
        raise SystemExit(f"{Path(script).name} {' '.join(map(str, arguments))} {why}:\n{output}{errors}")
    return output


def model_of(size: Size, dtype: str) -> ModelConfig:
    """The model config, with weights, activations and cache in one data type."""
    from memsearcher_jax.launch.cli import load_preset

    model = {"tiny": TINY, "small": SMALL}.get(size) or load_preset(size).model
    return replace(model, param_dtype=dtype, compute_dtype=dtype, remat="none", path="", adapter="", lora_rank=0)


def mesh_of(*, fsdp: bool = False):
    """A mesh of all devices, each with a copy of the weights, or all of them with one copy."""
    from memsearcher_jax.model import sharding

    return sharding.make_mesh(MeshConfig(data=1 if fsdp else -1, fsdp=-1 if fsdp else 1))


def random_params(model: ModelConfig, mesh) -> dict:
    """Random weights, sharded over the mesh."""
    import jax

    from memsearcher_jax.model import qwen, sharding

    init = jax.jit(lambda key: qwen.init(key, model), out_shardings=sharding.param_shardings(model, mesh))
    return jax.block_until_ready(init(jax.random.key(0)))


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
    device, dtype = "cuda" if torch.cuda.is_available() else "cpu", getattr(torch, model.param_dtype)
    with torch.device(device):
        torch_model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()

    @torch.inference_mode()
    def generate(prompts: Sequence[Sequence[int]], new_tokens: int, **settings: Any) -> list[list[int]]:
        width = max(map(len, prompts))
        ids_BT, mask_BT = np.zeros((2, len(prompts), width), np.int64)
        for row, ids in enumerate(prompts):
            ids_BT[row, width - len(ids) :] = ids
            mask_BT[row, width - len(ids) :] = 1
        lengths = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens}
        ids, mask = (torch.from_numpy(array).to(device) for array in (ids_BT, mask_BT))
        generated_BT = torch_model.generate(ids, attention_mask=mask, **lengths, **settings)
        assert generated_BT.shape[1] == width + new_tokens
        return generated_BT[:, width:].tolist()

    return generate
