"""Supervised learning on recorded trajectories.

1. Take the trajectories of the step.
2. Pack their contexts into rows, and update on one mini-batch of rows at a time: cross entropy of the sampled tokens.
3. Regularly measure the held-out trajectories.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from memsearcher_jax.config import differences, from_dict, to_dict
from memsearcher_jax.hosts.distributed import Hosts
from memsearcher_jax.logs.metrics import Metrics, MetricsWriter
from memsearcher_jax.logs.progress import Progress
from memsearcher_jax.rl.recorder import Recorder
from memsearcher_jax.rl.rng import named_rng
from memsearcher_jax.rl.setup import Run
from memsearcher_jax.rl.state import RunState, TrainedBy, open_policy
from memsearcher_jax.runs.run_dir import checkpoints_of
from memsearcher_jax.sft.recorded import RecordedData
from memsearcher_jax.training.checkpoint import Checkpoints
from memsearcher_jax.training.packing import TrainingExample
from memsearcher_jax.training.trainer import make_trainer

FIXED_SETTINGS = (
    "seed",
    "sft.min_reward",
    "sft.keep",
    "sft.trajectories_per_step",
    "sft.held_out_share",
    "training.seq_len",
    "model.tokenizer",
)
"""With the files they decide what a step trains; compared where a checkpoint of 0.3.0 has no checksum of that."""


def open_state(run: Run, data: RecordedData, folder: Path | None = None) -> tuple[RunState, dict[str, Any]]:
    """The policy at step 0, or at the newest checkpoint of the run in `folder`, and the meta of its checkpoints.

    Raises ValueError if that run was begun with other files, or if a setting has changed by which its steps train other
    trajectories, so that some would be trained twice and others never.
    """
    model = run.config.model
    # There is neither a reference policy nor a sampler to compare with.
    without_a_reference = {"objective": "grpo", "kl_coefficient": 0.0, "old_logprobs": "sampler", "tis_cap": 0.0}
    training = replace(run.config.training, **without_a_reference)
    make = partial(make_trainer, model, training, run.meshes.train, method="sft", temperature=1.0, steps=data.steps)
    state, meta = open_policy(run, folder, TrainedBy.SFT, make, bool(model.lora_rank))
    if meta.setdefault("trajectories", data.checksum) != data.checksum:
        raise ValueError(f"sft.trajectories or sft.held_out are other files than when {folder} was begun")
    changed = differences(from_dict(meta["settings"]), run.config) if "settings" in meta else []
    if "schedule" in meta:
        is_other_schedule = meta["schedule"] != data.schedule
    else:
        changed = [difference for difference in changed if difference[0] in FIXED_SETTINGS]
        is_other_schedule = bool(changed)
    if is_other_schedule:
        listed = ", ".join(f"{name} from {then!r} to {now!r}" for name, then, now in changed)
        raise ValueError(
            f"{folder} would train some trajectories twice and others never if it went on with other settings "
            f"({listed}): omit them, or begin another run"
        )
    return state, meta | {"settings": to_dict(run.config), "schedule": data.schedule}


def train(
    state: RunState,
    data: RecordedData,
    meta: dict[str, Any],
    out: Path,
    writer: MetricsWriter,
    progress: Progress,
    hosts: Hosts,
) -> None:
    """Trains to the last step.

    Raises RunEnded when the process was asked to stop, after the step under way, and the checkpoint is saved.
    """
    config = state.run.config
    with Checkpoints(checkpoints_of(out), keep=config.rl.keep_checkpoints) as checkpoints:
        recorder = Recorder(out, checkpoints, progress, hosts, lambda: meta, writer)
        with recorder.saving_at_the_end(state):
            while state.step < data.steps:
                with recorder.step(state) as (metrics, timer):
                    recorded = data.step(state.step)
                    examples = [example for trajectory in recorded for example in trajectory.examples]
                    metrics |= state.update(examples, timer)
                    rewards = [trajectory.reward for trajectory in recorded]
                    metrics |= {"trajectories": len(recorded), "reward": float(np.mean(rewards))}
                    state.step += 1
                    if state.step % config.sft.measure_every == 0 or state.step == data.steps:
                        with timer("measure"):
                            metrics |= held_out_metrics(state, data)
                    recorder.save_if_due(state, timer)
                if hosts.stopping.is_set() and state.step < data.steps:
                    raise hosts.ended()


def held_out_metrics(state: RunState, data: RecordedData) -> Metrics:
    """By source: cross entropy per sampled token, and the mean probability of all the sampled tokens of a context."""
    by_source: dict[str, list[TrainingExample]] = {}
    for trajectory in data.held_out:
        prefix = f"held_out/{trajectory.source}/" if trajectory.source else "held_out/"
        by_source.setdefault(prefix, []).extend(trajectory.examples)
    metrics = Metrics()
    params = state.trainer.weights(state.train)
    for prefix, examples in by_source.items():
        if not examples:
            continue
        rng = named_rng(state.run.config.seed, "held out", 0)
        logprobs = state.trainer.sequence_logprobs(params, examples, rng)
        sampled_tokens = sum(np.sum(example.sampled) for example in examples)
        metrics[f"{prefix}loss"] = float(-logprobs.sum() / sampled_tokens)
        metrics[f"{prefix}probability"] = float(np.exp(logprobs).mean())
    return metrics
