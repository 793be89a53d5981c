"""One optimiser step on a CPU: tokens per second and peak memory of our update, and of TRL's GRPO loss on transformers.

python benchmarks/update.py                                     # tiny, small and qwen05b in float32, against torch
python benchmarks/update.py --sizes tiny small --repeats 3
python benchmarks/update.py --sizes qwen3b --dtype bfloat16 --rows 4 --tokens 8192 --no-torch     # on an accelerator

Both start from the same weights and train the same positions of the same rows: the second half of each. A step is
forward, backward, clipped gradient and AdamW. Each program has processes of its own, in turn with the other's, and the
first step of each, which compiles, is not counted; medians count. The losses of that step must agree. Peak memory is
the process's, libraries included.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import sizes
import tyro

SHAPES = {"tiny": (16, 512), "small": (8, 512)}  # rows and tokens; of the others 2 and 512
CLIP, KL, DECAY, RATE, NORM = 0.2, 0.001, 0.01, 1e-6, 1.0
BOUND = 10.0  # of one token's divergence, as in training/grpo.py, whose jax would count as torch's memory
AGREEMENT = {"float32": 1e-4, "bfloat16": 1e-2}  # absolute, of losses around 0.1


@dataclass(frozen=True)
class Flags:
    """What to measure."""

    sizes: tuple[sizes.Size, ...] = ("tiny", "small", "qwen05b")
    """Models, all with random weights."""
    rows: int = 0
    """Rows of a step; 0: 16 for tiny, 8 for small, 2 for the others."""
    tokens: int = 512
    """Tokens of a row."""
    micro_batches: int = 1
    """Parts that the rows are cut into, for both programs."""
    remat: str = "projections"
    """What our backward pass computes again: none, projections, attention or full."""
    chunk: int = 64
    """Tokens of a row whose logits exist at one time in our program."""
    dtype: str = "float32"
    """Type of weights and activations."""
    steps: int = 4
    """Steps that are counted in each process."""
    repeats: int = 3
    """Processes of each program."""
    torch: bool = True
    """Also measure transformers on torch CPU (extra: parity)."""
    json: Path | None = None
    """Also write the numbers to this file."""
    child: str = ""
    """Of this benchmark itself: ours or torch, with one size and its folder."""
    folder: Path | None = None
    """Of this benchmark itself: where the weights are."""


@dataclass(frozen=True)
class Batch:
    """Rows to train on; all [B, T]."""

    ids: np.ndarray
    mask: np.ndarray
    advantage: np.ndarray
    old_logprob: np.ndarray
    ref_logprob: np.ndarray


def main(flags: Flags) -> None:
    if flags.child:
        print(json.dumps({"ours": ours, "torch": torch_steps}[flags.child](flags, flags.sizes[0])))
        return
    results = []
    for size in flags.sizes:
        results.append(measure(size, flags))
        cells = (f"{key} {x:,.4g}" if isinstance(x, float) else f"{key} {x}" for key, x in results[-1].items())
        print("  ".join(cells), flush=True)
    if flags.json:
        flags.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def measure(size: sizes.Size, flags: Flags) -> dict:
    """One line of the table."""
    names = ["ours", "torch"] if flags.torch else ["ours"]
    runs: dict[str, list[dict]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="update-") as folder:
        # In a process of its own too: this one stays small.
        run_child("ours", size, flags, Path(folder), save=True)
        for _ in range(flags.repeats):
            for name in names:
                runs[name].append(run_child(name, size, flags, Path(folder)))
    rows, tokens = shape_of(size, flags)
    result: dict = {"size": size, "rows": rows, "tokens": tokens, "dtype": flags.dtype}
    for name, found in runs.items():
        seconds = statistics.median(second for one in found for second in one["seconds"])
        result[f"{name} tokens/s"] = rows * tokens / seconds
        result[f"{name} peak GB"] = statistics.median(one["peak"] for one in found) / 1e9
    result["FLOP/s"] = runs["ours"][0]["flops"] * result["ours tokens/s"] / (rows * tokens)
    if flags.torch:
        losses = [runs[name][0]["loss"] for name in names]
        if abs(losses[0] - losses[1]) > AGREEMENT[flags.dtype]:
            raise SystemExit(f"{size}: the losses are {losses[0]} and {losses[1]}: these are two different steps")
        result["ratio"] = result["ours tokens/s"] / result["torch tokens/s"]
        result["memory ratio"] = result["ours peak GB"] / result["torch peak GB"]
    return result


def run_child(name: str, size: str, flags: Flags, folder: Path, *, save: bool = False) -> dict:
    """What one process says."""
    given = {
        one: getattr(flags, one) for one in ("rows", "tokens", "micro_batches", "remat", "chunk", "dtype", "steps")
    }
    if save:
        given["steps"] = 0
    words = [word for one, value in given.items() for word in (f"--{one.replace('_', '-')}", str(value))]
    command = [sys.executable, __file__, "--sizes", size, *words, "--child", name, "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} failed on {size}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def shape_of(size: str, flags: Flags) -> tuple[int, int]:
    rows, tokens = SHAPES.get(size, (2, 512))
    return flags.rows or rows, flags.tokens or tokens


def batch_of(size: str, flags: Flags, vocab_size: int) -> Batch:
    """The rows of a step; log-probabilities near those of random weights, so that some ratios are clipped."""
    rows, tokens = shape_of(size, flags)
    draw = np.random.default_rng(0)
    mask = np.broadcast_to(np.arange(tokens) >= tokens // 2, (rows, tokens))
    near = -np.log(vocab_size) + 0.3 * draw.standard_normal((2, rows, tokens))
    return Batch(
        ids=draw.integers(0, vocab_size, (rows, tokens)).astype(np.int32),
        mask=mask,
        advantage=np.where(mask, draw.standard_normal((rows, 1)), 0).astype(np.float32),
        old_logprob=np.where(mask, near[0], 0).astype(np.float32),
        ref_logprob=np.where(mask, near[1], 0).astype(np.float32),
    )


def ours(flags: Flags, size: str) -> dict:
    """Our update. With no steps: writes the weights that both start from."""
    from dataclasses import replace

    import jax

    from memsearcher_jax.model import weights
    from memsearcher_jax.model.arithmetic import forward_work, training_flops
    from memsearcher_jax.training.config import TrainingConfig
    from memsearcher_jax.training.rows import Rows
    from memsearcher_jax.training.update import init_state, make_optimizer, make_update

    model, mesh = replace(sizes.model_of(size, flags.dtype), remat=flags.remat), sizes.mesh_of(1)
    if not flags.steps:
        weights.save(flags.folder, model, sizes.random_params(model, mesh), None)
        return {}
    batch = batch_of(size, flags, model.vocab_size)
    rows, tokens = batch.ids.shape
    settings = TrainingConfig(
        row_tokens=tokens,
        rows_per_update=rows,
        accumulate=flags.micro_batches,
        logit_chunk=min(flags.chunk, tokens),
        learning_rate=RATE,
        weight_decay=DECAY,
        max_grad_norm=NORM,
        clip_low=CLIP,
        clip_high=CLIP,
        clip_c=1e6,  # TRL has no dual clip
        kl_coefficient=KL,
        entropy_coefficient=0.0,
    )
    position = np.broadcast_to(np.arange(tokens, dtype=np.int32), batch.ids.shape)
    packed = Rows(
        batch.ids, position, np.ones_like(batch.ids), batch.mask, batch.advantage, batch.old_logprob, batch.ref_logprob
    )
    with jax.set_mesh(mesh):
        optimizer = make_optimizer(settings)
        state = init_state(weights.load(flags.folder, mesh=mesh)[1], model, optimizer, mesh)
        update = make_update(model, settings, optimizer, mesh, temperature=1.0)

        def step() -> float:
            nonlocal state
            state, metrics = update(state, packed)
            return float(jax.block_until_ready((state, metrics))[1]["loss"])

        result = timed(step, flags.steps)
    trained = rows * tokens / 2
    work = forward_work(model, rows * tokens, rows * tokens * (tokens + 1) / 2, trained)
    return result | {"flops": training_flops(replace(model, remat="none"), work) - work.output}


def torch_steps(flags: Flags, size: str) -> dict:
    """The same step as TRL's GRPOTrainer takes it, with logits of what is trained alone, and their sums in float32.

    Its loss (trl/trainer/grpo_trainer.py, `_compute_loss` with loss_type "dapo" on one process): with r the ratio of
    policies, -min(r A, clip(r) A) + beta (e^d - d - 1), d = reference - policy, summed over trained tokens and divided
    by their number in the whole batch. The divergence has our bound, which TRL's has not: with random weights tokens
    are beyond it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(flags.folder, dtype=getattr(torch, flags.dtype)).train()
    model.config.use_cache = False
    batch = batch_of(size, flags, model.config.vocab_size)
    kept = int(batch.mask[0].sum())
    ids = torch.from_numpy(batch.ids).long()
    fields = (batch.advantage, batch.old_logprob, batch.ref_logprob)
    parts = [x.chunk(flags.micro_batches) for x in (ids, *(torch.from_numpy(x[:, -kept:].copy()) for x in fields))]
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    tokens = int(batch.mask.sum())

    def loss_of(ids, advantage, old, reference):
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), logits_to_keep=kept + 1).logits[:, :-1]
        targets = ids[:, -kept:]
        # Row by row, as trl.trainer.utils.selective_log_softmax does, to hold one row's sums at a time.
        chosen = torch.gather(logits, -1, targets.unsqueeze(-1)).squeeze(-1).float()
        logprob = chosen - torch.stack([torch.logsumexp(row.float(), dim=-1) for row in logits])
        ratio = torch.exp(logprob - old)
        policy = -torch.min(ratio * advantage, torch.clamp(ratio, 1 - CLIP, 1 + CLIP) * advantage)
        difference = reference - logprob
        divergence = torch.clamp(torch.exp(difference) - difference - 1, max=BOUND)
        return (policy + KL * divergence).sum() / tokens

    def step() -> float:
        whole = 0.0
        for part in zip(*parts, strict=True):
            loss = loss_of(*part)
            loss.backward()
            whole += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return whole

    return timed(step, flags.steps)


def timed(step: Callable[[], float], steps: int) -> dict:
    """The first step's loss, the seconds of those that follow, and the process's peak memory in bytes."""
    loss, seconds = step(), []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return {"loss": loss, "seconds": seconds, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


if __name__ == "__main__":
    main(tyro.cli(Flags))
