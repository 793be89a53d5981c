"""Plans the memory of a run on a slice, and searches for the fastest settings that fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from memsearcher_jax.config import RunConfig
from memsearcher_jax.hosts.meshes import Meshes, make_meshes
from memsearcher_jax.planning import suggest, tpu_plan
from memsearcher_jax.planning.roofline import CHIPS, Topology, Workload
from memsearcher_jax.planning.tpu_plan import DoesNotFitError, Program, ResidentMemory
from memsearcher_jax.training.update import fit_to_mesh

GB = 1e9


@dataclass(frozen=True)
class MemoryPlan:
    """What a run, or a part of it, needs of a device."""

    programs: list[Program] = field(default_factory=list)
    peaks: dict[str, float] = field(default_factory=dict)  # bytes by phase
    reason: str = ""  # why it does not fit; "" if it does
    needed_bytes: float = 0.0  # of the phase that needs most, as far as it is known

    def __add__(self, other: MemoryPlan) -> MemoryPlan:
        return MemoryPlan(
            self.programs + other.programs,
            self.peaks | other.peaks,
            self.reason or other.reason,
            max(self.needed_bytes, other.needed_bytes),
        )


@dataclass(frozen=True)
class Found:
    """Settings that fit."""

    config: RunConfig
    plan: MemoryPlan


@dataclass(frozen=True)
class Planner:
    """Plans runs on one slice. On GPUs, nothing is compiled, and lower bounds decide."""

    topology: Topology
    workload: Workload
    trains: bool  # whether training is planned
    samples: bool  # whether the sampler is planned
    notify: Callable[[str], object]  # gets what begins to compile
    report: Callable[[Program], object]  # gets each compiled program
    say: Callable[[str], object]  # gets why settings that were tried do not fit

    def plan(self, config: RunConfig) -> MemoryPlan:
        """Compiles nothing if a lower bound does not fit, and nothing after the first program that does not."""
        least = self.least(config)
        if least.reason:
            return least
        plan = MemoryPlan()
        if self.trains:
            plan += self._training(config)
        if self.samples and not plan.reason:
            plan += self._sampling(config)
        return plan

    def least(self, config: RunConfig) -> MemoryPlan:
        """Lower bounds."""
        plan = MemoryPlan()
        if self.trains:
            plan += self._least_training(config)
        if self.samples:
            plan += self._least_sampling(config)
        return plan

    def fastest(self, config: RunConfig, announce: Callable[[RunConfig, RunConfig], object]) -> Found:
        """The fastest settings that fit: of training, and then of the sampler. Raises ValueError if none do.

        `announce` gets what is compiled, and what it is derived from.
        """
        chosen = self.with_valid_sampler(config)
        plan = MemoryPlan()
        searches = []
        if self.trains:
            searches.append(("training", self.fastest_training))
        if self.samples:
            searches.append(("sampler", self.fastest_sampler))
        for name, search in searches:
            found = search(chosen, partial(announce, chosen))
            if found is None:
                raise ValueError(f"no {name} fits {self.topology.name}: try {suggest.other_ways(config)}")
            chosen = found.config
            plan += found.plan
        return Found(chosen, plan)

    def fastest_training(self, config: RunConfig, announce: Callable[[RunConfig], object]) -> Found | None:
        """The fastest settings of training that fit; None if none do. `announce` gets those that are compiled."""
        too_large: list[suggest.TooLarge] = []
        for candidate in suggest.training_candidates(config, self.workload, self.topology):
            if candidate.exceeds(self._limit, too_large):
                continue
            plan = self._least_training(candidate.config)
            if not plan.reason:
                announce(candidate.config)
                plan = self._training(candidate.config)
                if not plan.reason:
                    return Found(candidate.config, plan)
                self.say(f"does not fit: {plan.reason}")
            too_large.append(suggest.TooLarge(candidate, plan.needed_bytes))
        return None

    def fastest_sampler(self, config: RunConfig, announce: Callable[[RunConfig], object]) -> Found | None:
        """The same of the sampler."""
        temporary: dict[int, float] = {}  # bytes of the programs of what did not fit, by sampling.tensor
        for candidate in suggest.sampler_candidates(config, self.topology):
            tensor = candidate.sampling.tensor
            resident = self.memory(candidate).rollout
            if resident + temporary.get(tensor, 0.0) > self._limit:
                continue
            announce(candidate)
            plan = self._sampling(candidate)
            if not plan.reason:
                return Found(candidate, plan)
            self.say(f"does not fit: {plan.reason}")
            temporary[tensor] = max(plan.needed_bytes - resident, 0.0)
        return None

    def with_less_memory(self, config: RunConfig) -> RunConfig | None:
        """Settings that need less memory and fit by their lower bounds; None if there are none. Compiles nothing."""
        tried = self.with_valid_sampler(config)
        if self.trains:
            found = suggest.training_candidates(tried, self.workload, self.topology)
            found.sort(key=lambda candidate: (candidate.config.mesh.tensor, candidate.saved_bytes))
            fitting = (each.config for each in found if not self._least_training(each.config).reason)
            smallest = next(fitting, None)
            if smallest is None:
                return None
            tried = smallest
        if self.samples:
            candidates = suggest.sampler_candidates(tried, self.topology)
            return next((each for each in candidates if not self._least_sampling(each).reason), None)
        return tried

    def smallest(self, config: RunConfig) -> RunConfig:
        """The same. Raises ValueError with other ways out if there are none."""
        found = self.with_less_memory(config)
        if found is None:
            ways = suggest.other_ways(config)
            raise ValueError(f"nothing fits {self.topology.name} by its lower bound: try {ways}")
        return found

    def ways_out(self, config: RunConfig) -> str:
        """What to try where a run does not fit."""
        smaller = self.with_less_memory(config)
        if smaller is None or smaller == config:
            return suggest.other_ways(config)
        flags = suggest.flags_between(config, smaller)
        by_compiling = ", or --suggest, which compiles and chooses" if self.compiles else ""
        return f"{flags}, which fits by its lower bound{by_compiling}"

    def with_valid_sampler(self, config: RunConfig) -> RunConfig:
        """With a sampler that the devices of a host can share."""
        return replace(config, sampling=suggest.sampler_candidates(config, self.topology)[0].sampling)

    def memory(self, config: RunConfig) -> ResidentMemory:
        return tpu_plan.resident_memory(self.fitted(config), self._meshes(config), trains=self.trains)

    def fitted(self, config: RunConfig) -> RunConfig:
        """With the micro-batches that the run has on these devices."""
        if not self.trains:
            return config
        return replace(config, training=fit_to_mesh(config.training, self._meshes(config).train))

    @property
    def compiles(self) -> bool:
        return self.topology.generation in CHIPS

    @property
    def _limit(self) -> float:
        return self.topology.chip.hbm_bytes

    def _meshes(self, config: RunConfig) -> Meshes:
        return make_meshes(config, self.topology.devices, self.topology.host_devices)

    def _training(self, config: RunConfig) -> MemoryPlan:
        programs = tpu_plan.training_programs(self.fitted(config), self._meshes(config), self.notify)
        return self._compiled(programs, self._least_training(config).peaks)

    def _sampling(self, config: RunConfig) -> MemoryPlan:
        programs = tpu_plan.sampling_programs(config, self._meshes(config), self.notify, trains=self.trains)
        return self._compiled(programs, self._least_sampling(config).peaks)

    def _least_training(self, config: RunConfig) -> MemoryPlan:
        memory = self.memory(config)
        saved = suggest.min_saved_bytes(self.fitted(config), len(self.topology.devices))
        return self._checked({"update": memory.training + memory.gradients + saved}, "at least ")

    def _least_sampling(self, config: RunConfig) -> MemoryPlan:
        return self._checked({"rollout": self.memory(config).rollout}, "at least ")

    def _compiled(self, programs: Iterable[Program], least_peaks: Mapping[str, float]) -> MemoryPlan:
        if not self.compiles:
            return self._checked(least_peaks)
        plan = MemoryPlan()
        try:
            for program in programs:
                self.report(program)
                peak = max(plan.peaks.get(program.phase, 0), program.total_bytes)
                checked = self._checked(plan.peaks | {program.phase: peak})
                plan = replace(checked, programs=[*plan.programs, program])
                if plan.reason:
                    break
        except DoesNotFitError as error:
            plan = replace(plan, reason=str(error), needed_bytes=error.needed_bytes)
        return plan

    def _checked(self, peaks: Mapping[str, float], least: str = "") -> MemoryPlan:
        """`least`: a word before a lower bound."""
        phase = max(peaks, key=lambda phase: peaks[phase])
        needed = peaks[phase]
        reason = ""
        if needed > self._limit:
            reason = (
                f"{phase} needs {least}{needed / GB:.2f} GB, including memory that the run keeps, and programs may use "
                f"{self._limit / GB:.2f} GB of a device"
            )
        return MemoryPlan(peaks=dict(peaks), reason=reason, needed_bytes=needed)
