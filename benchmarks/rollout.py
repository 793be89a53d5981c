"""Rollouts of search trajectories: the engine, the same sampler with static batches, and transformers with them.

python benchmarks/rollout.py --size small --repeats 1

docs/plan.md describes the three programs. They run one seeded workload with forced lengths and random weights. Prints
trajectories/s, prefilled tokens, the share of slots in use, and how many times as fast as each program the engine is.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import common
import jax
import tyro
from workload import CONTEXT, Plan, make_workload

from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.sampling.scheduler import SamplerStats, Scheduler

STEPS_PER_CALL = 16
ROLLOUTS = 5  # trajectories that share a question
Generate = Callable[[Sequence[Sequence[int]], int], list[list[int]]]  # of prompts and a number: the new tokens


@dataclass(frozen=True)
class Flags(common.Flags):
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
    plans = make_workload(flags.trajectories, ROLLOUTS, model.vocab_size)
    programs = {"engine": engine_program(model, plans, flags.slots)}
    programs["static"] = partial(run_turn_by_turn, plans, flags.slots, static_generate(model, flags.slots))
    if importlib.util.find_spec("torch"):
        generate = partial(common.transformers_generate(model), do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
        programs["transformers"] = partial(run_turn_by_turn, plans, flags.slots, generate)
    else:
        print("transformers left out: torch is not installed")
    runs = common.alternate({name: partial(common.timed, program) for name, program in programs.items()}, flags.repeats)
    speeds = {name: len(plans) / statistics.median(seconds for seconds, *_ in of) for name, of in runs.items()}
    generated = sum(plan.generated_tokens for plan in plans)
    for name, speed in speeds.items():
        stats = runs[name][-1][-1]  # of all runs the same
        print(
            f"{name:14}trajectories/s {speed:,.4g}  prefilled tokens {stats.prefilled_tokens:,}"
            f"  prefix hit rate {stats.prefix_hit_rate:.2f}"
            f"  slot utilisation {generated / (stats.slots * STEPS_PER_CALL):.2f}"
            f"  engine is {speeds['engine'] / speed:.2f}x"
        )


def sampling() -> dict[str, Any]:
    buckets = max(64, 128 // jax.device_count()), max(64, 512 // jax.device_count())
    return {"decode_steps_per_call": STEPS_PER_CALL, "prefill_chunk": 64, "prefill_buckets": buckets}


def engine_program(model: ModelConfig, plans: Sequence[Plan], total: int) -> Callable[[], SamplerStats]:
    """The sampler as training runs it, with an engine per device."""
    own = total // jax.device_count()  # slots of one replica
    slots = *(own * quarter // 4 for quarter in (1, 2, 3) if own >= 4), total
    engine, params = common.random_engine(model, slots, CONTEXT, engine_per_replica=True, **sampling())

    def run() -> SamplerStats:
        engine.start(params, jax.random.key(0))
        waiting = list(plans)
        active = {}
        while waiting or active:
            for slot in engine.scheduler.free_slots[: len(waiting)]:
                active[slot] = trajectory(engine.scheduler, slot, waiting.pop(0))
                next(active[slot])
            for generation in engine.step():
                if not next(active[generation.slot], False):
                    del active[generation.slot]
        return engine.stop()

    return run


def trajectory(scheduler: Scheduler, slot: int, plan: Plan) -> Iterator[bool]:
    """Starts a generation in the slot, and the next one when it is resumed: when that generation has ended."""
    memory: Sequence[int] = ()
    for number, turn in enumerate(plan.turns, start=1):
        scheduler.open_context(slot, plan.prompt(memory), (slot, number), turn.think)
        yield True
        if number < len(plan.turns):
            scheduler.extend_context(slot, turn.observation, turn.memory)
            yield True
        memory = scheduler.pop_context(slot).ids[-turn.memory :]


def static_generate(model: ModelConfig, slots: int) -> Generate:
    """The sampler with static batches, and one program for all devices."""
    engine, params = common.random_engine(model, (slots,), CONTEXT + 1, **sampling())

    def generate(prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
        # The first token differs, so that no prompt shares a prefix with another.
        prompts = [[row, *ids] for row, ids in enumerate(prompts)]
        contexts = common.generate(engine, params, prompts, new)
        return [list(context.ids[-new:]) for context in contexts]

    return generate


def run_turn_by_turn(plans: Sequence[Plan], batch_size: int, generate: Generate) -> SamplerStats:
    """The reference's loop: all trajectories generate, read and rewrite their memory before the next turn starts.

    A batch continues until its longest row has ended.
    """
    prefilled = steps = 0

    def generate_batch(prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> list[list[int]]:
        nonlocal prefilled, steps
        prefilled += sum(map(len, prompts))
        steps += max(counts)
        return [ids[:count] for ids, count in zip(generate(prompts, max(counts)), counts, strict=True)]

    memories: dict[Plan, Sequence[int]] = dict.fromkeys(plans, ())
    for number in range(max(len(plan.turns) for plan in plans)):
        active = [plan for plan in plans if len(plan.turns) > number]
        for batch in (active[start : start + batch_size] for start in range(0, len(active), batch_size)):
            prompts = [plan.prompt(memories[plan]) for plan in batch]
            thoughts = generate_batch(prompts, [plan.turns[number].think for plan in batch])
            read = {
                plan: (*prompt, *thought, *plan.turns[number].observation)
                for plan, prompt, thought in zip(batch, prompts, thoughts, strict=True)
                if len(plan.turns) > number + 1
            }
            if read:
                rewritten = generate_batch([*read.values()], [plan.turns[number].memory for plan in read])
                memories |= zip(read, rewritten, strict=True)
    slots = steps * batch_size // STEPS_PER_CALL
    return SamplerStats(prompt_tokens=prefilled, prefilled_tokens=prefilled, slots=slots)


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__))
