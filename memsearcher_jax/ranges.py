"""Types of settings: a number and the range that it must be in. `config.check` reads them from the fields.

Standard library and annotated-types only, so that every package's settings may use it.
"""

from __future__ import annotations

import math
from typing import Annotated, cast

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
Hops = Annotated[int, Interval(ge=1, le=8)]
Positive = Annotated[float, Interval(gt=0, lt=math.inf)]
NonNegative = Annotated[float, Interval(ge=0, lt=math.inf)]
AboveOne = Annotated[float, Interval(gt=1, lt=math.inf)]
Probability = Annotated[float, Interval(ge=0, le=1)]
PositiveFraction = Annotated[float, Interval(gt=0, le=1)]
Decay = Annotated[float, Interval(ge=0, lt=1)]


def contains(interval: Interval, value: float) -> bool:
    """Whether the value is in the interval; NaN is in none."""
    bounds = cast("tuple[float | None, ...]", (interval.gt, interval.ge, interval.lt, interval.le))
    gt, ge, lt, le = bounds  # annotated_types declares protocols, which float does not match
    above = (gt is None or value > gt) and (ge is None or value >= ge)
    return above and (lt is None or value < lt) and (le is None or value <= le)


def describe(interval: Interval) -> str:
    """The interval in words, such as "at least 1 and at most 10,000,000"."""
    low = f"above {interval.gt:,}" if interval.gt is not None else f"at least {interval.ge:,}"
    if interval.lt == math.inf:
        return f"{low} and finite"
    return f"{low} and {f'below {interval.lt:,}' if interval.lt is not None else f'at most {interval.le:,}'}"
