"""How a run ends before its last step: one exception with a typed reason, which decides what is saved, and the status.

Exit status 85 means "stopped from outside, checkpoint saved: restart all hosts"; any other status but 0 would repeat.
"""

from __future__ import annotations

import enum

STOPPED = 85  # not used by shells, signals or Python
INTERRUPTED = 130  # a shell's status after Ctrl-C
FAILED = 1


class EndReason(enum.Enum):
    """Why a run ends, from the one that counts least when hosts have several to the one that counts most."""

    SIGNAL = "signal"  # SIGTERM: the machine is needed, or taken away
    INTERRUPT = "interrupt"  # Ctrl-C
    OUTAGE = "outage"  # a service that the run needs is down
    FAILURE = "failure"  # an error in what samples or scores trajectories
    COLLAPSE = "collapse"  # the metrics say that the policy is broken

    @property
    def weights_are_suspect(self) -> bool:
        """Whether the weights must not be saved as the newest checkpoint."""
        return self is EndReason.COLLAPSE

    @property
    def status(self) -> int:
        """The exit status of the process."""
        return {"signal": STOPPED, "outage": STOPPED, "interrupt": INTERRUPTED}.get(self.value, FAILED)


class RunEnded(Exception):
    """All hosts end the run at the same step."""

    def __init__(self, reason: EndReason, message: str):
        """`message` is one line."""
        super().__init__(message)
        self.reason = reason
