"""What a run writes while it trains: metrics, trajectories and checkpoints, and how it ends.

Each host compresses the trajectories that it has sampled while the devices train; then the first host writes them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from memsearcher_jax.hosts.distributed import Hosts
from memsearcher_jax.hosts.ending import EndReason, RunEnded
from memsearcher_jax.logs.atomic_write import atomic_write
from memsearcher_jax.logs.host_memory import peak_gb, record_peak_anew
from memsearcher_jax.logs.metric_names import MetricName
from memsearcher_jax.logs.metrics import MetricsWriter
from memsearcher_jax.logs.progress import Progress
from memsearcher_jax.logs.trajectories import compress_trajectories, step_path
from memsearcher_jax.rl.metrics import Metrics
from memsearcher_jax.rl.state import RunState
from memsearcher_jax.rl.timing import Timer, profiled
from memsearcher_jax.training.checkpoint import Checkpoints
from memsearcher_jax.types import ScoredTrajectory


@dataclass
class Recorder:
    """Writes what a step made. What cannot be written, because a disk is full, is written again after the next step."""

    out: Path
    checkpoints: Checkpoints
    progress: Progress
    hosts: Hosts
    meta: Callable[[], Mapping[str, Any]]  # what a checkpoint stores, as plain JSON; every host must call it
    writer: MetricsWriter | None = None  # of the first host
    profiled_step: int | None = None  # of which the first host writes a profile
    trajectories: dict[Path, bytes] = field(default_factory=dict)  # that are not written yet
    unsaved: OSError | None = None  # why a checkpoint that was due is not written
    noted: str = ""  # the last reason that was printed
    thread: ThreadPoolExecutor = field(
        default_factory=partial(ThreadPoolExecutor, 1, "trajectories")
    )  # compresses them

    @contextmanager
    def step(self, state: RunState) -> Iterator[tuple[Metrics, Timer]]:
        """Yields the metrics of a step, to be filled, and its timer; writes them when the step is over."""
        number = state.step
        metrics = Metrics()
        timer = Timer(self.progress.activity)
        is_profiled = number == self.profiled_step and self.hosts.first
        record_peak_anew()
        try:
            with profiled(self.out, number) if is_profiled else nullcontext():
                yield metrics, timer
        finally:
            metrics |= timer.metrics
            peak = peak_gb()
            if peak is not None:
                metrics[MetricName.HOST_PEAK_GB] = peak
            if (writer := self.writer) is not None and state.step > number:
                self._attempt(lambda: writer.write(number, metrics), checkpoint=False)
        self.progress.advance(metrics)

    def complete(self, step: int, metrics: Metrics) -> None:
        """Adds what a resumed run has measured of an earlier step; the weights before the first one have no line."""
        if (writer := self.writer) is not None and metrics and step >= 0:
            self._attempt(lambda: writer.complete(step, metrics), checkpoint=False)

    @contextmanager
    def saving_at_the_end(self, state: RunState) -> Iterator[None]:
        """The one way out: saves what is healthy when the block ends, and says what was saved if it ends early."""
        end = None
        try:
            yield
        except RunEnded as early:
            end = early
        if not (end and end.reason.weights_are_suspect) and not state.weights_are_finite():
            end = RunEnded(EndReason.COLLAPSE, "the weights are not finite")
        if end is None:
            self._save_last(state)
            return
        if end.reason.weights_are_suspect:
            self._write_trajectories()
            newest = self.checkpoints.newest
            saved = "there is no checkpoint" if newest is None else f"the newest checkpoint is of step {newest}"
        else:
            self._save_last(state)
            saved = "checkpoint saved" if state.step else "no step was complete"
        raise RunEnded(end.reason, f"stopped after step {state.step} ({end}); {saved}")

    def compress(self, state: RunState, scored: Sequence[ScoredTrajectory]) -> Future[bytes] | None:
        """Begins to compress what this host has sampled for a step; None if trajectories are not kept."""
        if not state.run.config.rl.save_trajectories:
            return None
        return self.thread.submit(compress_trajectories, scored)

    def keep(self, step: int, compressed: Future[bytes] | None, timer: Timer) -> None:
        """Takes the trajectories that a step has trained on, of all hosts, to write them. Collective.

        Raises RunEnded on all hosts where those of one cannot be written as JSON.
        """
        if compressed is None:
            return
        with timer("write"):
            contents = self.hosts.exchange(self.hosts.agreed(compressed.result))
            assert contents is not None, "every host gives its own"
            if self.hosts.first:
                self.trajectories[step_path(self.out, step)] = b"".join(contents)

    def save_if_due(self, state: RunState, timer: Timer, *, is_best: bool = False) -> None:
        """Writes trajectories, and a checkpoint of the best weights or where the settings ask for one. Collective."""
        with timer("write"):
            self._write_trajectories()
            self._attempt(self.checkpoints.check)
            if self._failed_somewhere() or is_best or state.step % state.run.config.rl.checkpoint_every == 0:
                self.save(state)

    def save(self, state: RunState) -> None:
        """Begins to write a checkpoint. Every host must call it. Raises RunEnded for weights that are not finite."""
        if not state.weights_are_finite():
            raise RunEnded(EndReason.COLLAPSE, "the weights are not finite")
        meta = self.meta()
        self.unsaved = None
        self._attempt(lambda: self.checkpoints.check_space(state.train))
        if not self._failed_somewhere():  # writing is collective
            self._attempt(lambda: self.checkpoints.save(state.step, state.train, state.run.config.model, meta))

    def _failed_somewhere(self) -> bool:
        return b"\x01" in (self.hosts.exchange(bytes([self.unsaved is not None])) or ())

    def _save_last(self, state: RunState) -> None:
        """Waits until the newest state is written; once more, where that fails. Raises OSError if it cannot be."""
        self._write_trajectories()
        if state.step > (self.checkpoints.newest or 0):
            self.save(state)
        self._attempt(self.checkpoints.wait)
        if self._failed_somewhere():
            self.save(state)
        if self.unsaved is not None:
            raise self.unsaved
        self.checkpoints.wait()

    def _write_trajectories(self) -> None:
        for path, content in list(self.trajectories.items()):
            if not self._attempt(partial(atomic_write, path, content), checkpoint=False):
                return
            del self.trajectories[path]

    def _attempt(self, write: Callable[[], object], *, checkpoint: bool = True) -> bool:
        """Whether `write` succeeds. A failure is noted; that of a checkpoint makes it due again."""
        try:
            write()
        except OSError as error:
            reason = error.strerror or str(error)
            if reason.partition(":")[0] != self.noted:  # sizes differ from step to step
                self.noted = reason.partition(":")[0]
                self.progress.note(f"not written yet, the next step tries again: {reason}")
            if checkpoint:
                self.unsaved = OSError(reason)
            return False
        return True
