"""MemSearcher as a workflow and as a harness over HTTP, at `tiny` with real calls on this machine.

python benchmarks/host.py --harness examples/openai_client.py --slots 32

Both make trajectories of the same problems, in turn. Their tokens differ where the harness limits replies otherwise.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import alternate, timed

from memsearcher_jax.agent.registry import make_agent
from memsearcher_jax.configs.tiny import tiny
from memsearcher_jax.data.synthetic.encyclopedia import make_encyclopedia
from memsearcher_jax.retrieval.search import open_searcher
from memsearcher_jax.runs.run_dir import located
from memsearcher_jax.tokenizer import ChatTokenizer


@dataclass(frozen=True)
class Rate:
    """What one rollout took, per trajectory."""

    wall_seconds: float
    cpu_seconds: float  # of all threads of this process, which has the devices, the endpoint and the harnesses
    tokens: float
    contexts: float


def compare(harness: str, slots: int, trajectories: int, repeats: int) -> None:
    """Prints trajectories per second of both, and the ratios of each round."""
    with tempfile.TemporaryDirectory() as folder:
        rounds = alternate(_programs(harness, slots, trajectories, folder), repeats)
    for name, rates in rounds.items():
        per_second = [1 / rate.wall_seconds for rate in rates]
        milliseconds = [rate.cpu_seconds * 1e3 for rate in rates]
        print(
            f"{name}: {np.median(per_second):.1f} trajectories per second ({_range(per_second)}), "
            f"CPU {np.median(milliseconds):.1f} ms per trajectory ({_range(milliseconds)}); "
            f"{rates[0].contexts:.2f} contexts, {rates[0].tokens:.0f} tokens"
        )
    pairs = list(zip(rounds["workflow"], rounds["harness"], strict=True))
    wall = [workflow.wall_seconds / other.wall_seconds for workflow, other in pairs]
    cpu = [other.cpu_seconds / workflow.cpu_seconds for workflow, other in pairs]
    print(f"harness/workflow, trajectories per second: {np.median(wall):.2f} ({_range(wall, 2)})")
    print(f"harness/workflow, CPU time: {np.median(cpu):.2f} ({_range(cpu, 2)})")


def _range(values: list[float], digits: int = 1) -> str:
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def _programs(harness: str, slots: int, trajectories: int, index_folder: str) -> dict[str, Callable[[], Rate]]:
    import jax

    from memsearcher_jax.model import sharding, weights
    from memsearcher_jax.model.config import MeshConfig
    from memsearcher_jax.rl.harness import HarnessDriver
    from memsearcher_jax.rl.harness_endpoint import HarnessSettings
    from memsearcher_jax.rl.rollout import RolloutDriver, make_jobs
    from memsearcher_jax.rl.tool_executor import search_backend
    from memsearcher_jax.sampling.engine import Engine

    config = tiny()
    mesh = sharding.make_mesh(MeshConfig(1, 1, 1), jax.devices()[:1])
    folder = located(config.model.path)
    tokenizer = ChatTokenizer.load(folder)
    with jax.set_mesh(mesh):
        _, loaded = weights.load(folder, mesh=mesh, dtype=config.model.compute_dtype)
    params = sharding.publish(loaded, config.model, mesh, config.model.compute_dtype)
    sizes = tuple(size for size in config.sampling.decode_batch_sizes if size < slots)
    sampling = replace(config.sampling, slots=slots, decode_batch_sizes=sizes)
    engine = Engine(config.model, sampling, tokenizer.stop_ids, mesh)
    engine.warm_up(params)
    encyclopedia = make_encyclopedia(config.data.encyclopedia)
    searcher = open_searcher(config.retrieval, Path(index_folder), encyclopedia.passages)
    backends = {"": search_backend(searcher)}
    start = partial(make_agent(config.agent).start, token_counter=tokenizer)
    group_size = config.rl.group_size
    jobs = make_jobs(encyclopedia.train[: -(-trajectories // group_size)], group_size)[:trajectories]
    settings = HarnessSettings(harness, max_tokens=config.agent.completion_tokens)
    drivers = {
        "workflow": RolloutDriver(engine, tokenizer, start, backends),
        "harness": HarnessDriver(engine, tokenizer, start, backends, harness=settings),
    }

    def measure(driver: Any) -> Rate:
        rollout = partial(driver.trajectories, jobs, params, jax.random.key(0), lambda line: None)
        wall, cpu, (done, stats) = timed(rollout)
        if faults := [trajectory.outcome.error for trajectory in done if trajectory.outcome.stop.is_fault]:
            raise SystemExit(f"{len(faults)} of {len(done)} trajectories failed: {faults[0]}")
        contexts = sum(len(trajectory.contexts) for trajectory in done)
        return Rate(wall / len(done), cpu / len(done), stats.sampler.generated_tokens / len(done), contexts / len(done))

    programs = {name: partial(measure, driver) for name, driver in drivers.items()}
    for program in programs.values():  # caches and imports
        program()
    return programs
