"""Alarms: numbers that show a run going wrong while it still goes on, and updates that come to nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from memsearcher_jax.report.names import Name
from memsearcher_jax.rl.config import AlarmConfig

SKIPPED, SKIPPED_LAST = "skipped", "skipped_last"  # updates of a step, and those of them at its end


class RunEnded(Exception):
    """The run must not go on; what was saved stays as it is."""


class Alarms:
    """Looks at the numbers of each step, in order. `tell` hears each alarm in one line."""

    def __init__(self, config: AlarmConfig, tell: Callable[[str], None]):
        self._config, self._tell = config, tell
        self._skipped_in_a_row = 0.0
        self._steps_in_a_row: dict[str, int] = {}  # by limit, of steps beyond it

    def look(self, step: int, numbers: Mapping[str, float]) -> dict[str, float]:
        """The metric `alarms` of this step: limits that it is beyond. Raises RunEnded where the config says so.

        A number that the step has not is beyond nothing; one that is not a number is beyond every limit.
        """
        self._count_skipped(step, numbers)
        beyond = {name: line for name, line in self._beyond(numbers) if line}
        self._steps_in_a_row = {name: self._steps_in_a_row.get(name, 0) + 1 for name in beyond}
        for name, line in beyond.items():
            if self._steps_in_a_row[name] == self._config.steps:
                self._tell(f"alarm at step {step}: {line}")
                if self._config.action == "stop":
                    raise RunEnded(f"step {step}: {line}; alarms.action is stop")
        return {"alarms": float(len(beyond))}

    def _count_skipped(self, step: int, numbers: Mapping[str, float]) -> None:
        skipped, last, updates = (numbers.get(name, 0.0) for name in (SKIPPED, SKIPPED_LAST, "updates"))
        if not skipped:
            self._skipped_in_a_row = 0.0
            return
        self._skipped_in_a_row = last + (self._skipped_in_a_row if last == updates else 0.0)
        self._tell(f"step {step}: {skipped:.0f} of {updates:.0f} updates had a gradient that is not finite: skipped")
        if self._skipped_in_a_row >= self._config.skipped_updates:
            raise RunEnded(
                f"step {step}: {self._skipped_in_a_row:.0f} updates in a row had a gradient that is not finite "
                "(alarms.skipped_updates)"
            )

    def _beyond(self, numbers: Mapping[str, float]) -> list[tuple[str, str]]:
        limits = (
            ("reward_below", Name.REWARD, -1),
            ("entropy_below", Name.ENTROPY, -1),
            ("entropy_above", Name.ENTROPY, 1),
            ("tokens_below", Name.TOKENS_PER_TURN, -1),
            ("tokens_above", Name.TOKENS_PER_TURN, 1),
            ("kl_above", Name.KL, 1),
        )
        return [(name, self._line(name, metric, sign, numbers)) for name, metric, sign in limits]

    def _line(self, name: str, metric: str, sign: int, numbers: Mapping[str, float]) -> str:
        limit, value = getattr(self._config, name), numbers.get(metric)
        if not limit or value is None or (math.isfinite(value) and sign * (value - limit) <= 0):
            return ""
        return f"{metric} is {value:.4g} and alarms.{name} {limit:g}"
