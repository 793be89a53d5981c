"""The numbers of a run: one JSON line per step for programs, TensorBoard event files for people.

    RUN/metrics.jsonl    {"step": 12, "reward": 0.31, "kl": "NaN", ...}   one line per step, steps ascending
    RUN/tensorboard/     the same scalars as event files

Numbers that JSON cannot hold are spelt as `report/files.py` says. A line is flushed when its step ends, so a killed
run loses at most the line that it was writing.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from pathlib import Path

from tensorboardX import SummaryWriter

from memsearcher_jax.jsonl import parse_object
from memsearcher_jax.report.files import decode_float, encode_float, encode_line, replacing

FILE_NAME = "metrics.jsonl"
Metrics = dict[str, float]


class MetricsWriter:
    """Appends the metrics of each step to `directory`.

    `resume_step` is the first step that will be written again: lines of that step and later ones, left by a run that
    went on after its last checkpoint, are dropped. With None the run is new, and a folder that already holds metrics
    raises ValueError.
    """

    def __init__(self, directory: str | Path, *, resume_step: int | None = None):
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / FILE_NAME
        if resume_step is None and path.exists() and path.stat().st_size:
            raise ValueError(f"{path} holds the metrics of an earlier run: resume that run or choose another folder")
        self._last_step = -1
        if resume_step is not None and path.exists():
            self._last_step = _drop_steps(path, resume_step)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115  (open as long as the writer)
        self._board = SummaryWriter(str(directory / "tensorboard"), purge_step=resume_step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends one step. Values are Python, numpy or zero-dimensional device numbers; steps ascend.

        Raises:
            ValueError: the step is not after the last one, a metric is called "step", or a value is not one number.
        """
        step = operator.index(step)
        if step <= self._last_step:
            raise ValueError(f"metrics of step {step} come after those of step {self._last_step}")
        if "step" in metrics:
            raise ValueError('a metric may not be called "step": that is the name of the step itself')
        values = {name: _as_float(name, value) for name, value in metrics.items()}
        self._file.write(encode_line({"step": step} | {name: encode_float(value) for name, value in values.items()}))
        self._file.flush()
        for name, value in values.items():
            self._board.add_scalar(name, value, step)
        self._board.flush()
        self._last_step = step

    def close(self) -> None:
        self._file.close()
        self._board.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_metrics(path: str | Path) -> list[Metrics]:
    """The steps of a metrics.jsonl in the order of the file; "step" is an int, every other value a float.

    A last line without its newline was cut off by a kill and is left out. Any other malformed line raises ValueError
    that names it; a missing file raises FileNotFoundError.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no metrics at {path}")
    complete, _, _cut_off = path.read_bytes().rpartition(b"\n")
    return [_read_line(f"{path}:{number}", line) for number, line in enumerate(complete.split(b"\n"), 1) if line]


def _read_line(where: str, line: bytes) -> Metrics:
    record = parse_object(where, line)
    step = record.pop("step", None)
    if type(step) is not int:
        raise ValueError(f"{where}: no whole number under 'step'")
    try:
        return {"step": step} | {name: decode_float(value) for name, value in record.items()}
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _drop_steps(path: Path, first_dropped: int) -> int:
    """Rewrites the file without the steps from `first_dropped` on and without a line cut off; gives the last step."""
    kept = [metrics for metrics in read_metrics(path) if metrics["step"] < first_dropped]
    with replacing(path) as file:
        for metrics in kept:
            line = encode_line({name: encode_float(value) for name, value in metrics.items()})
            file.write(line.encode())
    return int(kept[-1]["step"]) if kept else -1


def _as_float(name: str, value: float) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"metric {name!r} is not one number: {error}") from error
