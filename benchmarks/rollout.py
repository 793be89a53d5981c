"""Rollouts of search trajectories: the engine, the same sampler with static batches, and transformers with them.

python benchmarks/rollout.py [--size tiny|small|qwen05b] [--baseline WORKTREE] [--json FILE]

Runs one seeded workload with four programs: "engine", the `RolloutDriver` with one engine per device; "static", the
same sampler with one program for all devices in the loop of the published trainer, where every generation continues
until the longest row has ended and every prompt is prefilled completely; "transformers", `generate` in that loop; and
"static-tuned", as "static", but a row that has ended is not computed any more, and devices synchronise only at the end
of a generation. Lengths are forced and weights random. Prints trajectories and generated tokens per second, the
prefilled prompt tokens, the share of slots in use, and the ratios. `--baseline` compares the engine with that of
another checkout instead, in processes that alternate.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import common
import jax
import tyro
import workload

from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.rl.rollout import RolloutDriver, WorkflowExecutor, make_jobs
from memsearcher_jax.sampling.config import SamplingConfig
from memsearcher_jax.sampling.engine import Engine
from memsearcher_jax.sampling.scheduler import SamplerStats

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


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
    tensor: int = 1
    """Devices that share one copy of the weights."""
    speculative_tokens: int = 0
    """Draft tokens of the engine."""
    baseline: Path | None = None
    """Another checkout, such as a git worktree of the commit before."""
    programs: tuple[str, ...] = ("engine", "static", "transformers", "static-tuned")
    """Programs to run; transformers needs the extra `parity`."""


@dataclass(frozen=True)
class Measurement:
    """One run of one program over the whole workload."""

    prompt_tokens: int  # sum of the context lengths before each generation
    prefilled_tokens: int
    token_capacity: int  # tokens that all slots could have generated in all decoding steps
    compilations: int = 0


def main(flags: Flags) -> None:
    if flags.baseline:
        compare(flags, flags.baseline)
        return
    jax.config.update("jax_num_cpu_devices", flags.cpu_devices)
    model = common.model_of(flags.size, flags.dtype)
    load = workload.make_workload(flags.trajectories, flags.rollouts, model.vocab_size)
    makers = {
        "engine": engine_program,
        "static": static_program,
        "transformers": transformers_program,
        "static-tuned": partial(static_program, tuned=True),
    }
    programs = {name: partial(count_compilations, makers[name](model, load, flags)) for name in flags.programs}
    runs = common.alternate(programs, flags.repeats)
    rows = {name: summary(repeats, load) for name, repeats in runs.items()}
    for name, row in rows.items():
        ratio = rows["engine"]["trajectories/s"] / row["trajectories/s"] if "engine" in rows else float("nan")
        print(
            f"{name:14}" + "  ".join(f"{key} {value:,.4g}" for key, value in row.items()) + f"  engine is {ratio:.2f}x"
        )
    result = {"flags": {key: str(value) for key, value in asdict(flags).items()}, "programs": rows}
    common.write_json(result, flags.json)


def compare(flags: Flags, baseline: Path) -> None:
    """Trajectories per second of the engine of this checkout and of another one, and the ratio of the medians."""
    arguments = ["--programs", "engine", "--repeats", "1"]
    for name in ("size", "dtype", "trajectories", "rollouts", "slots", "cpu_devices", "tensor", "speculative_tokens"):
        if value := getattr(flags, name):  # an earlier commit may have no flag for what is off
            arguments += [f"--{name}", str(value)]

    def engine_of(checkout: Path, file: Path) -> dict[str, float]:
        program, environment = checkout / "benchmarks" / "rollout.py", {"PYTHONPATH": str(checkout)}
        common.run_child(program, *arguments, "--json", file, environment=environment)
        return json.loads(file.read_text())["programs"]["engine"]

    with tempfile.TemporaryDirectory(prefix="rollout-") as folder:
        checkouts = {"baseline": baseline.resolve(), "this": common.REPOSITORY}
        programs = {name: partial(engine_of, path, Path(folder) / "result.json") for name, path in checkouts.items()}
        runs = common.alternate(programs, flags.repeats)
    medians = {name: statistics.median(row["trajectories/s"] for _, row in repeats) for name, repeats in runs.items()}
    print(f"this is {medians['this'] / medians['baseline']:.2f}x the baseline", medians)
    common.write_json({name: [row for _, row in repeats] for name, repeats in runs.items()}, flags.json)


def summary(runs: Sequence[tuple[float, Measurement]], load: workload.Workload) -> dict[str, float]:
    """Medians over the runs, which are (seconds, measurement)."""
    seconds, tokens = statistics.median(seconds for seconds, _ in runs), requested_tokens(load)
    _, last = runs[-1]
    return {
        "trajectories/s": len(load.plans) / seconds,
        "generated tokens/s": tokens / seconds,
        "prefilled tokens": float(last.prefilled_tokens),
        "prefix hit rate": 1 - last.prefilled_tokens / last.prompt_tokens,
        "slot utilisation": tokens / last.token_capacity,
        "compilations": float(max(run.compilations for _, run in runs)),
    }


def sampling_config(flags: Flags, context_tokens: int, decode_batch_sizes: tuple[int, ...] = ()) -> SamplingConfig:
    replicas = jax.device_count() // flags.tensor
    return SamplingConfig(
        slots=flags.slots,
        tensor=flags.tensor,
        engine_per_replica=True,
        context_tokens=context_tokens,
        decode_steps_per_call=16,
        decode_batch_sizes=decode_batch_sizes,
        prefill_chunk=64,
        prefill_buckets=(max(64, 128 // replicas), max(64, 512 // replicas)),
        speculative_tokens=flags.speculative_tokens,
        top_k=0,
        top_p=1.0,
    )


def engine_program(model: ModelConfig, load: workload.Workload, flags: Flags) -> Callable[[], Measurement]:
    """The rollout as training runs it."""
    mesh = common.mesh_of(flags.tensor)
    params = common.random_params(model, mesh)
    slots = flags.slots * flags.tensor // jax.device_count()  # of one replica
    settings = sampling_config(flags, workload.CONTEXT, tuple(slots * quarter // 4 for quarter in (1, 2, 3)))
    engine = Engine(model, settings, (), mesh)
    engine.warm_up(params)
    executor = WorkflowExecutor(engine, workload.NumberTokenizer(), workload.NoPassages())
    driver = RolloutDriver(executor, workload.workflow_of(load))
    jobs = make_jobs(workload.problems(load), 1)

    def run() -> Measurement:
        trajectories, rollout = driver.rollout(jobs, params, jax.random.key(0), lambda message: None)
        stats = rollout.sampler
        assert len(trajectories) == len(jobs) and stats.generated_tokens == requested_tokens(load)
        capacity = stats.slots * settings.decode_steps_per_call
        return Measurement(stats.prompt_tokens, stats.prefilled_tokens, capacity)

    return run


def static_program(
    model: ModelConfig, load: workload.Workload, flags: Flags, tuned: bool = False
) -> Callable[[], Measurement]:
    """The sampler with static batches, which continue until their longest row has ended unless `tuned`."""
    mesh = common.mesh_of(flags.tensor)
    params = common.random_params(model, mesh)
    settings = replace(sampling_config(flags, workload.CONTEXT + 1), engine_per_replica=tuned)
    engine = Engine(model, settings, (), mesh)
    engine.warm_up(params)
    batches: list[SamplerStats] = []

    def generate(prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> list[list[int]]:
        engine.start(params, jax.random.key(0))
        slots = engine.free_slots[: len(prompts)]
        for slot, ids, count in zip(slots, prompts, counts, strict=True):
            # The first token differs, so that no prompt shares a prefix with another.
            engine.open_context(slot, [slot, *ids], (slot, 0), count if tuned else max(counts))
        while engine.active:
            engine.step()
        contexts = [engine.pop_context(slot).ids for slot in slots]
        batches.append(engine.stop())
        generated = [ids[1 + len(prompt) :] for ids, prompt in zip(contexts, prompts, strict=True)]
        return [list(ids[:count]) for ids, count in zip(generated, counts, strict=True)]

    def run() -> Measurement:
        batches.clear()
        run_turn_by_turn(load, flags.slots, generate)
        stats = sum(batches, SamplerStats())
        capacity = stats.slots * settings.decode_steps_per_call
        return Measurement(stats.prompt_tokens, stats.prefilled_tokens, capacity)

    return run


def transformers_program(model: ModelConfig, load: workload.Workload, flags: Flags) -> Callable[[], Measurement]:
    """transformers with static batches and left-padded prompts."""
    batch_generate = common.transformers_generate(model)
    prefilled = capacity = 0

    def generate(prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> list[list[int]]:
        nonlocal prefilled, capacity
        new_tokens = max(counts)
        generated = batch_generate(prompts, new_tokens, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
        prefilled += sum(map(len, prompts))
        capacity += new_tokens * flags.slots
        return [ids[:count] for ids, count in zip(generated, counts, strict=True)]

    def run() -> Measurement:
        nonlocal prefilled, capacity
        prefilled = capacity = 0
        run_turn_by_turn(load, flags.slots, generate)
        return Measurement(prefilled, prefilled, capacity)

    return run


def run_turn_by_turn(load: workload.Workload, batch_size: int, generate: Callable[..., list[list[int]]]) -> None:
    """The reference's loop: all trajectories generate, read and rewrite their memory before the next turn starts."""
    memory: dict[int, list[int]] = {number: [] for number in range(len(load.plans))}
    for turn in range(max(len(plan.turns) for plan in load.plans)):
        active = [number for number, plan in enumerate(load.plans) if len(plan.turns) > turn]
        for batch in (active[start : start + batch_size] for start in range(0, len(active), batch_size)):
            plans = [load.plans[number] for number in batch]
            prompts = [
                [*load.system, *plan.question, *load.bridge, *memory[number], *load.suffix]
                for number, plan in zip(batch, plans, strict=True)
            ]
            thoughts = generate(prompts, [plan.turns[turn].think for plan in plans])
            searching = [row for row, plan in enumerate(plans) if len(plan.turns) > turn + 1]
            if not searching:
                continue
            prompts = [[*prompts[row], *thoughts[row], *plans[row].turns[turn].observation] for row in searching]
            rewritten = generate(prompts, [plans[row].turns[turn].memory for row in searching])
            for row, ids in zip(searching, rewritten, strict=True):
                memory[batch[row]] = ids


def requested_tokens(load: workload.Workload) -> int:
    """Tokens that the workload generates; a last turn rewrites no memory."""
    thoughts = sum(turn.think for plan in load.plans for turn in plan.turns)
    return thoughts + sum(turn.memory for plan in load.plans for turn in plan.turns[:-1])


def count_compilations(program: Callable[[], Measurement]) -> Measurement:
    """Run the program, and add what XLA compiles meanwhile to its measurement."""
    compiled = []

    def listen(event: str, duration: float, **details) -> None:
        if event == COMPILE_EVENT:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        measurement = program()
        return replace(measurement, compilations=len(compiled))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


if __name__ == "__main__":
    main(tyro.cli(Flags))
