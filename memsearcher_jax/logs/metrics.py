"""The metrics of a run: one JSON line per step for programs, and trackers for people.

    RUN/metrics.jsonl    {"step": 12, "reward": 0.31, "kl": "NaN", ...}   one line per step, in ascending order

Each line is flushed when its step ends, so a killed run loses at most the line that it was writing. Non-finite numbers
are encoded as in `memsearcher_jax.jsonl`.
"""

from __future__ import annotations

import errno
import operator
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memsearcher_jax.jsonl import decode_float, encode_floats, encode_line, parse_object
from memsearcher_jax.logs.atomic_write import atomic_write
from memsearcher_jax.logs.trackers import TensorBoard, TrackerName, WeightsAndBiases

METRICS_FILE = "metrics.jsonl"
Metrics = dict[str, float]


class MetricsWriter:
    """Appends the metrics of each step to `directory`.

    `resume_step` is the next step to write. Lines of that step and later ones are dropped: a run that continued after
    its last checkpoint leaves such lines. With None the run is new, and a folder that already holds metrics raises
    ValueError. `settings` of the run are for the trackers that show them.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        resume_step: int | None = None,
        trackers: Sequence[TrackerName] = ("tensorboard",),
        settings: Mapping[str, Any] | None = None,
    ):
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self._path = path = directory / METRICS_FILE
        if resume_step is None and path.exists() and path.stat().st_size:
            raise ValueError(f"{path} holds the metrics of an earlier run: resume that run or choose another folder")
        self._last_step = -1
        if resume_step is not None and path.exists():
            self._last_step = _drop_steps(path, resume_step)
        self._pending = b""  # lines that are not written yet
        self._open()
        self._trackers: list[TensorBoard | WeightsAndBiases] = []
        if "tensorboard" in trackers:
            self._trackers.append(TensorBoard(directory, resume_step))
        if "wandb" in trackers:
            self._trackers.append(WeightsAndBiases(directory, settings or {}))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one step. Values are Python, numpy or zero-dimensional device numbers; steps ascend.

        Raises:
            ValueError: the step is not after the last one, or a metric is called "step".
            OSError: the line cannot be written; it is kept, and the next call writes it too.
        """
        if step <= self._last_step or "step" in metrics:
            raise ValueError(f"step {step} after step {self._last_step}: steps ascend, and no metric is called step")
        values = {name: float(value) for name, value in metrics.items()}
        line = encode_line({"step": step} | encode_floats(values))
        self._pending, self._last_step = self._pending + line.encode(), step
        for tracker in self._trackers:
            tracker.log(step, values)
        self.flush()

    def complete(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics to the line of an earlier run's last step, where it lacks them; write one if there is none.

        Raises OSError if it cannot be written; the line is then as it was.
        """
        if step > self._last_step:
            self.write(step, metrics)
            return
        *earlier, last = read_metrics(self._path)
        added = {name: float(value) for name, value in metrics.items() if name not in last}
        _write_lines(self._path, [*earlier, last | added])
        self._file.close()
        self._open()
        for tracker in self._trackers:
            tracker.log(step, added)

    def _open(self) -> None:
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115  (closed by close())
        self._size = self._path.stat().st_size  # of complete lines

    def flush(self) -> None:
        """Write the lines that an earlier call could not write. Raises OSError; the lines are then kept."""
        try:
            written = self._file.write(self._pending)
            if written != len(self._pending):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._file.name)
        except OSError:
            self._file.truncate(self._size)  # a line that is cut off would be damage
            raise
        self._size, self._pending = self._size + written, b""

    def close(self) -> None:
        if self._pending:
            self.flush()
        self._file.close()
        for tracker in self._trackers:
            tracker.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_metrics(path: str | Path) -> list[Metrics]:
    """The steps of a metrics.jsonl in file order; "step" is an int, every other value a float.

    A last line without a newline was cut off by a kill and is skipped. Any other malformed line raises ValueError
    with the line number; a missing file raises FileNotFoundError.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no metrics at {path}")
    complete, _, _incomplete = path.read_bytes().rpartition(b"\n")
    steps = []
    for number, line in enumerate(filter(None, complete.split(b"\n")), 1):
        record = parse_object(f"{path}:{number}", line)
        try:
            values = {name: decode_float(value) for name, value in record.items()}
            steps.append(values | {"step": operator.index(record["step"])})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}:{number}: no metrics of a step ({error})") from error
    return steps


def _drop_steps(path: Path, first_dropped: int) -> int:
    """Remove the steps from `first_dropped` on and an incomplete last line; return the last step that remains."""
    kept = [metrics for metrics in read_metrics(path) if metrics["step"] < first_dropped]
    _write_lines(path, kept)
    return int(kept[-1]["step"]) if kept else -1


def _write_lines(path: Path, steps: Sequence[Metrics]) -> None:
    atomic_write(path, "".join(encode_line(encode_floats(metrics)) for metrics in steps).encode())
