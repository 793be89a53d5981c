"""What rollouts cost the host, and for how long devices wait: simulated devices, everything else as in training.

python benchmarks/host.py --tokenizer DIR
python benchmarks/host.py --workflow react --slots 64 --search_ms 50
python benchmarks/host.py --between
python benchmarks/host.py --harness examples/openai_client.py --slots 32
python benchmarks/host.py --clock cpu --sweep     # a table

Calls of the engine take the time that the roofline gives them (decode by rows and context, prefill by width), and
replies are scripted: trajectories of about 3.5 contexts, five passages of 120 tokens for each search, memories of 200
tokens. The first run measures the clock; the second one, under cProfile, says where the host's time went.
"""

from __future__ import annotations

import cProfile
import os
import pstats
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args
from unittest import mock

import numpy as np
import tyro
from host_workload import CHUNK, GROUP, PASSAGES, TURNS, Workflow, Workload, make_workload
from simulated_devices import CallTimes, CpuClock, SimulatedDevice, SimulatedRunner, WallClock, host_topology

from memsearcher_jax.agent.base import Agent
from memsearcher_jax.config import RunConfig, agent_of
from memsearcher_jax.launch.cli import load_preset
from memsearcher_jax.runs.run_dir import PACKAGED_TOKENIZER
from memsearcher_jax.tokenizer import ChatTokenizer
from memsearcher_jax.types import Passage, ScoredTrajectory, Search, SearchResult, Trajectory

LAYOUTS: dict[str, dict[str, Any]] = {
    "one copy of the weights": {"tensor": 4, "engine_per_replica": False},
    "a copy on each chip": {"tensor": 1, "engine_per_replica": False},
    "an engine on each chip": {"tensor": 1, "engine_per_replica": True},
}


@dataclass(frozen=True)
class Flags:
    workflow: Workflow = "memsearcher"
    config: str = "qwen7b"
    """The preset whose settings count."""
    topology: str = "v6e:4x8"
    """The slice whose chips are simulated, of which a host has four."""
    tokenizer: str = str(PACKAGED_TOKENIZER)
    """Folder of the tokenizer."""
    trajectories: int = 320
    slots: int = 256
    tensor: int = 4
    """Devices that share one copy of the weights."""
    engine_per_replica: bool = False
    async_scheduling: Literal["on", "off"] = "on"
    """On, as with accelerators."""
    steps_per_call: int | None = None
    """Tokens that a call decodes; None: as the preset says."""
    search_ms: float = 0.0
    speed: float = 1.0
    """Speed of the devices as a multiple of the chip's; less than 1 is slower."""
    carry_over: int = 0
    """`rl.carry_over`: `trajectories` are those of a step, of which three are run; devices count until the end."""
    between: bool = False
    """Measure what lies between rollout and update, for 1,280 trajectories, in place of the rollout."""
    sweep: bool = False
    """Print a table: workflows, 64, 256 and 512 slots, `LAYOUTS`; in the first also searches of 50 and 500 ms."""
    harness: str = ""
    """A harness FILE.py: compare it with the workflow, at `tiny` with real calls, in place of the simulation."""
    repeats: int = 5
    """Alternating measurements of --harness."""
    clock: Literal["wall", "cpu"] = "wall"
    """cpu: time advances by the CPU time of the driver's thread, for a machine with other work."""
    profile: bool = True
    """Run a second time, under cProfile."""


def settings(flags: Flags) -> RunConfig:
    config = load_preset(flags.config)
    sampling = replace(
        config.sampling,
        slots=flags.slots,
        tensor=flags.tensor,
        engine_per_replica=flags.engine_per_replica,
        async_scheduling=flags.async_scheduling,
    )
    if flags.steps_per_call:
        sampling = replace(sampling, decode_steps_per_call=flags.steps_per_call)
    agent = replace(config.agent, workflow=flags.workflow, max_turns=max(TURNS))
    if flags.workflow == "memagent":  # which joins short texts
        agent = replace(agent, observation_tokens=CHUNK + CHUNK // 2)
    rl = replace(config.rl, prompts_per_step=flags.trajectories // GROUP, group_size=GROUP, carry_over=flags.carry_over)
    return replace(config, agent=agent, sampling=sampling, rl=rl)


@dataclass
class Simulation:
    """A driver on simulated devices."""

    driver: Any
    devices: list[SimulatedDevice]
    clock: WallClock


def simulate(flags: Flags, config: RunConfig, workload: Workload, agent: Agent, tokenizer: ChatTokenizer) -> Simulation:
    import jax

    from memsearcher_jax.model import sharding
    from memsearcher_jax.model.config import MeshConfig
    from memsearcher_jax.rl.rollout import RolloutDriver
    from memsearcher_jax.rl.tool_executor import search_backend
    from memsearcher_jax.sampling import engine as engine_module

    clock = CpuClock() if flags.clock == "cpu" else WallClock()
    generation, _, shape = flags.topology.partition(":")
    topology = host_topology(generation, [int(length) for length in shape.split("x")], 4)
    count = len(topology.host_devices)
    mesh = sharding.make_mesh(MeshConfig(data=-1, fsdp=1, tensor=flags.tensor), jax.devices()[:count])
    devices: list[SimulatedDevice] = []

    def open_runner(model: Any, sampling: Any, stop_ids: Any, mesh: Any) -> SimulatedRunner:
        devices.append(SimulatedDevice(clock))
        times = CallTimes(config, replace(topology, host_devices=range(mesh.size)), flags.speed)
        return SimulatedRunner(devices[-1], times, workload.replies, config.sampling.decode_steps_per_call)

    with mock.patch.object(engine_module, "ModelRunner", open_runner):
        engine = engine_module.Engine(config.model, config.sampling, tokenizer.stop_ids, mesh)
    searcher: Any = ScriptedSearcher(workload.passages, flags.search_ms / 1e3 if flags.clock == "wall" else 0.0)
    backend = search_backend(searcher, max_concurrency=config.retrieval.max_concurrency)
    start = partial(agent.start, token_counter=tokenizer)
    return Simulation(RolloutDriver(engine, tokenizer, start, {"": backend}), devices, clock)


class ScriptedSearcher:
    """Finds the passages that a query's text decides, after some seconds."""

    def __init__(self, passages: Sequence[Passage], seconds: float):
        self._passages = passages
        self._seconds = seconds

    def search(self, queries: Sequence[str], top_n: int) -> list[list[Passage]]:
        time.sleep(self._seconds)
        found = []
        for query in queries:
            first = sum(query.encode()) * 7_919 + len(query) * 31
            found.append([self._passages[(first + 97 * rank) % len(self._passages)] for rank in range(PASSAGES)])
        return found


class SimulatedTools:
    """Takes the place of the tool executor under the clock of CPU time: searches take simulated time."""

    def __init__(self, clock: WallClock, seconds: float, backends: dict[str, Any]):
        self._clock = clock
        self._seconds = seconds
        self._answer = backends[""].answer
        self._running: list[tuple[float, Any, Search]] = []
        self.latencies: list[float] = []

    @property
    def running(self) -> int:
        return len(self._running)

    pending = running

    def submit(self, caller: Any, request: Search) -> None:
        self._running.append((self._clock.now() + self._seconds, caller, request))

    def start(self) -> None:
        pass

    def wait(self, timeout: float) -> None:
        if self._running:
            self._clock.wait_until(min(self._running[0][0], self._clock.now() + timeout))

    def completed(self) -> list[tuple[Any, tuple[SearchResult, ...]]]:
        now = self._clock.now()
        done = [entry for entry in self._running if entry[0] <= now]
        self._running = [entry for entry in self._running if entry[0] > now]
        self.latencies += [self._seconds] * len(done)
        if not done:
            return []
        answers = self._answer([request for _, _, request in done])
        return [(caller, answer) for (_, caller, _), answer in zip(done, answers, strict=True)]


@dataclass
class Measured:
    """What one run took."""

    host_seconds: float  # of CPU
    wall_seconds: float
    trajectories: list[Trajectory]
    tokens: int  # generated
    busy_share: float  # of the devices, until the last tenth of the trajectories
    stats: Any


def measure(flags: Flags, config: RunConfig, workload: Workload, tokenizer: ChatTokenizer) -> Measured:
    """Runs all trajectories once."""
    import jax

    from memsearcher_jax.rl import carry_over, rollout
    from memsearcher_jax.sampling import engine, scheduler

    agent = agent_of(config)
    simulation = simulate(flags, config, workload, agent, tokenizer)
    clock = simulation.clock
    ended_at: list[float] = []
    trajectories: list[Trajectory] = []

    def on_end(job: Any, ended: Any) -> None:
        trajectories.append(simulation.driver.trajectory(job, ended))
        ended_at.append(clock.now())

    patches: list[Any] = []
    if flags.clock == "cpu":
        tools = partial(SimulatedTools, clock, flags.search_ms / 1e3)
        simulated_time = SimpleNamespace(monotonic=clock.now)
        patches = [
            mock.patch.object(rollout, "ToolExecutor", tools),
            *(mock.patch.object(module, "time", simulated_time) for module in (rollout, engine, scheduler)),
        ]
    for patch in patches:
        patch.start()
    began = clock.now()
    host_began = clock.host_seconds()
    tokens = 0
    if flags.carry_over:
        carried = carry_over.Carried(0)
        count = config.rl.prompts_per_step
        for step in range(3):
            made, carried, stats = carry_over.rollout(
                simulation.driver,
                carried,
                lambda later: workload.problems[later * count : (later + 1) * count],
                range(count),
                {},
                jax.random.key(0),
                step,
                config.rl,
                lambda line: None,
            )
            simulation.driver.engine.release()
            trajectories += made
            tokens += stats.sampler.generated_tokens
        until = clock.now()
    else:
        jobs = rollout.make_jobs(workload.problems, GROUP)
        stats = simulation.driver.run(jobs, {}, jax.random.key(0), on_end)
        tokens = stats.sampler.generated_tokens
        until = ended_at[len(ended_at) * 9 // 10]
    host_seconds = clock.host_seconds() - host_began
    wall_seconds = clock.now() - began
    for patch in patches:
        patch.stop()
    busy = float(np.mean([device.busy_share(began, until) for device in simulation.devices]))
    return Measured(host_seconds, wall_seconds, trajectories, tokens, busy, stats)


def sweep(flags: Flags) -> None:
    """Prints what every workflow costs the host, as rows of a table."""
    print("| workflow | slots | layout | searches, ms | host CPU, ms per trajectory | devices without work | seconds |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    tokenizer = ChatTokenizer.load(flags.tokenizer)
    for workflow in get_args(Workflow):
        for slots in (64, 256, 512):
            count = max(flags.trajectories, slots * 5 // 4)  # so that every slot has one, and some get a second one
            flags_of_slots = replace(flags, workflow=workflow, slots=slots, trajectories=count)
            workload = make_workload(workflow, tokenizer, count // GROUP)
            for layout, settings_of_layout in LAYOUTS.items():
                is_searching = workflow in ("memsearcher", "react") and settings_of_layout["tensor"] == 4
                for delay in (0.0, 50.0, 500.0) if is_searching else (0.0,):
                    row_flags = replace(flags_of_slots, search_ms=delay, **settings_of_layout)
                    fresh = replace(tokenizer)  # one that has not seen the workload
                    measured = measure(row_flags, settings(row_flags), workload, fresh)
                    milliseconds = measured.host_seconds / len(measured.trajectories) * 1e3
                    print(
                        f"| {workflow} | {slots} | {layout} | {delay:g} | {milliseconds:.1f} "
                        f"| {1 - measured.busy_share:.1%} | {measured.wall_seconds:.1f} |",
                        flush=True,
                    )


def print_profile(run: Callable[[], Any]) -> None:
    """Runs under cProfile; prints the share of each file in the time of the host, what it calls in C included."""
    profiler = cProfile.Profile()
    profiler.runcall(run)
    seconds: dict[str, float] = defaultdict(float)
    for (file, _, name), (_, _, own, _, callers) in pstats.Stats(profiler).stats.items():  # pyright: ignore
        if file != "~":
            seconds[file] += own
            continue
        if "sleep" in name or "acquire" in name:
            continue
        for (caller, _, _), (_, _, own_by_caller, _) in callers.items():
            seconds[caller] += own_by_caller
    simulation = sum(own for file, own in seconds.items() if "benchmarks" in file)
    total = sum(seconds.values()) - simulation
    print("where the host's time went (under cProfile, which makes Python slower):")
    for file, own in sorted(seconds.items(), key=lambda item: -item[1])[:12]:
        if "benchmarks" not in file:
            short = "/".join(Path(file).parts[-3:])
            print(f"  {own / total:6.1%}  {short}")


def between(flags: Flags, config: RunConfig, trajectories: Sequence[Trajectory]) -> None:
    """Prints what the host does after a rollout and before the update."""
    from memsearcher_jax.agent.base import Scoring
    from memsearcher_jax.logs.trajectories import compress_trajectories, summarize_trajectory
    from memsearcher_jax.rl.advantages import multi_context_advantages
    from memsearcher_jax.rl.batch import RolloutBatch, from_bytes, to_bytes
    from memsearcher_jax.rl.metrics import RolloutStats
    from memsearcher_jax.training.packing import merge_equal, plan_rows

    agent = agent_of(config)
    count = 1_280
    several = [trajectory for trajectory, _ in zip(cycle(trajectories), range(count), strict=False)]
    groups = [index // GROUP for index in range(count)]
    rng = np.random.default_rng(0)

    def rewarded() -> list[ScoredTrajectory]:
        if agent.needs_completers:  # which are another model's
            return [
                ScoredTrajectory(trajectory, 0.5, context_rewards=(0.5,) * len(trajectory.contexts))
                for trajectory in several
            ]
        return agent.rewards(several, Scoring(ChatTokenizer.load(flags.tokenizer)))

    seconds: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        began = time.process_time()
        result = work()
        seconds[name] = time.process_time() - began
        return result

    scored = timed("rewards", rewarded)
    scored = [replace(trajectory, reward=float(rng.random())) for trajectory in scored]  # every group has a spread
    rl = replace(config.rl, keep_constant_reward_groups=True)
    examples = timed("advantages", lambda: multi_context_advantages(scored, groups, rl))
    summaries = timed("summaries", lambda: [summarize_trajectory(trajectory) for trajectory in scored])
    batch = RolloutBatch(examples, summaries, RolloutStats())
    timed("exchange, both ways", lambda: from_bytes(to_bytes(batch)))
    examples = [replace(example, advantage=float(rng.random())) for example in examples]
    examples = timed("equal examples", lambda: merge_equal(examples))
    training = config.training
    packing = partial(plan_rows, microbatches=training.grad_accum_steps, minibatch_contexts=training.minibatch_contexts)
    rng = np.random.default_rng(0)
    rows = timed("rows", lambda: packing(examples, training.seq_len, training.minibatch_rows, rng))
    timed("arrays of the first mini-batch", lambda: rows.of_minibatch(0).batch())
    print(f"between rollout and update, {count:,} trajectories, {len(examples):,} contexts, CPU seconds:")
    for name, spent in seconds.items():
        print(f"  {spent:6.2f}  {name}")
    print(f"  {sum(seconds.values()):6.2f}  together")
    hidden = {
        "arrays of the other mini-batches": lambda: [
            rows.of_minibatch(number).batch() for number in range(1, rows.minibatches)
        ],
        "compression of trajectories": lambda: compress_trajectories(scored),
    }
    print("while the devices train:")
    for name, work in hidden.items():
        timed(name, work)
        print(f"  {seconds[name]:6.2f}  {name}")


def main(flags: Flags) -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if flags.harness:
        import harness

        harness.compare(flags.harness, flags.slots, flags.trajectories, flags.repeats)
        return
    import jax

    jax.config.update("jax_num_cpu_devices", 4)
    if flags.sweep:
        sweep(flags)
        return
    tokenizer = ChatTokenizer.load(flags.tokenizer)
    config = settings(flags)
    steps = 3 + flags.carry_over if flags.carry_over else 1
    workload = make_workload(flags.workflow, tokenizer, steps * flags.trajectories // GROUP)
    tokenizer = ChatTokenizer.load(flags.tokenizer)  # one that has not seen the workload
    tokenizer.count("")
    tokenizer.encode_trusted("")
    if flags.between:
        fast = replace(flags, speed=1e9, clock="cpu")
        between(flags, config, measure(fast, config, workload, tokenizer).trajectories)
        return
    measured = measure(flags, config, workload, tokenizer)
    done = measured.trajectories
    contexts = np.mean([len(trajectory.contexts) for trajectory in done])
    stops = sorted({trajectory.outcome.stop.value for trajectory in done})
    lengths = np.mean([len(context.ids) for trajectory in done for context in trajectory.contexts])
    print(
        f"{flags.workflow}, {len(done)} trajectories of {contexts:.2f} contexts of {lengths:,.0f} tokens, "
        f"{flags.slots} slots, searches of {flags.search_ms:g} ms, ended by: {', '.join(stops)}"
    )
    sampler = measured.stats.sampler
    print(
        f"host CPU {measured.host_seconds / len(done) * 1e3:.1f} ms per trajectory, "
        f"{measured.host_seconds / measured.tokens * 1e6:.1f} us per decoded token; "
        f"devices without work {1 - measured.busy_share:.1%} of the time; {measured.wall_seconds:.1f} s, "
        f"host_wait {sampler.host_wait / sampler.seconds:.1%}, slots without work {sampler.idle_slot_share:.1%}"
    )
    if flags.profile:
        fresh = ChatTokenizer.load(flags.tokenizer)
        print_profile(lambda: measure(flags, config, workload, fresh))


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__))
