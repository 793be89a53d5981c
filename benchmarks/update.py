"""Tokens per second and peak memory of one optimiser step: our update, and TRL's loss on transformers and torch.

python benchmarks/update.py                                      # tiny and small in float32, against torch
python benchmarks/update.py --no-torch --sizes smollm2 --dtype bfloat16      # alone; run it in two checkouts to compare
python benchmarks/update.py --memory --sizes tiny                # what the memory of our update is made of

docs/plan.md describes the step and both programs, whose losses and gradient norms must agree. Compiling is not timed.
Results are medians, and ratios those of neighbouring runs, with their range. CPU seconds are those of all threads,
which other work on the machine changes less. Peak memory is that of the process with all libraries, or of the GPU.
Tokens/s counts the tokens of all contexts; TFLOP/s three forward passes of the tokens that a program computes.
"""

from __future__ import annotations

import resource
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import common
import numpy as np
import tyro
import workload

from memsearcher_jax.planning.flops import forward_flops

CONTEXTS = {"tiny": 48, "small": 24}  # per step; 6 for the others
SEQ_LEN = 8_192  # longest packed rows of our update
STEPS = 2  # timed steps of a process
CLIP = 0.2
SHARED: dict[str, Any] = {"kl_coefficient": 0.001, "weight_decay": 0.01, "learning_rate": 1e-6, "max_grad_norm": 1.0}
MAX_K3 = 10.0  # as in training/grpo.py; importing it would load jax into the process of torch
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}  # of the losses, relative to 0.1, and of the gradient norms


@dataclass(frozen=True)
class Flags(common.Flags):
    sizes: tuple[common.Size, ...] = ("tiny", "small")
    """Models, with random weights."""
    torch: bool = True
    """Also measure transformers on torch CPU (extra: parity)."""
    dtype: str = "float32"
    """Type of weights and activations."""
    memory: bool = False
    """Print what the memory of our update is made of, in place of its speed."""
    devices: int = 2
    """Devices of the CPU among which our update divides the rows, as `--mesh.cpu_devices`."""


class Context(NamedTuple):
    """One context to train on; arrays have one entry per token."""

    ids: np.ndarray
    sampled: np.ndarray
    advantage: float
    old_logprob: np.ndarray
    ref_logprob: np.ndarray


def main(flags: Flags) -> None:
    for size in flags.sizes:
        if flags.memory:
            print_memory(size, flags.dtype, CONTEXTS.get(size, 6), flags.devices)
            continue
        row = measure(size, flags.dtype, CONTEXTS.get(size, 6), flags.devices, flags.repeats, flags.torch)
        cells = (f"{name} {f'{x:,.4g}' if isinstance(x, float) else x}" for name, x in row.items())
        print(*cells, sep="  ", flush=True)


def measure(size: common.Size, dtype: str, count: int, devices: int, repeats: int, torch: bool) -> dict:
    """One row of the table."""
    functions: dict[str, Callable[..., dict]] = {"ours": update_steps}
    if torch:
        functions["torch"] = torch_steps
    with tempfile.TemporaryDirectory(prefix="update-") as folder:
        arguments = (size, dtype, count, folder)
        environment: dict[str, Any] = {"JAX_NUM_CPU_DEVICES": str(devices)}
        # In a process of its own, too: the memory of this one must stay small.
        common.in_process(write_weights, *arguments, **environment)
        programs = {
            name: partial(common.in_process, function, *arguments, **environment)
            for name, function in functions.items()
        }
        runs = common.alternate(programs, repeats)
    model = common.model_of(size, dtype)
    contexts = make_contexts(count, model.vocab_size)
    lengths = [len(context.ids) for context in contexts]
    trained = sum(int(context.sampled.sum()) for context in contexts)
    result: dict = {"size": size, "contexts": len(lengths), "dtype": dtype}
    for name, runs_of_program in runs.items():
        seconds = median(run["seconds"] for run in runs_of_program)
        computed = runs_of_program[0]["computed"]
        flops = 3 * forward_flops(model, computed, sum(length**2 / 2 for length in lengths), trained).forward
        result |= {f"{name} tokens/s": sum(lengths) / seconds, f"{name} TFLOP/s": flops / seconds / 1e12}
        result[f"{name} peak GB"] = median(run["peak_bytes"] for run in runs_of_program) / 1e9
    if not torch:
        return result
    ours = runs["ours"][0]
    theirs = runs["torch"][0]
    for key, scale in (("loss", 0.1), ("grad_norm", ours["grad_norm"])):
        if abs(ours[key] - theirs[key]) > TOLERANCE[dtype] * scale:
            raise SystemExit(f"{size}: {key} differs: ours {ours[key]}, torch {theirs[key]}")
    for clock in ("seconds", "cpu_seconds"):
        ratios = sorted(torch[clock] / own[clock] for own, torch in zip(*runs.values(), strict=True))
        result[f"ratio of {clock}"] = f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    return result | {"memory ratio": result["ours peak GB"] / result["torch peak GB"]}


def make_contexts(count: int, vocab_size: int) -> list[Context]:
    """The contexts of a step, with log-probabilities close to those of random weights, so that some are clipped."""
    rng = np.random.default_rng(0)
    contexts = []
    for planned in workload.planned_contexts(count, 5, vocab_size, rng):
        logprob = -np.log(vocab_size) + 0.3 * rng.standard_normal((2, len(planned.ids)))
        old_logprob, ref_logprob = logprob.astype(np.float32)
        advantage = rng.standard_normal()
        contexts.append(Context(planned.ids, planned.sampled, advantage, old_logprob, ref_logprob))
    return [contexts[index] for index in rng.permutation(len(contexts))[:count]]


def write_weights(size: common.Size, dtype: str, contexts: int, folder: str) -> None:
    from memsearcher_jax.model import sharding, weights

    model = common.model_of(size, dtype)
    weights.save(Path(folder), model, common.random_params(model, sharding.make_mesh(common.SHARDS)), None)


def print_memory(size: common.Size, dtype: str, count: int, devices: int) -> None:
    """Prints the peak of the process in each phase, and what XLA says of the program."""
    with tempfile.TemporaryDirectory(prefix="update-") as folder:
        arguments = (size, dtype, count, folder)
        environment: dict[str, Any] = {"JAX_NUM_CPU_DEVICES": str(devices)}
        common.in_process(write_weights, *arguments, **environment)
        megabytes = common.in_process(update_memory, *arguments, **environment)
    print(f"{size}, {count} contexts, {dtype}, {devices} devices, MB:")
    for name, value in megabytes.items():
        print(f"  {value:8,.1f}  {name}")


def update_memory(size: str, dtype: str, count: int, folder: str) -> dict[str, float]:
    """Megabytes by what needs them."""
    import jax

    from memsearcher_jax.logs.host_memory import peak_gb, record_peak_anew

    megabytes: dict[str, float] = {}

    def peak(name: str) -> None:
        value = peak_gb()
        if value is None:
            raise SystemExit("this system does not record the memory of a process")
        megabytes[f"peak of the process: {name}"] = value * 1e3
        record_peak_anew()

    record_peak_anew()
    jax.devices()
    peak("libraries")
    prepared = prepare_update(size, dtype, count, folder)
    peak("weights, optimizer state and rows are made")
    with jax.set_mesh(prepared.mesh):
        lowered = prepared.update.lower(prepared.state, prepared.batch)
        peak("the program is traced")
        compiled = lowered.compile()
        peak("the program is compiled")
        jax.clear_caches()
        state = prepared.state
        for name in ("the first step", "the second step"):
            state, _ = jax.block_until_ready(compiled(state, prepared.batch))
            peak(name)
    live = jax.live_arrays()
    megabytes["arrays that live after a step, all devices"] = sum(array.nbytes for array in live) / 1e6
    megabytes["of them parameters"] = _megabytes(state.params)
    megabytes["of them optimizer state"] = _megabytes(state.opt_state)
    analysis = compiled.memory_analysis()
    megabytes["program, each device: arguments"] = analysis.argument_size_in_bytes / 1e6
    megabytes["program, each device: results not in donated arguments"] = (
        analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    ) / 1e6
    megabytes["program, each device: temporary arrays"] = analysis.temp_size_in_bytes / 1e6
    megabytes["program: code"] = analysis.generated_code_size_in_bytes / 1e6
    return megabytes


def _megabytes(tree: Any) -> float:
    import jax

    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree) if hasattr(leaf, "nbytes")) / 1e6


class PreparedUpdate(NamedTuple):
    """What `update_steps` times."""

    mesh: Any
    update: Any  # jitted
    state: Any
    batch: Any


def update_steps(size: str, dtype: str, count: int, folder: str) -> dict:
    """Times the update of the package."""
    import jax

    prepared = prepare_update(size, dtype, count, folder)
    state = prepared.state
    batch = prepared.batch
    with jax.set_mesh(prepared.mesh):
        update = prepared.update.lower(state, batch).compile()

        def step() -> tuple[float, float]:
            nonlocal state
            state, metrics = jax.block_until_ready(update(state, batch))
            return float(metrics["loss"]), float(metrics["grad_norm"])

        result = time_steps(step)
        peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", result["peak_bytes"])
        computed = int((batch.segment_BT > 0).sum())  # the prefix that contexts share is computed once
        return result | {"computed": computed, "peak_bytes": peak}


def prepare_update(size: str, dtype: str, count: int, folder: str) -> PreparedUpdate:
    """The update of the package with its state and rows."""
    import jax

    from memsearcher_jax.model import sharding, weights
    from memsearcher_jax.training.config import TrainingConfig
    from memsearcher_jax.training.packing import TrainingExample, pack
    from memsearcher_jax.training.update import init_state, make_optimizer, make_update

    mesh = sharding.make_mesh(common.SHARDS)
    model, params = weights.load(Path(folder), mesh=mesh)
    model = replace(model, param_dtype=dtype, compute_dtype=dtype, remat="save_qkv_attention")
    contexts = make_contexts(count, model.vocab_size)

    def packed(seq_len: int, rows: int, logprobs: str = "old_logprob"):
        examples = [
            TrainingExample(context.ids, getattr(context, logprobs), context.sampled, context.advantage)
            for context in contexts
        ]
        return pack(examples, seq_len, rows, np.random.default_rng(0))

    # The fewest rows that hold all contexts, as many on each device, and their shortest length.
    longest = max(len(context.ids) for context in contexts)
    lengths = range(-(-longest // 128) * 128, SEQ_LEN + 1, 128)
    rows = len(packed(SEQ_LEN, mesh.size).ids_BT)
    seq_len = next(length for length in lengths if len(packed(length, rows).ids_BT) == rows)
    batch = packed(seq_len, rows)
    batch = replace(batch, ref_logprob_BT=packed(seq_len, rows, "ref_logprob").old_logprob_BT)
    settings = TrainingConfig(
        seq_len=seq_len,
        minibatch_rows=rows,
        grad_accum_steps=1,
        logit_chunk=128,
        clip_low=CLIP,
        clip_high=CLIP,
        dual_clip=1e6,  # TRL has none
        entropy_coefficient=0.0,
        **SHARED,
    )
    with jax.set_mesh(mesh):
        optimizer = make_optimizer(settings)
        state = init_state(params, model, optimizer, mesh)
        update = make_update(model, settings, optimizer, mesh, temperature=1.0)
    return PreparedUpdate(mesh, update, state, batch)


def torch_steps(size: str, dtype: str, count: int, folder: str) -> dict:
    """Times the same step as TRL's GRPOTrainer takes it; logits are computed from the first trained token on.

    The loss is that of trl/trainer/grpo_trainer.py, `_compute_loss` with loss_type "dapo" on one process: with r the
    policy ratio, -min(r A, clip(r) A) + beta (e^d - d - 1), d = reference - policy, summed over the trained tokens and
    divided by their number in the whole batch. Unlike TRL's, the KL term has our bound, which random weights exceed.
    """
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = {"dtype": getattr(torch, dtype), "attn_implementation": "sdpa"}
    model: Any = AutoModelForCausalLM.from_pretrained(folder, **settings)
    model.to(device).train()
    model.config.use_cache = False
    contexts = sorted(make_contexts(count, model.config.vocab_size), key=lambda context: len(context.ids))
    rows = 4 if device == "cuda" else 2
    microbatches = [contexts[start : start + rows] for start in range(0, len(contexts), rows)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=SHARED["learning_rate"], weight_decay=SHARED["weight_decay"])
    trained = sum(int(context.sampled.sum()) for context in contexts)

    def padded(arrays: Iterable[np.ndarray]):
        return torch.nn.utils.rnn.pad_sequence(list(map(torch.from_numpy, arrays)), batch_first=True).to(device)

    def loss_fn(microbatch: list[Context]):
        ids = padded(context.ids for context in microbatch).long()
        mask = padded(context.sampled for context in microbatch)
        attended = padded(np.ones(len(context.ids), np.int64) for context in microbatch)
        kept = ids.shape[1] - min(int(np.argmax(context.sampled)) for context in microbatch)
        advantage = torch.tensor([[context.advantage] for context in microbatch], dtype=torch.float32, device=device)
        logits = model(input_ids=ids, attention_mask=attended, logits_to_keep=kept + 1).logits[:, :-1]
        targets = ids[:, -kept:]
        # Row by row, as trl.trainer.utils.selective_log_softmax does, to save memory.
        chosen = torch.gather(logits, -1, targets.unsqueeze(-1)).squeeze(-1).float()
        logprob = chosen - torch.stack([torch.logsumexp(row.float(), dim=-1) for row in logits])
        ratio = torch.exp(logprob - padded(context.old_logprob for context in microbatch)[:, -kept:])
        policy = -torch.min(ratio * advantage, torch.clamp(ratio, 1 - CLIP, 1 + CLIP) * advantage)
        log_ratio = padded(context.ref_logprob for context in microbatch)[:, -kept:] - logprob
        kl = torch.clamp(torch.exp(log_ratio) - log_ratio - 1, max=MAX_K3)
        return ((policy + SHARED["kl_coefficient"] * kl) * mask[:, -kept:]).sum() / trained

    def step() -> tuple[float, float]:
        total = 0.0
        for microbatch in microbatches:
            loss = loss_fn(microbatch)
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), SHARED["max_grad_norm"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device == "cuda":
            torch.cuda.synchronize()
        return total, float(norm)

    result = time_steps(step)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else result["peak_bytes"]
    return result | {"computed": sum(len(context.ids) for context in contexts), "peak_bytes": peak}


def time_steps(step: Callable[[], tuple[float, float]]) -> dict:
    """Loss and gradient norm of the first step, the median seconds of all, and the peak memory of the process."""
    seconds, cpu_seconds, results = zip(*(common.timed(step) for _ in range(STEPS)), strict=True)
    loss, grad_norm = results[0]
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result = {"loss": loss, "grad_norm": grad_norm, "peak_bytes": peak_bytes}
    return result | {"seconds": median(seconds), "cpu_seconds": median(cpu_seconds)}


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__))
