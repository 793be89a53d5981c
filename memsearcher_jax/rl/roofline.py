"""How long a step takes at least: what it must multiply, read and send, over the rates of the chips.

Times are limits, not predictions: every chip at its full rate and nothing waiting for anything. Where a limit of one
kind hides those of the others (`Phase.bound`), that is the one to buy or to save.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from memsearcher_jax.config import RunConfig
from memsearcher_jax.model.arithmetic import forward_work, row_work, training_flops
from memsearcher_jax.model.config import ModelConfig

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """One JAX device of a TPU generation: a chip, or where `devices` is 2 half of one."""

    flops: float  # bfloat16 products and sums a second
    hbm_bytes: float  # that programs may use: where the compiler refuses more
    hbm_rate: float  # bytes a second
    link_rate: float  # bytes a second that it sends, over all of its links, where they close to rings
    ring: int  # chips in a row from which on the links close
    devices: int = 1


# Rates: docs.cloud.google.com/tpu/docs, and jax-ml/scaling-book, tpus.md. Bytes: what the compiler says.
CHIPS = {
    "v5e": Chip(197e12, 15.75 * GIB, 819e9, 200e9, 16),
    "v5p": Chip(459e12, 95.73 * GIB, 2_765e9, 600e9, 4),
    "v6e": Chip(918e12, 31.24 * GIB, 1_640e9, 400e9, 16),
    "tpu7x": Chip(1_153e12, 94.74 * GIB, 3_690e9, 300e9, 4, devices=2),
}


@dataclass(frozen=True)
class Load:
    """What a step is assumed to hold, by means. Defaults: the lengths of benchmarks/workload.py."""

    contexts: float = 3.5
    """Contexts of a trajectory."""
    context_tokens: float = 1_340.0
    """Tokens of a context."""
    generated_tokens: float = 250.0
    """Of these, generated and trained on."""
    prefilled_tokens: float = 640.0
    """Of these, read and in nobody else's cache."""
    row_fill: float = 0.97
    """Share of a packed row that is tokens."""
    efficiency: float = 0.45
    """Of the roofline, what a run is assumed to reach."""


@dataclass(frozen=True)
class Phase:
    """One phase of a step: seconds that each limit asks for."""

    name: str
    compute: float
    memory: float
    links: float

    @property
    def seconds(self) -> float:
        return max(self.compute, self.memory, self.links)

    @property
    def bound(self) -> str:
        return max(("compute", "memory", "links"), key=lambda limit: getattr(self, limit))


@dataclass(frozen=True)
class Slice:
    """The chips of a run."""

    chip: Chip
    devices: int
    hosts: int
    wraps: bool  # whether the links close to rings

    @property
    def chips(self) -> int:
        return self.devices // self.chip.devices

    def phase(self, name: str, flops: float, read: float, sent: float) -> Phase:
        """Of what one device does."""
        chip, share = self.chip, 1 if self.wraps else 0.5
        return Phase(name, flops / chip.flops, read / chip.hbm_rate, sent / (chip.link_rate * share))


def slice_of(generation: str, lengths: tuple[int, ...], devices: int, hosts: int) -> Slice:
    """The slice of a generation in `CHIPS` with so many chips along each of its axes."""
    chip = CHIPS[generation]
    return Slice(chip, devices, hosts, wraps=all(length >= chip.ring for length in lengths))


def multiplied(model: ModelConfig) -> float:
    """Weights in all matrices that tokens are multiplied with."""
    return forward_work(model, 1, 0, 1).forward / 2


def weight_bytes(model: ModelConfig) -> float:
    """Of those, as the model computes with them."""
    return multiplied(model) * (2 if model.compute_dtype == "bfloat16" else 4)


def rows_of_step(config: RunConfig, load: Load) -> float:
    """Packed rows of one step."""
    contexts = config.rl.problems * config.rl.rollouts * load.contexts
    return contexts * load.context_tokens / (config.training.row_tokens * load.row_fill)


def micro_batches(config: RunConfig, load: Load) -> int:
    """Micro-batches of one step that hold anything."""
    micro_rows = config.training.rows_per_update // config.training.accumulate
    return math.ceil(rows_of_step(config, load) / micro_rows)


def trained_row_tokens(config: RunConfig, load: Load) -> float:
    """Tokens of a row that get logits: those that are trained, in whole chunks."""
    settings = config.training
    trained = settings.row_tokens * load.row_fill * load.generated_tokens / load.context_tokens
    return math.ceil(trained / settings.logit_chunk) * settings.logit_chunk


def training_phases(config: RunConfig, load: Load, where: Slice, *, tensor: int, sent: dict[str, float]) -> list[Phase]:
    """What comes after the rollouts. `sent`: bytes that a device sends in one micro-batch, by program."""
    model, settings = config.model, config.training
    micro, count = settings.rows_per_update // settings.accumulate, micro_batches(config, load)
    rows = micro * count / where.devices  # as if one device did whole rows; "tensor" shares them
    work = row_work(model, settings.row_tokens, trained_row_tokens(config, load))
    # Every device has each matrix once whole, or its share of "tensor", in each pass: written, then read.
    fetched = 2 * weight_bytes(model) / tensor * count
    phases = []
    scorings = bool(settings.kl_coefficient) + (settings.old_logprobs != "sampler")
    if scorings:
        sent_here = sum(sent.get(name, 0) for name in ("reference", "old log-probabilities"))
        phases.append(where.phase("reference", scorings * rows * work.forward, scorings * fetched, sent_here * count))
    passes = 2 if model.remat == "none" else 3
    updates = math.ceil(rows_of_step(config, load) / settings.rows_per_update)
    optimizer = 28 * multiplied(model) / where.devices * updates  # read and written: weights, moments, gradient
    flops = rows * training_flops(model, work)
    phases.append(where.phase("update", flops, passes * fetched + optimizer, sent.get("update", 0) * count))
    return phases


def sampling_phases(config: RunConfig, load: Load, where: Slice, *, sent: dict[str, float]) -> list[Phase]:
    """Weights to the sampler, and rollouts with every slot speaking. `sent`: bytes per call, of `decode` per token."""
    model, sampling = config.model, config.sampling
    devices = where.devices // where.hosts
    copies = devices // sampling.tensor
    contexts = config.rl.problems * config.rl.rollouts * load.contexts / where.hosts
    weights = weight_bytes(model)
    read = forward_work(
        model, contexts * load.prefilled_tokens, contexts * load.prefilled_tokens * load.context_tokens / 2, 0
    )
    calls = contexts * load.prefilled_tokens / (sampling.prefill_buckets[-1] * copies)
    steps = contexts * load.generated_tokens / sampling.slots
    # Of the cache what is looked at: on average a context is somewhere in its middle.
    cache = (
        2 * model.layers * model.kv_heads * model.head_size * 2 * load.context_tokens * 0.75 * sampling.slots / devices
    )
    token = forward_work(model, 1, load.context_tokens * 0.75, 1).forward * sampling.slots / devices
    return [
        where.phase("publish", 0, 2 * weights / sampling.tensor, sent.get("publish", 0)),
        where.phase(
            "prefill", read.forward / devices, calls * weights / sampling.tensor, calls * sent.get("prefill", 0)
        ),
        where.phase(
            "decode", steps * token, steps * (weights / sampling.tensor + cache), steps * sent.get("decode", 0)
        ),
    ]


@dataclass(frozen=True)
class Outlook:
    """A run at a share of the roofline."""

    step_seconds: float
    tokens_per_second: float  # all tokens of all contexts, over the whole step
    hours: float
    chip_hours: float


def outlook(config: RunConfig, load: Load, where: Slice, phases: list[Phase]) -> Outlook:
    """Of a run of `rl.steps` steps."""
    seconds = sum(phase.seconds for phase in phases) / load.efficiency
    tokens = config.rl.problems * config.rl.rollouts * load.contexts * load.context_tokens
    hours = seconds * config.rl.steps / 3600
    return Outlook(seconds, tokens / seconds, hours, hours * where.chips)
