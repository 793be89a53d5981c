"""Supervised fine-tuning, which teaches the format and copying before rewards can teach anything.

1. Generate the examples of the step, with names that occur in no other step.
2. Pack the examples that fit a row, and update on one mini-batch of rows at a time.
3. Regularly measure the probability of copied spans in held-out examples, which the loss does not show.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from memsearcher_jax.agent.registry import WORKFLOWS
from memsearcher_jax.data.questions import check_disjoint
from memsearcher_jax.logs.metrics import Metrics, MetricsWriter
from memsearcher_jax.logs.progress import Progress
from memsearcher_jax.rl.init_state import RunState
from memsearcher_jax.rl.rng import named_rng
from memsearcher_jax.rl.setup import Run
from memsearcher_jax.runtime.distributed import Hosts
from memsearcher_jax.runtime.health import HealthMonitor
from memsearcher_jax.runtime.run_dir import checkpoints_of
from memsearcher_jax.runtime.timing import Timer
from memsearcher_jax.sft import question_tasks, search_tasks, stream_tasks
from memsearcher_jax.training.checkpoint import Checkpoints


def check(run: Run) -> None:
    """Raises ValueError, in one line, unless a script can demonstrate the workflow on the run's problems."""
    workflow, data = run.config.agent.workflow, run.config.data
    if data.is_synthetic:
        return
    if WORKFLOWS[workflow].reads_streams:
        raise ValueError("rl.method sft demonstrates generated streams alone: leave data.train and data.test empty")
    if workflow not in question_tasks.DEMONSTRATED:
        raise ValueError(
            f"rl.method sft on files of questions demonstrates {' and '.join(question_tasks.DEMONSTRATED)} alone: "
            f"set agent.workflow, which is {workflow}, to one of them"
        )
    check_disjoint(run.problems.train, run.problems.test)


def train(run: Run, start: RunState, out: Path, writer: MetricsWriter, progress: Progress, hosts: Hosts) -> Metrics:
    """Train from `start` to step `rl.steps`, write checkpoints and metrics, and return the last step's metrics.

    The run has passed `check`. Raises Stopped when the process was asked to stop, after the step under way, and the
    checkpoint is saved.
    """
    config, rl = run.config, run.config.rl
    if WORKFLOWS[config.agent.workflow].reads_streams:
        tasks = stream_tasks
    else:
        tasks = search_tasks if config.data.is_synthetic else question_tasks
    held_out = {
        name: fitting
        for name, examples in tasks.held_out_examples(run).items()
        if (fitting := [example for example in examples if len(example.ids) <= config.training.seq_len])
    }
    trainer, state = start.trainer, start.state
    health = HealthMonitor(replace(config.health, on_collapse="warn"), progress.note, start.health)
    metrics: Metrics = {}
    with Checkpoints(checkpoints_of(out), keep=rl.keep_checkpoints) as checkpoints:
        for step in range(start.step, rl.steps):
            last = step + 1 == rl.steps
            timer = Timer(progress.activity)
            with timer("demonstrate"):
                examples, metrics = tasks.step_examples(run, step)
                # Repeated failed searches can make a ReAct history longer than a row.
                fitting = [example for example in examples if len(example.ids) <= config.training.seq_len]
            with timer("update"):
                rng = named_rng(config.seed, "rows", step)
                state, update_metrics = trainer.step(state, fitting, rng, progress.activity)
            metrics = metrics | update_metrics | {"dropped_examples": float(len(examples) - len(fitting))}
            metrics |= health.check(step, metrics)
            if (step + 1) % config.sft.measure_every == 0 or last:
                with timer("measure"):
                    params = trainer.weights(state)
                    for name, samples in held_out.items():
                        rng = named_rng(config.seed, name, step)
                        probabilities = trainer.sequence_probabilities(params, samples, rng)
                        metrics[f"probability/{name}"] = float(probabilities.mean())
            stopping = hosts.stopping.is_set() and not last
            with timer("write"):
                if (step + 1) % rl.checkpoint_every == 0 or last or stopping:
                    checkpoints.save(step + 1, state, config.model, start.meta(0, "", health.state))
            metrics |= timer.metrics
            writer.write(step, metrics)
            progress.advance(metrics)
            if stopping:
                raise hosts.stopped(step + 1)
    return metrics
