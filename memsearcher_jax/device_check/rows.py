"""A row of the table that a device check prints."""

from __future__ import annotations

import getpass
import re
import socket
from dataclasses import dataclass, replace
from pathlib import Path


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

    def without_names(self) -> Row:
        """The row without folders of this machine, its name and that of the user, which errors may contain."""
        return replace(self, found=_without_names(self.found), way_out=_without_names(self.way_out))


def _without_names(text: str) -> str:
    for folder, short in ((Path.cwd(), "."), (Path.home(), "~")):
        if folder != Path("/"):
            text = text.replace(str(folder), short)
    text = text.replace(socket.gethostname(), "HOST")
    return re.sub(rf"\b{re.escape(getpass.getuser())}\b", "USER", text)
