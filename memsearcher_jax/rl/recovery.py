"""What follows when metrics say that the policy collapses: an alarm, the end of the run, or the best checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from memsearcher_jax.hosts.ending import EndReason, RunEnded
from memsearcher_jax.rl.batch import RolloutBatch
from memsearcher_jax.rl.health import HealthMonitor
from memsearcher_jax.rl.metrics import TEST_PREFIX, Metrics
from memsearcher_jax.rl.state import RunState, weights_are_finite
from memsearcher_jax.rl.timing import Timer
from memsearcher_jax.training import update
from memsearcher_jax.training.checkpoint import Checkpoints, DamagedCheckpointError
from memsearcher_jax.training.packing import TrainingExample


@dataclass
class Recovery:
    """The health of a run, and the way back from a collapse."""

    monitor: HealthMonitor
    checkpoints: Checkpoints

    @property
    def best_step(self) -> int | None:
        """The step of the checkpoint with the best evaluation."""
        return self.monitor.state.best_step

    @property
    def needs_target(self) -> bool:
        """Whether the run may have to roll back in its first steps, and there is nothing to restore."""
        return self.monitor.rolls_back and self.checkpoints.newest is None

    def trainable(self, batch: RolloutBatch) -> list[TrainingExample]:
        """The examples to train on.

        There are none where an outage left only the trajectories that did not search, or where the policy is broken.
        """
        if self.monitor.is_outage(batch.metrics) or self.monitor.is_broken(batch.metrics):
            return []
        return list(batch.examples)

    def check(self, step: int, metrics: Metrics) -> bool:
        """Whether the run has to roll back after step `step`, counted from 0; adds the metrics of health. Collective.

        Raises RunEnded where the settings say so.
        """
        self._set_aside_broken(step, metrics)
        rolls_back = self.monitor.check(step, metrics)
        if self.monitor.rolls_back:
            metrics["rollbacks"] = float(self.monitor.state.rollbacks)
        return rolls_back

    def check_evaluation(self, step: int, test_metrics: Metrics) -> bool:
        """Whether the weights are broken, by their evaluation after `step` steps, so that the run has to roll back.

        Without an evaluation, `test_metrics` are empty. Raises RunEnded where the run cannot roll back. Collective.
        """
        metrics = {name.removeprefix(TEST_PREFIX): value for name, value in test_metrics.items()}
        self._set_aside_broken(step, metrics)
        return self.monitor.is_broken(metrics) and self.monitor.recover(f"the evaluation after step {step}", metrics)

    def _set_aside_broken(self, step: int, metrics: Metrics) -> None:
        """Renames the checkpoint after `step` steps, whose weights have made these metrics, if its logits are broken.

        Weights of a step that was too large are finite, and so they were saved, where their logits are not.
        """
        if not self.monitor.has_broken_logits(metrics):
            return
        self._wait()
        if self.checkpoints.set_aside(step):
            self.monitor.notify(f"the logits of the checkpoint of step {step} are not finite: renamed to {step}.broken")

    def _wait(self) -> None:
        """Waits until the checkpoints are written. What cannot be written is of a state that is given up."""
        try:
            self.checkpoints.wait()
        except OSError as error:
            self.monitor.notify(str(error))

    def restore_best(self, state: RunState, timer: Timer) -> None:
        """Replaces the weights by those with the best evaluation, or by the nearest intact ones. Collective."""
        best = self.monitor.state.best_step
        run = state.run
        model = run.config.model
        mesh = run.meshes.train
        damage = "no checkpoint is left"
        assert best is not None, "the monitor demands no rollback without one"
        self._wait()
        state.params = {}
        with timer("rollback"), jax.set_mesh(mesh):
            target = update.abstract_state(model, update.make_optimizer(run.config.training), mesh)
            del state.train  # the restored one takes its memory
            for step in sorted(self.checkpoints.steps(), key=lambda step: (abs(step - best), step)):
                try:
                    train = self.checkpoints.restore(step, model, target)
                except DamagedCheckpointError as error:
                    damage = str(error)
                    continue
                if weights_are_finite(train):
                    break
                damage = f"the weights of step {step} are not finite"
            else:
                raise RunEnded(EndReason.COLLAPSE, f"no rollback is possible: {damage}")
            state.restore(train, self.monitor.state.rollbacks)
            state.publish()
