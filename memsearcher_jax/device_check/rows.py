"""A row of the table that a device check prints."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One thing that was checked."""

    name: str
    found: str
    expected: str = ""
    passed: bool | None = True  # None: it could not be checked, or says nothing by itself
    way_out: str = ""  # what to do where it failed

    @property
    def verdict(self) -> str:
        if self.passed is None:
            return "-"
        return "ok" if self.passed else "FAILED"
