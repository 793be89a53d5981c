"""Rollouts of search trajectories: the engine, the same sampler with static batches, and transformers with them.

python benchmarks/rollout.py --size small --repeats 1

Runs one seeded workload with three programs: "engine", the rollout of training with one engine per device; "static",
the same sampler with one program for all devices in the loop of the published trainer, where every generation continues
until the longest row has ended and every prompt is prefilled completely; and "transformers", `generate` in that loop.
Lengths are forced and weights random. Prints trajectories/s, prefilled tokens, the share of slots in use, and ratios.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import common
import jax
import tyro
import workload

from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.rl.rollout import RolloutDriver, make_jobs
from memsearcher_jax.sampling.scheduler import SamplerStats

STEPS_PER_CALL = 16
ROLLOUTS = 5  # trajectories that share a question

Generate = Callable[[Sequence[Sequence[int]], int], list[list[int]]]
"""Prompts, and the number of new tokens of each, to the new tokens."""


@dataclass(frozen=True)
class Flags(common.Flags):
    """Command-line options."""

    size: common.Size = "small"
    """Model, with random weights."""
    trajectories: int = 200
    """Trajectories of the workload, 1 to 6 turns each."""
    slots: int = 32
    """Concurrent contexts of every program."""


def main(flags: Flags) -> None:
    # XLA runs most of a decoding step of a device of the CPU on one core.
    jax.config.update("jax_num_cpu_devices", os.cpu_count())
    model = common.model_of(flags.size, "float32")
    load = workload.make_workload(flags.trajectories, ROLLOUTS, model.vocab_size)
    programs = {"engine": engine_program(model, load, flags)}
    programs["static"] = partial(run_turn_by_turn, load, flags.slots, static_generate(model, flags))
    if importlib.util.find_spec("torch"):
        random = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        generate = partial(common.transformers_generate(model), **random)
        programs["transformers"] = partial(run_turn_by_turn, load, flags.slots, generate)
    else:
        print("transformers left out: torch is not installed")
    runs = common.alternate(programs, flags.repeats)
    rows = {name: summary(repeats, load) for name, repeats in runs.items()}
    for name, row in rows.items():
        cells = "  ".join(f"{key} {value:,.4g}" for key, value in row.items())
        print(f"{name:14}{cells}  engine is {rows['engine']['trajectories/s'] / row['trajectories/s']:.2f}x")


def summary(runs: Sequence[tuple[float, SamplerStats]], load: workload.Workload) -> dict[str, float]:
    """The median of the runs, which are (seconds, statistics); the statistics of all are the same."""
    seconds, (_, last) = statistics.median(seconds for seconds, _ in runs), runs[-1]
    return {
        "trajectories/s": len(load.plans) / seconds,
        "prefilled tokens": float(last.prefilled_tokens),
        "prefix hit rate": last.prefix_hit_rate,
        "slot utilisation": load.generated_tokens / (last.slots * STEPS_PER_CALL),
    }


def sampling(replicas: int) -> dict[str, Any]:
    buckets = max(64, 128 // replicas), max(64, 512 // replicas)
    return {"decode_steps_per_call": STEPS_PER_CALL, "prefill_chunk": 64, "prefill_buckets": buckets}


def engine_program(model: ModelConfig, load: workload.Workload, flags: Flags) -> Callable[[], SamplerStats]:
    """The rollout as training runs it."""
    mesh, params = common.publish_random(model)
    own = flags.slots // mesh.size  # of one replica
    slots = *(own * quarter // 4 for quarter in (1, 2, 3) if own >= 4), flags.slots
    settings = {"engine_per_replica": True, **sampling(mesh.size)}
    engine = common.open_engine(model, mesh, params, slots, workload.CONTEXT, **settings)
    driver = RolloutDriver(engine, workload.NumberTokenizer(), workload.workflow_of(load), workload.NoPassages())
    jobs = make_jobs(workload.problems(load), 1)

    def run() -> SamplerStats:
        trajectories, rollout = driver.trajectories(jobs, params, jax.random.key(0), lambda message: None)
        assert len(trajectories) == len(jobs) and rollout.sampler.generated_tokens == load.generated_tokens
        return rollout.sampler

    return run


def static_generate(model: ModelConfig, flags: Flags) -> Generate:
    """The sampler with static batches."""
    mesh, params = common.publish_random(model)
    slots, settings = (flags.slots,), sampling(mesh.size)
    engine = common.open_engine(model, mesh, params, slots, workload.CONTEXT + 1, **settings)

    def generate(prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
        # The first token differs, so that no prompt shares a prefix with another.
        prompts = [[row, *ids] for row, ids in enumerate(prompts)]
        contexts = common.generate(engine, params, prompts, new)
        return [list(context.ids[len(prompt) :]) for context, prompt in zip(contexts, prompts, strict=True)]

    return generate


def run_turn_by_turn(load: workload.Workload, batch_size: int, generate: Generate) -> SamplerStats:
    """The reference's loop: all trajectories generate, read and rewrite their memory before the next turn starts.

    A batch continues until its longest row has ended.
    """
    memory: dict[int, list[int]] = {number: [] for number in range(len(load.plans))}
    prefilled = steps = 0

    def generate_batch(prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> list[list[int]]:
        nonlocal prefilled, steps
        prefilled, steps = prefilled + sum(map(len, prompts)), steps + max(counts)
        generated = generate(prompts, max(counts))
        return [ids[:count] for ids, count in zip(generated, counts, strict=True)]

    for turn in range(max(len(plan.turns) for plan in load.plans)):
        active = [number for number, plan in enumerate(load.plans) if len(plan.turns) > turn]
        for batch in (active[start : start + batch_size] for start in range(0, len(active), batch_size)):
            plans = [load.plans[number] for number in batch]
            prompts = [load.prompt(plan, memory[number]) for number, plan in zip(batch, plans, strict=True)]
            thoughts = generate_batch(prompts, [plan.turns[turn].think for plan in plans])
            searching = [row for row, plan in enumerate(plans) if len(plan.turns) > turn + 1]
            if not searching:
                continue
            prompts = [[*prompts[row], *thoughts[row], *plans[row].turns[turn].observation] for row in searching]
            rewritten = generate_batch(prompts, [plans[row].turns[turn].memory for row in searching])
            for row, ids in zip(searching, rewritten, strict=True):
                memory[batch[row]] = ids
    slots = steps * batch_size // STEPS_PER_CALL
    return SamplerStats(prompt_tokens=prefilled, prefilled_tokens=prefilled, slots=slots)


if __name__ == "__main__":
    main(tyro.cli(Flags))
