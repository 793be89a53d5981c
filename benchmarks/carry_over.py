"""Rollouts with and without trajectories that are carried over: throughput and idle slots.

python benchmarks/carry_over.py --config tiny [--bounds 0 1] [--steps 8] [--search_delay 2.0] [--json FILE]

Samples the same training problems of a preset, step by step, once for each bound of `rl.carry_over`, a step of each in
turn. The weights stay those of the start, so that all sample alike; what an update takes would be the same for all.
Prints, over the steps after the first `--skip`, trajectories per second of rollout, the share of idle slots, the share
of the generated tokens that were of interrupted contexts, and how many contexts were trained a step after they were
sampled. With `--search_delay` searches ask a service that answers every request after a random time of up to that many
seconds, and `--retrieval.max_concurrency` requests at a time.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common

from memsearcher_jax.launch import cli
from memsearcher_jax.retrieval.lru_cache import LRUCache
from memsearcher_jax.retrieval.search import Searcher, Source
from memsearcher_jax.types import Passage, Problem

if TYPE_CHECKING:
    from memsearcher_jax.rl.metrics import RolloutStats
    from memsearcher_jax.rl.rollout import RolloutDriver


@dataclass(frozen=True)
class CarryOver(cli.Command):
    """Measure rollouts with and without trajectories that are carried over."""

    bounds: tuple[int, ...] = (0, 1)
    """Values of rl.carry_over."""
    steps: int = 8
    """Steps to measure, with those to skip."""
    skip: int = 2
    """First steps, which compile and in which nothing is carried yet."""
    search_delay: float = 0.0
    """Longest delay of a search, in seconds."""


@dataclass(frozen=True)
class SlowSource:
    """Answers after a random delay, which the searches of one request share."""

    source: Source
    max_seconds: float
    rng: random.Random = field(default_factory=lambda: random.Random(0), compare=False)

    def search(self, queries: list[str], top_n: int) -> list[list[Passage]]:
        passages = self.source.search(queries, top_n)
        time.sleep(self.rng.uniform(0, self.max_seconds))  # last: a thread that outlives main must not return to C++
        return passages


@dataclass(frozen=True)
class Step:
    """What one step measured."""

    trajectories: int
    stale_C: list[bool]  # of each trained context, whether an earlier step sampled it
    stats: RolloutStats


def measure(flags: CarryOver, folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each bound."""
    # JAX reads --mesh.cpu_devices when it is imported.
    from memsearcher_jax.rl import carry_over, init_state, setup

    run = setup.prepare(flags.run, folder)
    config = run.config
    engine = setup.make_driver(run).executor.engine
    params = setup.publish(run, init_state.initial_params(run))
    count = config.rl.prompts_per_step
    steps: dict[int, list[Step]] = {bound: [] for bound in flags.bounds}
    carried = {bound: carry_over.nothing_carried(0, count) for bound in flags.bounds}

    def driver() -> RolloutDriver:
        """With a cache of searches of its own."""
        assert run.searcher is not None, "the preset searches"
        source, retrieval = run.searcher.source, config.retrieval
        source = SlowSource(source, flags.search_delay) if flags.search_delay else source
        searcher = Searcher(source, retrieval.max_batch_size, LRUCache(retrieval.query_cache_size))
        made = setup.make_driver(replace(run, searcher=searcher), engine=engine)
        concurrency = retrieval.max_concurrency if flags.search_delay else 1
        return replace(made, executor=replace(made.executor, concurrent_searches=concurrency))

    drivers = {bound: driver() for bound in flags.bounds}

    def problems(step: int) -> list[Problem]:
        return list(run.problems.train[step * count : (step + 1) * count])

    for step in range(flags.steps):
        for bound in flags.bounds:
            settings = replace(config.rl, carry_over=bound, steps=flags.steps + max(flags.bounds))
            key = carry_over.rollout_key(config.seed, step, settings)
            trajectories, carried[bound], stats = carry_over.rollout(
                drivers[bound], carried[bound], problems, params, key, step, settings, lambda line: None
            )
            idle = stats.sampler.idle_slot_share
            print(f"step {step}: carry_over {bound}, {stats.seconds:.1f} s, idle slots {idle:.3f}", flush=True)
            if step >= flags.skip:
                stale_C = [context.version < step for one in trajectories for context in one.contexts]
                steps[bound].append(Step(len(trajectories), stale_C, stats))
    for bound, measured in steps.items():
        yield {"carry_over": bound} | summary(measured)


def summary(steps: Sequence[Step]) -> dict[str, float]:
    """Means over the steps."""
    seconds = sum(step.stats.seconds for step in steps)
    generated_tokens = sum(step.stats.sampler.generated_tokens for step in steps)
    return {
        "trajectories/s": sum(step.trajectories for step in steps) / seconds,
        "seconds/step": seconds / len(steps),
        "idle slots": statistics.fmean(step.stats.sampler.idle_slot_share for step in steps),
        "interrupted tokens": sum(step.stats.interrupted_tokens for step in steps) / generated_tokens,
        "stale contexts": statistics.fmean(stale for step in steps for stale in step.stale_C),
    }


def main(argv: Sequence[str]) -> None:
    with cli.one_line_errors():
        flags = cli.parse(CarryOver, argv)
    with tempfile.TemporaryDirectory() as folder:
        common.report(measure(flags, Path(folder)), flags.json)


if __name__ == "__main__":
    main(sys.argv[1:])
