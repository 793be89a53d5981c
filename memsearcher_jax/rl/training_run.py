"""Puts the collaborators of a training run together, by its settings, and trains."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from memsearcher_jax.config import to_dict
from memsearcher_jax.data.problems import ProblemLoader
from memsearcher_jax.hosts.distributed import Hosts
from memsearcher_jax.logs.metrics import MetricsWriter
from memsearcher_jax.logs.progress import Progress
from memsearcher_jax.rl import carry_over, loop
from memsearcher_jax.rl.carry_over import Carried, CarryOver
from memsearcher_jax.rl.collector import Collector
from memsearcher_jax.rl.dynamic_sampling import DynamicSampling
from memsearcher_jax.rl.evaluate import Evaluator
from memsearcher_jax.rl.health import HealthMonitor
from memsearcher_jax.rl.recorder import Recorder
from memsearcher_jax.rl.recovery import Recovery
from memsearcher_jax.rl.setup import make_driver
from memsearcher_jax.rl.state import RunState, SavedProgress, open_reward_fn
from memsearcher_jax.runs.run_dir import checkpoints_of
from memsearcher_jax.training.checkpoint import Checkpoints


def open_collector(state: RunState, start: SavedProgress, hosts: Hosts | None = None) -> Collector:
    """What the settings collect with, from the position of a checkpoint on.

    Raises ValueError if trajectories that it carries cannot go on under these settings, or a service's do not suffice.
    """
    run = state.run
    hosts = hosts or Hosts()
    problems = run.problems
    rl = run.config.rl
    driver = make_driver(run, check=hosts.check)
    carried = Carried(state.step)
    if start.carried:  # also without rl.carry_over, which cannot go on with them
        carried = carry_over.from_text(start.carried, problems.train, driver, start.changed)
    reward_fn = open_reward_fn(run, start.initial_step, check=hosts.check)
    loader = ProblemLoader(problems.train, run.config.seed)
    if rl.carry_over:
        own = carried.share(hosts.share(rl.prompts_per_step))
        return CarryOver(run, driver, reward_fn, loader, hosts, start.position, carried=own)
    if rl.refill:
        return DynamicSampling(run, driver, reward_fn, loader, hosts, start.position)
    return Collector(run, driver, reward_fn, loader, hosts, start.position)


def train_run(
    state: RunState,
    start: SavedProgress,
    collector: Collector,
    out: Path,
    writer: MetricsWriter | None,
    progress: Progress,
    profiled_step: int | None = None,
) -> None:
    """Trains from `state` to step `rl.steps` and writes everything under `out`, first an evaluation that is missing.

    On several hosts the first one writes, and only it has a writer; it writes a profile of `profiled_step`.
    Raises RunEnded where the run ends earlier.
    """
    run = state.run
    hosts = collector.hosts
    config = run.config
    eval_driver = make_driver(run, evaluation=True, check=hosts.check, engine=collector.driver.engine)
    evaluator = Evaluator(run, eval_driver, replace(collector.reward_fn, evaluation=True), hosts)
    monitor = HealthMonitor(config.health, progress.note, start.health)

    def meta() -> dict[str, Any]:
        fixed = {"settings": to_dict(start.settings), "inputs": dict(start.inputs), "initial_step": start.initial_step}
        return fixed | collector.meta() | {"health": asdict(monitor.state)}

    with Checkpoints(
        checkpoints_of(out), keep=config.rl.keep_checkpoints, best=lambda: monitor.state.best_step
    ) as checkpoints:
        recorder = Recorder(out, checkpoints, progress, hosts, meta, writer, profiled_step)
        loop.train(state, collector, Recovery(monitor, checkpoints), evaluator, recorder)
