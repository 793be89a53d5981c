"""Rollouts of search trajectories: the engine, the same sampler with static batches, and transformers with them.

python benchmarks/rollout.py --size small --repeats 1

Runs one seeded workload with three programs: "engine", the rollout of training with one engine per device; "static",
the same sampler with one program for all devices in the loop of the published trainer, where every generation continues
until the longest row has ended and every prompt is prefilled completely; and "transformers", `generate` in that loop.
Lengths are forced and weights random. Prints trajectories and generated tokens per second, the prefilled prompt tokens,
the share of slots in use, and the ratios.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import common
import jax
import tyro
import workload

from memsearcher_jax.model import sharding
from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.rl.rollout import RolloutDriver, make_jobs
from memsearcher_jax.sampling.config import SamplingConfig
from memsearcher_jax.sampling.engine import Engine
from memsearcher_jax.sampling.scheduler import SamplerStats

STEPS_PER_CALL = 16


@dataclass(frozen=True)
class Flags(common.Flags):
    """Command-line options."""

    size: common.Size = "small"
    """Model, with random weights."""
    trajectories: int = 200
    """Trajectories of the workload, 1 to 6 turns each."""
    rollouts: int = 5
    """Trajectories that share a question."""
    slots: int = 32
    """Concurrent contexts of every program."""
    dtype: str = "float32"
    """Data type of weights, activations and cache."""
    cpu_devices: int = os.cpu_count() or 1
    """Devices that a CPU is split into: XLA runs most of a decoding step on one core."""
    programs: tuple[str, ...] = ("engine", "static", "transformers")
    """Programs to run; transformers needs the extra `parity`."""


def main(flags: Flags) -> None:
    jax.config.update("jax_num_cpu_devices", flags.cpu_devices)
    model = common.model_of(flags.size, flags.dtype)
    load = workload.make_workload(flags.trajectories, flags.rollouts, model.vocab_size)
    makers = {"engine": engine_program, "static": static_program, "transformers": transformers_program}
    runs = common.alternate({name: makers[name](model, load, flags) for name in flags.programs}, flags.repeats)
    rows = {name: summary(repeats, load) for name, repeats in runs.items()}
    for name, row in rows.items():
        ratio = rows["engine"]["trajectories/s"] / row["trajectories/s"] if "engine" in rows else float("nan")
        cells = "  ".join(f"{key} {value:,.4g}" for key, value in row.items())
        print(f"{name:14}{cells}  engine is {ratio:.2f}x")
    common.write_json({"flags": asdict(flags), "programs": rows}, flags.json)


def summary(runs: Sequence[tuple[float, SamplerStats]], load: workload.Workload) -> dict[str, float]:
    """The median of the runs, which are (seconds, statistics); the statistics of all are the same."""
    seconds, (_, last) = statistics.median(seconds for seconds, _ in runs), runs[-1]
    return {
        "trajectories/s": len(load.plans) / seconds,
        "generated tokens/s": load.generated_tokens / seconds,
        "prefilled tokens": float(last.prefilled_tokens),
        "prefix hit rate": last.prefix_hit_rate,
        "slot utilisation": load.generated_tokens / (last.slots * STEPS_PER_CALL),
    }


def sampling_config(flags: Flags, context_tokens: int, decode_batch_sizes: tuple[int, ...] = ()) -> SamplingConfig:
    replicas = jax.device_count()
    return SamplingConfig(
        slots=flags.slots,
        engine_per_replica=True,
        context_tokens=context_tokens,
        decode_steps_per_call=STEPS_PER_CALL,
        decode_batch_sizes=decode_batch_sizes,
        prefill_chunk=64,
        prefill_buckets=(max(64, 128 // replicas), max(64, 512 // replicas)),
        top_k=0,
        top_p=1.0,
    )


def engine_program(model: ModelConfig, load: workload.Workload, flags: Flags) -> Callable[[], SamplerStats]:
    """The rollout as training runs it."""
    mesh = common.mesh_of()
    params = sharding.publish(common.random_params(model, mesh), model, mesh, flags.dtype)
    slots = flags.slots // jax.device_count()  # of one replica
    settings = sampling_config(flags, workload.CONTEXT, tuple(slots * quarter // 4 for quarter in (1, 2, 3)))
    engine = Engine(model, settings, (), mesh)
    engine.warm_up(params)
    driver = RolloutDriver(engine, workload.NumberTokenizer(), workload.workflow_of(load), workload.NoPassages())
    jobs = make_jobs(workload.problems(load), 1)

    def run() -> SamplerStats:
        trajectories, rollout = driver.trajectories(jobs, params, jax.random.key(0), lambda message: None)
        assert len(trajectories) == len(jobs) and rollout.sampler.generated_tokens == load.generated_tokens
        return rollout.sampler

    return run


def static_program(model: ModelConfig, load: workload.Workload, flags: Flags) -> Callable[[], SamplerStats]:
    """The sampler with static batches, which continue until their longest row has ended."""
    mesh = common.mesh_of()
    params = sharding.publish(common.random_params(model, mesh), model, mesh, flags.dtype)
    settings = replace(sampling_config(flags, workload.CONTEXT + 1), engine_per_replica=False)
    engine = Engine(model, settings, (), mesh)
    engine.warm_up(params)
    batches: list[SamplerStats] = []

    def generate(prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> list[list[int]]:
        engine.start(params, jax.random.key(0))
        slots = engine.scheduler.free_slots[: len(prompts)]
        for slot, ids in zip(slots, prompts, strict=True):
            # The first token differs, so that no prompt shares a prefix with another.
            engine.scheduler.open_context(slot, [slot, *ids], (slot, 0), max(counts))
        while engine.scheduler.active:
            engine.step()
        contexts = [engine.scheduler.pop_context(slot).ids for slot in slots]
        batches.append(engine.stop())
        generated = [ids[1 + len(prompt) :] for ids, prompt in zip(contexts, prompts, strict=True)]
        return [list(ids[:count]) for ids, count in zip(generated, counts, strict=True)]

    def run() -> SamplerStats:
        batches.clear()
        run_turn_by_turn(load, flags.slots, generate)
        return sum(batches, SamplerStats())

    return run


def transformers_program(model: ModelConfig, load: workload.Workload, flags: Flags) -> Callable[[], SamplerStats]:
    """transformers with static batches and left-padded prompts."""
    batch_generate = common.transformers_generate(model)
    calls: list[tuple[int, int]] = []  # prompt tokens, and new tokens of a row

    def generate(prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> list[list[int]]:
        calls.append((sum(map(len, prompts)), max(counts)))
        generated = batch_generate(prompts, max(counts), do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
        return [ids[:count] for ids, count in zip(generated, counts, strict=True)]

    def run() -> SamplerStats:
        calls.clear()
        run_turn_by_turn(load, flags.slots, generate)
        prefilled, steps = map(sum, zip(*calls, strict=True))
        slots = steps * flags.slots // STEPS_PER_CALL
        return SamplerStats(prompt_tokens=prefilled, prefilled_tokens=prefilled, slots=slots)

    return run


def run_turn_by_turn(load: workload.Workload, batch_size: int, generate: Callable[..., list[list[int]]]) -> None:
    """The reference's loop: all trajectories generate, read and rewrite their memory before the next turn starts."""
    memory: dict[int, list[int]] = {number: [] for number in range(len(load.plans))}
    for turn in range(max(len(plan.turns) for plan in load.plans)):
        active = [number for number, plan in enumerate(load.plans) if len(plan.turns) > turn]
        for batch in (active[start : start + batch_size] for start in range(0, len(active), batch_size)):
            plans = [load.plans[number] for number in batch]
            prompts = [load.prompt(plan, memory[number]) for number, plan in zip(batch, plans, strict=True)]
            thoughts = generate(prompts, [plan.turns[turn].think for plan in plans])
            searching = [row for row, plan in enumerate(plans) if len(plan.turns) > turn + 1]
            if not searching:
                continue
            prompts = [[*prompts[row], *thoughts[row], *plans[row].turns[turn].observation] for row in searching]
            rewritten = generate(prompts, [plans[row].turns[turn].memory for row in searching])
            for row, ids in zip(searching, rewritten, strict=True):
                memory[batch[row]] = ids


if __name__ == "__main__":
    main(tyro.cli(Flags))
