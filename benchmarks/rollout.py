"""Rollouts of search trajectories: this engine, the same sampler in lock step, and transformers in the turn loop.

python benchmarks/rollout.py [--size tiny|small|qwen05b] [--json FILE]

Serves one seeded workload through four programs: (a) `RolloutDriver`, with an engine for each device; (b) the same
sampler in lock step, one program for the batch, in the loop that the published trainer has around its own: every
generation goes on until the slowest row has ended, and every prompt is computed from nothing; (c) transformers'
`generate` in that loop; (d) as (b), with what else this sampler can do: a row that has ended looks at nothing while it
waits, and no device waits for another before a generation is over. Lengths are forced and weights random. Prints
trajectories and generated tokens per second, the prompt tokens that were computed, how much of the decoding steps the
slots used, and the ratios.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import sizes
import tyro
import workload as work

from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.rl.rollout import RolloutDriver, jobs_for
from memsearcher_jax.sampling.buffer import PromptIds, PromptWidths
from memsearcher_jax.sampling.config import SamplingConfig
from memsearcher_jax.sampling.pool import make_sampler

COMPILED = "/jax/core/compile/backend_compile_duration"


@dataclass(frozen=True)
class Flags:
    """What to measure."""

    size: sizes.Size = "small"
    """Model, with random weights."""
    trajectories: int = 200
    """Trajectories of the workload, 1 to 6 turns each."""
    rollouts: int = 5
    """Trajectories that share a question."""
    slots: int = 32
    """Contexts side by side, in all of them."""
    dtype: str = "float32"
    """Type of weights, activations and cache."""
    cpu_devices: int = os.cpu_count() or 1
    """Devices that a CPU is cut into, each with a share of the slots: XLA does most of a decoding step on one core."""
    tensor: int = 1
    """Devices that share one copy of the weights."""
    draft_tokens: int = 0
    """Tokens that the engine guesses ahead."""
    repeats: int = 3
    """Runs of each, taking turns; the median counts."""
    programs: tuple[str, ...] = ("engine", "lock step", "transformers", "waiting")
    """Which of them to run, (a) to (d); transformers needs the extra `parity`."""
    json: Path | None = None
    """Also write the numbers to this file."""


@dataclass(frozen=True)
class Served:
    """One run of one program over the whole workload."""

    seconds: float
    generated_tokens: int  # that the workload asked for
    prompt_tokens: int  # before each generation, together
    computed_tokens: int  # of them
    room: int  # for generated tokens in all decoding steps and all slots, used or not
    compilations: int


def main(flags: Flags) -> None:
    jax.config.update("jax_num_cpu_devices", flags.cpu_devices)
    model = sizes.model_of(flags.size, flags.dtype)
    load = work.make_workload(flags.trajectories, flags.rollouts, model.vocab_size)
    waiting = partial(lock_step, at_its_best=True)
    makers = {"engine": engine, "lock step": lock_step, "transformers": turn_loop, "waiting": waiting}
    programs = {name: makers[name](model, load, flags) for name in flags.programs}
    runs: dict[str, list[Served]] = {name: [] for name in programs}
    for _ in range(flags.repeats):
        for name, serve in programs.items():
            runs[name].append(serve())
    rows = {name: summary(some, flags.trajectories) for name, some in runs.items()}
    for name, row in rows.items():
        ratio = rows["engine"]["trajectories/s"] / row["trajectories/s"] if "engine" in rows else float("nan")
        print(
            f"{name:14}" + "  ".join(f"{key} {value:,.4g}" for key, value in row.items()) + f"  engine is {ratio:.2f}x"
        )
    if flags.json:
        result = {"flags": {key: str(value) for key, value in asdict(flags).items()}, "programs": rows}
        flags.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def summary(runs: Sequence[Served], trajectories: int) -> dict[str, float]:
    """Medians over the runs."""
    seconds = statistics.median(run.seconds for run in runs)
    last = runs[-1]
    return {
        "trajectories/s": trajectories / seconds,
        "generated tokens/s": last.generated_tokens / seconds,
        "prompt tokens computed": float(last.computed_tokens),
        "share never recomputed": 1 - last.computed_tokens / last.prompt_tokens,
        "slots busy": last.generated_tokens / last.room,
        "compilations": float(max(run.compilations for run in runs)),
    }


def settings_of(flags: Flags, context_tokens: int, decode_rows: tuple[int, ...] = ()) -> SamplingConfig:
    copies = jax.device_count() // flags.tensor
    return SamplingConfig(
        slots=flags.slots,
        tensor=flags.tensor,
        apart=True,
        context_tokens=context_tokens,
        decode_tokens=16,
        decode_rows=decode_rows,
        rows_per_call=8,
        prefill_piece=64,
        prefill_buckets=(max(64, 128 // copies), max(64, 512 // copies)),
        draft_tokens=flags.draft_tokens,
        top_k=0,
        top_p=1.0,
    )


def engine(model: ModelConfig, load: work.Workload, flags: Flags) -> Callable[[], Served]:
    """(a) As training runs it."""
    mesh = sizes.mesh_of(flags.tensor)
    params = sizes.random_params(model, mesh)
    share = flags.slots * flags.tensor // jax.device_count()  # of a copy of the weights
    fewer = tuple(share * quarter // 4 for quarter in (1, 2, 3))
    sampler = make_sampler(model, settings_of(flags, work.CONTEXT, fewer), work.WIDTHS, (), mesh)
    sampler.warm_up(params)
    driver = RolloutDriver(sampler, work.NumberTokenizer(), work.EmptyIndex(), work.serve(load))
    jobs = jobs_for(work.problems(load), 1)

    def serve() -> Served:
        with compilations() as compiled:
            began = time.perf_counter()
            done = sum(1 for _ in driver.run(jobs, params, jax.random.key(0)))
            seconds = time.perf_counter() - began
        assert done == len(jobs)
        counters = sampler.counters
        assert counters.generated_tokens == asked(load)
        return Served(
            seconds,
            counters.generated_tokens,
            counters.prompt_tokens,
            counters.prefilled_tokens,
            counters.slots * sampler.settings.decode_tokens,
            len(compiled),
        )

    return serve


def lock_step(model: ModelConfig, load: work.Workload, flags: Flags, at_its_best: bool = False) -> Callable[[], Served]:
    """(b) The same programs, but a batch goes on to the end of its slowest row; (d) where the others only wait."""
    mesh = sizes.mesh_of(flags.tensor)
    params = sizes.random_params(model, mesh)
    widths = PromptWidths(prefix=1, question=work.CONTEXT, bridge=0, memory=0, suffix=0)
    settings = replace(settings_of(flags, work.CONTEXT + 1), apart=at_its_best)
    sampler = make_sampler(model, settings, widths, (), mesh)
    sampler.warm_up(params)

    def generate(prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> list[list[int]]:
        sampler.start(params, jax.random.key(0))
        slots = sampler.free[: len(prompts)]
        for slot, ids, count in zip(slots, prompts, counts, strict=True):
            # Its own first token, so that no prompt shares a beginning with another.
            prompt = PromptIds((slot,), tuple(ids), (), (), ())
            sampler.begin(slot, prompt, (slot, 0), count if at_its_best else max(counts))
        while sampler.speaking:
            sampler.tick()
        counted.append(sampler.counters)
        said = [list(sampler.take(slot).ids)[1 + len(ids) :] for slot, ids in zip(slots, prompts, strict=True)]
        return [ids[:count] for ids, count in zip(said, counts, strict=True)]

    counted: list = []

    def serve() -> Served:
        counted.clear()
        with compilations() as compiled:
            began = time.perf_counter()
            turn_by_turn(load, flags.slots, generate)
            seconds = time.perf_counter() - began
        prompts = sum(counters.prompt_tokens for counters in counted)
        computed = sum(counters.prefilled_tokens for counters in counted)
        room = sum(counters.slots for counters in counted) * sampler.settings.decode_tokens
        return Served(seconds, asked(load), prompts, computed, room, len(compiled))

    return serve


def turn_loop(model: ModelConfig, load: work.Workload, flags: Flags) -> Callable[[], Served]:
    """(c) transformers, prompts padded on the left, as many rows at once as we have slots."""
    import torch

    twin = sizes.transformers_twin(model)
    computed, room = [0], [0]

    @torch.inference_mode()
    def generate(prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> list[list[int]]:
        width, most = max(map(len, prompts)), max(counts)
        ids_BT, mask_BT = np.zeros((2, len(prompts), width), np.int64)
        for row, ids in enumerate(prompts):
            ids_BT[row, width - len(ids) :] = ids
            mask_BT[row, width - len(ids) :] = 1
        said_BT = twin.generate(
            torch.from_numpy(ids_BT),
            attention_mask=torch.from_numpy(mask_BT),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_new_tokens=most,
            max_new_tokens=most,
        )[:, width:]
        computed[0] += sum(map(len, prompts))
        room[0] += most * flags.slots
        return [said_BT[row, :count].tolist() for row, count in enumerate(counts)]

    def serve() -> Served:
        computed[0] = room[0] = 0
        began = time.perf_counter()
        turn_by_turn(load, flags.slots, generate)
        return Served(time.perf_counter() - began, asked(load), computed[0], computed[0], room[0], 0)

    return serve


def turn_by_turn(load: work.Workload, rows: int, generate: Callable[..., list[list[int]]]) -> None:
    """The reference's loop: everybody thinks, everybody reads, everybody rewrites, then the next turn begins."""
    memory: dict[int, list[int]] = {number: [] for number in range(len(load.plans))}
    for turn in range(max(len(plan.turns) for plan in load.plans)):
        active = [number for number, plan in enumerate(load.plans) if len(plan.turns) > turn]
        for some in (active[start : start + rows] for start in range(0, len(active), rows)):
            plans = [load.plans[number] for number in some]
            prompts = [
                [*load.system, *plan.question, *load.bridge, *memory[number], *load.suffix]
                for number, plan in zip(some, plans, strict=True)
            ]
            thoughts = generate(prompts, [plan.turns[turn].think for plan in plans])
            searching = [row for row, plan in enumerate(plans) if len(plan.turns) > turn + 1]
            if not searching:
                continue
            prompts = [[*prompts[row], *thoughts[row], *plans[row].turns[turn].observation] for row in searching]
            rewritten = generate(prompts, [plans[row].turns[turn].memory for row in searching])
            for row, ids in zip(searching, rewritten, strict=True):
                memory[some[row]] = ids


def asked(load: work.Workload) -> int:
    """Tokens that the workload generates: a last turn rewrites no memory."""
    thoughts = sum(turn.think for plan in load.plans for turn in plan.turns)
    return thoughts + sum(turn.memory for plan in load.plans for turn in plan.turns[:-1])


class compilations:
    """Lists what XLA compiles while it is open."""

    def __enter__(self) -> list[str]:
        self._seen: list[str] = []
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self._seen

    def __exit__(self, *_) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration: float, **details) -> None:
        if event == COMPILED:
            self._seen.append(str(details.get("fun_name", event)))


if __name__ == "__main__":
    main(tyro.cli(Flags))
