"""The sampler against the trainer on one device: their log-probabilities, and the speed of both."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from memsearcher_jax.device_check.rows import Row
from memsearcher_jax.model import qwen, sharding
from memsearcher_jax.model.config import MeshConfig, ModelConfig
from memsearcher_jax.planning import roofline
from memsearcher_jax.planning.flops import forward_flops, training_flops
from memsearcher_jax.planning.roofline import CHIPS, GPUS, Workload, matmul_param_bytes
from memsearcher_jax.sampling.config import SamplingConfig
from memsearcher_jax.sampling.context import RecordedContext
from memsearcher_jax.sampling.engine import Engine
from memsearcher_jax.training import update
from memsearcher_jax.training.config import TrainingConfig
from memsearcher_jax.training.logprobs import make_logprob_fn
from memsearcher_jax.training.packing import PackedBatch, TrainingExample, pack

LAYERS = 4  # of the model that is timed: programs compile faster, and each layer takes as long as any other
MISMATCH = {"float32": 1e-3, "bfloat16": 5e-2}
"""The largest mean difference of log-probabilities, in nats, that rounding explains."""


@dataclass(frozen=True)
class Scale:
    """How much is computed."""

    slots: int
    prompt_tokens: int
    new_tokens: int
    row_tokens: int

    @classmethod
    def of(cls, *, small: bool) -> Scale:
        return cls(4, 32, 8, 128) if small else cls(64, 512, 64, 2_048)


def speed_rows(model: ModelConfig, device: Any, scale: Scale) -> Iterator[Row]:
    """The difference of log-probabilities, and tokens per second of decoding, prefill and update on one device."""
    mesh = sharding.make_mesh(MeshConfig(data=1, fsdp=1, tensor=1), [device])
    model = replace(model, layers=min(model.layers, LAYERS), remat="none", path="", adapter="", lora_rank=0)
    model = replace(model, param_dtype="float32")
    generation = roofline.generation_of(device.device_kind)
    chip = (CHIPS | GPUS)[generation] if generation else None
    with jax.set_mesh(mesh):
        init = jax.jit(qwen.init, static_argnums=1, out_shardings=sharding.param_shardings(model, mesh))
        params = init(jax.random.key(0), model)
    published = sharding.publish_program(model, mesh, (device,), model.compute_dtype)(params)
    published = sharding.on_submesh(published, mesh)
    engine = _open_engine(model, mesh, scale)
    engine.warm_up(published)
    contexts, prefill_seconds, decode_seconds = _generate(engine, published, model, scale)
    batch = _rows_of(contexts, scale)
    training = TrainingConfig(seq_len=scale.row_tokens, minibatch_rows=len(batch.ids_BT), grad_accum_steps=1)
    training = replace(training, logit_chunk=min(128, scale.row_tokens), kl_coefficient=0.0, old_logprobs="sampler")
    packed_model = sharding.select_attention(model, mesh, scale.row_tokens)
    yield _mismatch_row(packed_model, training, mesh, params, batch)

    decoded = scale.slots * scale.new_tokens
    step_bytes = matmul_param_bytes(model)
    yield _speed_row("decode", decoded, decode_seconds, chip and scale.new_tokens * step_bytes / chip.hbm_bandwidth)
    prefilled = scale.slots * scale.prompt_tokens
    pairs = scale.slots * scale.prompt_tokens**2 / 2
    flops = forward_flops(model, prefilled, pairs, 0).forward
    yield _speed_row("prefill", prefilled, prefill_seconds, chip and flops / chip.flops)
    trained = int(np.sum(batch.segment_BT > 0))
    rows = len(batch.ids_BT)
    row = forward_flops(model, rows * scale.row_tokens, rows * scale.row_tokens**2 / 4, int(batch.mask_BT.sum()))
    seconds = _update_seconds(packed_model, training, mesh, params, batch)
    yield _speed_row("update", trained, seconds, chip and training_flops(packed_model, row) / chip.flops)


def _open_engine(model: ModelConfig, mesh: Mesh, scale: Scale) -> Engine:
    context_tokens = scale.prompt_tokens + scale.new_tokens
    chunk = min(64, scale.prompt_tokens)
    settings = SamplingConfig(
        slots=scale.slots,
        context_tokens=context_tokens,
        decode_steps_per_call=min(32, scale.new_tokens),
        page_tokens=min(128, scale.prompt_tokens),
        prefill_chunk=chunk,
        prefill_buckets=(scale.prompt_tokens * 2,),
        top_k=0,
        top_p=1.0,
    )
    return Engine(model, settings, (), mesh)


def _generate(
    engine: Engine, params: Any, model: ModelConfig, scale: Scale
) -> tuple[list[RecordedContext], float, float]:
    """The contexts after `new_tokens` each, and the seconds until all were prefilled, and of decoding."""
    prompts = np.random.default_rng(0).integers(0, model.vocab_size, (scale.slots, scale.prompt_tokens))

    def run(new_tokens: int) -> tuple[list[RecordedContext], float]:
        engine.start(params, jax.random.key(0))
        slots = engine.scheduler.free_slots
        began = time.perf_counter()
        for number, (slot, ids) in enumerate(zip(slots, prompts.tolist(), strict=True)):
            engine.scheduler.open_context(slot, ids, (number, 0), new_tokens)
        while engine.scheduler.active:
            engine.step()
        seconds = time.perf_counter() - began
        return [engine.scheduler.pop_context(slot) for slot in slots], seconds

    run(1)  # what is used for the first time is slower
    _, prefill_seconds = run(1)
    contexts, seconds = run(scale.new_tokens)
    return contexts, prefill_seconds, max(seconds - prefill_seconds, 1e-9)


def _rows_of(contexts: Sequence[RecordedContext], scale: Scale) -> PackedBatch:
    """What was sampled, as rows of the trainer."""
    examples = [
        TrainingExample(
            np.asarray(context.ids, np.int32),
            np.asarray(context.logprobs, np.float32),
            np.asarray(context.sampled, bool),
            1.0 if number % 2 else -1.0,
        )
        for number, context in enumerate(contexts)
    ]
    return pack(examples, scale.row_tokens, 1, np.random.default_rng(0))


def _mismatch_row(model: ModelConfig, training: TrainingConfig, mesh: Mesh, params: Any, batch: PackedBatch) -> Row:
    logprob_fn = make_logprob_fn(model, training, temperature=1.0)
    with jax.set_mesh(mesh):
        logprob_BT = np.asarray(logprob_fn(params, batch))
    difference = np.abs(logprob_BT - batch.old_logprob_BT)[batch.mask_BT]
    limit = MISMATCH[model.compute_dtype]
    mean = float(difference.mean())
    found = f"mean {mean:.1e}, largest {difference.max():.1e} nats"
    way_out = "set training.old_logprobs trainer, which corrects for it, and report this table"
    return Row("sampler against trainer", found, f"mean at most {limit:.0e}", mean <= limit, way_out)


def _update_seconds(model: ModelConfig, training: TrainingConfig, mesh: Mesh, params: Any, batch: PackedBatch) -> float:
    """Of the second update, which compiles nothing."""
    optimizer = update.make_optimizer(training)
    with jax.set_mesh(mesh):
        state = update.init_state(params, model, optimizer, mesh)
        take_update: Callable[..., Any] = update.make_update(model, training, optimizer, mesh, temperature=1.0)
        state, _ = jax.block_until_ready(take_update(state, batch, None, np.int32(0)))
        began = time.perf_counter()
        jax.block_until_ready(take_update(state, batch, None, np.int32(1)))
        return time.perf_counter() - began


def _speed_row(name: str, tokens: int, seconds: float, bound: float | None) -> Row:
    """Tokens per second, and what a plan expects of this chip; `bound`: seconds at the peak rate."""
    found = f"{tokens / seconds:,.0f} tokens/s"
    if bound is None:
        return Row(name, found, "peak rates of this device are not known", None)
    planned_seconds = bound / Workload().efficiency
    shares = f"{bound / seconds:.0%} of the peak rate, {planned_seconds / seconds:.0%} of a plan"
    return Row(name, f"{found}, {shares}", f"{tokens / planned_seconds:,.0f} tokens/s in a plan", None)
