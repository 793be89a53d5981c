"""Types of settings: a number and the range that it must be in. `checks.check` reads them from the fields.

Standard library and annotated-types only, so that every package's settings may use it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Interval

MAX_COUNT = 10_000_000
"""No sensible run has a count near it; a larger one is a typing error."""

Count = Annotated[int, Interval(ge=1, le=MAX_COUNT)]
CountOrZero = Annotated[int, Interval(ge=0, le=MAX_COUNT)]
EvenCount = Annotated[int, Interval(ge=2, le=MAX_COUNT)]
AxisSize = Annotated[int, Interval(ge=-1, le=MAX_COUNT)]
LargeCount = Annotated[int, Interval(ge=1, lt=math.inf)]  # of bytes, passages or clients: no limit is too large
Port = Annotated[int, Interval(ge=0, le=65_535)]
Seed = Annotated[int, Interval(ge=0, le=2**32 - 1)]
JoinSeconds = Annotated[int, Interval(ge=1, le=7 * 86_400)]
Hops = Annotated[int, Interval(ge=1, le=8)]
Positive = Annotated[float, Interval(gt=0, lt=math.inf)]
Finite = Annotated[float, Interval(gt=-math.inf, lt=math.inf)]
NonNegative = Annotated[float, Interval(ge=0, lt=math.inf)]
AboveOne = Annotated[float, Interval(gt=1, lt=math.inf)]
Probability = Annotated[float, Interval(ge=0, le=1)]
PositiveFraction = Annotated[float, Interval(gt=0, le=1)]
Decay = Annotated[float, Interval(ge=0, lt=1)]

_DURATION = re.compile(r"([0-9]{1,8}) ?(|steps|updates|%)")  # an update counts in 32 bits


@dataclass(frozen=True)
class Duration:
    """A part of a run: training steps, or updates (optimiser steps), of which a training step has one or several."""

    count: int
    unit: Literal["steps", "updates"] = "steps"

    def __str__(self) -> str:
        return f"{self.count} {self.unit}"


def parse_duration(name: str, text: str, steps: int | None) -> Duration:
    """The setting `name`: "10" or "10 steps", "800 updates", or a share of the run's `steps`, rounded down: "5%".

    Raises ValueError for anything else, and for a share of an unknown number of steps.
    """
    match = _DURATION.fullmatch(text.strip())
    if not match:
        raise ValueError(
            f"{name} is {text!r}: give training steps (10), a share of the run (5%) or optimiser steps (80 updates)"
        )
    count = int(match[1])
    unit = match[2]
    if unit != "%":
        return Duration(count, "updates" if unit == "updates" else "steps")
    if steps is None:
        raise ValueError(f"{name} is {text}, but the number of training steps is not known here: give training steps")
    return Duration(steps * count // 100)


def parse_percent(text: str) -> int | None:
    """The number of a duration that is a share of the run, such as 5 of "5%"; None for other durations."""
    match = _DURATION.fullmatch(text.strip())
    return int(match[1]) if match and match[2] == "%" else None


def contains(interval: Interval, value: float) -> bool:
    """Whether the value is in the interval, which has a lower and an upper bound; NaN is in none."""
    above: Any = value > interval.gt if interval.gt is not None else value >= interval.ge  # type: ignore[operator]
    below: Any = value < interval.lt if interval.lt is not None else value <= interval.le  # type: ignore[operator]
    return above and below


def describe(interval: Interval) -> str:
    """The interval in words, such as "at least 1 and at most 10,000,000"."""
    low = f"above {interval.gt:,}" if interval.gt is not None else f"at least {interval.ge:,}"
    if interval.lt == math.inf:
        return f"{low} and finite"
    return f"{low} and {f'below {interval.lt:,}' if interval.lt is not None else f'at most {interval.le:,}'}"
