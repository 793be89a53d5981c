"""Multi-context GRPO, step by step, on every host of the run:

1. roll out G trajectories of each of the next problems with the current weights;
2. reward every trajectory (Mem-alpha: every context);
3. normalise the rewards over the trajectories of each group, and give every context its trajectory's advantage;
4. exchange examples with the other hosts: 1 to 4 are `collect`;
5. update: all hosts pack all contexts into the same rows, a mini-batch of rows at a time;
6. publish the new weights to the engines.

What is optional is a collaborator: which collector, what follows a collapse, when to evaluate, what is written.
"""

from __future__ import annotations

from memsearcher_jax.rl.collector import Collector
from memsearcher_jax.rl.evaluate import Evaluator
from memsearcher_jax.rl.recorder import Recorder
from memsearcher_jax.rl.recovery import Recovery
from memsearcher_jax.rl.state import RunState
from memsearcher_jax.rl.timing import Timer


def train(state: RunState, collector: Collector, recovery: Recovery, evaluator: Evaluator, recorder: Recorder) -> None:
    """Trains until step `rl.steps`. Raises RunEnded where the run ends earlier; what is healthy is then saved."""
    with recorder.saving_at_the_end(state):
        state.publish()
        test_metrics = evaluator.before_first_step(state, recovery)
        recorder.complete(state.step - 1, test_metrics)
        if recovery.check_evaluation(state.step, test_metrics):
            recovery.restore_best(state, Timer())
            collector.restart()
        if recovery.needs_target:
            recorder.save(state)
        while state.step < state.run.config.rl.steps:
            with recorder.step(state) as (metrics, timer):
                batch = collector.collect(state, timer)
                compressed = recorder.compress(state, batch.scored)
                metrics |= batch.metrics
                metrics |= state.update(recovery.trainable(batch), timer)
                state.publish(timer)
                collector.commit()
                state.step += 1
                recorder.keep(state.step - 1, compressed, timer)
                if recovery.check(state.step - 1, metrics):
                    recovery.restore_best(state, timer)
                    collector.restart()
                test_metrics = evaluator.if_due(state, recovery, timer)
                metrics |= test_metrics
                if recovery.check_evaluation(state.step, test_metrics):
                    recovery.restore_best(state, timer)
                    collector.restart()
                recorder.save_if_due(state, timer, is_best=state.step == recovery.best_step)
