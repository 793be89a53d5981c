"""The metrics of a run: one JSON line per step for programs, and trackers for people.

    RUN/metrics.jsonl    {"step": 12, "reward": 0.31, "kl": "NaN", ...}   one line per step, in ascending order

The file is replaced when a step ends, so a killed run loses at most the line of that step, and no reader sees half a
line. Non-finite numbers are encoded as in `memsearcher_jax.jsonl`.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from memsearcher_jax.jsonl import decode_float, encode_floats, encode_line, numbered_lines, parse_object
from memsearcher_jax.logs.atomic_write import atomic_write
from memsearcher_jax.logs.trackers import TensorBoard, TrackerName, WeightsAndBiases

METRICS_FILE = "metrics.jsonl"
Metrics = dict[str, float]


class MetricsWriter:
    """Adds the metrics of each step to `directory`. Use it as a context manager.

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
        self._path = directory / METRICS_FILE
        earlier = read_metrics(self._path) if self._path.exists() else []
        if resume_step is None and earlier:
            raise ValueError(
                f"{self._path} holds the metrics of an earlier run: resume that run or choose another folder"
            )
        kept = [metrics for metrics in earlier if metrics["step"] < (resume_step or 0)]
        self._last: Metrics = kept[-1] if kept else {"step": -1}
        self._lines = [encode_line(encode_floats(metrics)) for metrics in kept]
        self._write()
        self._trackers: list[TensorBoard | WeightsAndBiases] = []
        if "tensorboard" in trackers:
            self._trackers.append(TensorBoard(directory, resume_step))
        if "wandb" in trackers:
            self._trackers.append(WeightsAndBiases(directory, settings or {}))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one step. Values are Python, numpy or zero-dimensional device numbers; steps ascend.

        Raises:
            ValueError: the step is not after the last one, or a metric is called "step".
            OSError: the file cannot be written; it is as it was, and the next call writes this step, too.
        """
        if step <= self._last["step"] or "step" in metrics:
            last = self._last["step"]
            raise ValueError(f"step {step} after step {last}: steps ascend, and no metric is called step")
        self._add({"step": step}, metrics)

    def complete(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics to the line of an earlier run's last step, where it lacks them; write one if there is none.

        Raises OSError as `write` does.
        """
        if step > self._last["step"]:
            self.write(step, metrics)
            return
        self._lines.pop()
        self._add(self._last, {name: value for name, value in metrics.items() if name not in self._last})

    def _add(self, line: Metrics, metrics: Mapping[str, float]) -> None:
        values = {name: float(value) for name, value in metrics.items()}
        self._last = line | values
        self._lines.append(encode_line(encode_floats(self._last)))
        self._is_written = False
        self._track(lambda tracker: tracker.log(int(line["step"]), values))
        self._write()

    def _write(self) -> None:
        atomic_write(self._path, "".join(self._lines).encode())
        self._is_written = True

    def close(self) -> None:
        if not self._is_written:
            self._write()
        self._track(lambda tracker: tracker.close())

    def _track(self, use: Callable[[TensorBoard | WeightsAndBiases], object]) -> None:
        """A run goes on without a tracker that fails, and says so once."""
        for tracker in tuple(self._trackers):
            try:
                use(tracker)
            except Exception as error:  # of the libraries, of many types
                self._trackers.remove(tracker)
                reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
                line = f"{type(tracker).__name__} gets no metrics until the run is resumed ({reason})"
                print(line, file=sys.stderr, flush=True)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_metrics(path: str | Path) -> list[Metrics]:
    """The steps of a metrics.jsonl in file order; "step" is an int, every other value a float.

    Raises ValueError with the line number for a malformed line, FileNotFoundError for a missing file.
    """
    steps = []
    for where, line in numbered_lines(Path(path)):
        record = parse_object(where, line)
        try:
            values = {name: decode_float(value) for name, value in record.items()}
            steps.append(values | {"step": operator.index(record["step"])})
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise ValueError(f"{where}: no metrics of a step ({error})") from error
    return steps
