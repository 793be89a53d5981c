"""Where people watch a run: TensorBoard event files, or Weights & Biases.

Both get the metrics that metrics.jsonl holds. Weights & Biases also gets the settings; its environment variables
(WANDB_PROJECT, WANDB_MODE=offline, WANDB_API_KEY, ...) apply.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

TrackerName = Literal["tensorboard", "wandb"]
MAX_QUEUE = 1_000  # values for TensorBoard, more than a step has


def check_installed(names: tuple[TrackerName, ...]) -> None:
    """Raises ValueError in one line if the library of a tracker is missing."""
    if "wandb" in names and importlib.util.find_spec("wandb") is None:
        raise ValueError("rl.trackers wandb: wandb is not installed: pip install 'memsearcher_jax[wandb]'")


class TensorBoard:
    """Event files in RUN/tensorboard. Steps from `resume_step` on replace those of an earlier run."""

    def __init__(self, directory: Path, resume_step: int | None):
        from tensorboardX import SummaryWriter  # imports torch where it is installed: a second

        self._events = SummaryWriter(str(directory / "tensorboard"), purge_step=resume_step, max_queue=MAX_QUEUE)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        # After a failed write its thread is gone, and a full queue would block this process for ever.
        writer: Any = self._events.file_writer
        if not writer.event_writer._worker.is_alive():
            raise OSError("TensorBoard's files cannot be written: is the disk full?")
        for name, value in values.items():
            self._events.add_scalar(name, value, step)
        self._events.flush()

    def close(self) -> None:
        self._events.close()


class WeightsAndBiases:
    """A run of Weights & Biases. Steps that are repeated after a resume appear twice there."""

    def __init__(self, directory: Path, settings: Mapping[str, Any]):
        import wandb

        id_file = directory / "wandb" / "id.txt"  # a resumed run continues the same run there
        id_file.parent.mkdir(parents=True, exist_ok=True)
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(4))
        try:
            self._run = wandb.init(
                dir=directory,
                project=os.environ.get("WANDB_PROJECT", "memsearcher_jax"),
                name=directory.name,
                id=id_file.read_text().strip(),
                resume="allow",
                config=dict(settings),
                settings=wandb.Settings(silent=True, x_disable_stats=True),
            )
        except wandb.Error as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"rl.trackers wandb: {reason}: run `wandb login`, or set WANDB_MODE=offline") from error
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()
