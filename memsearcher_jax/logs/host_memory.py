"""Peak resident memory of this process, which Linux records and lets a process record anew."""

from __future__ import annotations

from pathlib import Path

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RECORD_PEAK_ANEW = "5"  # see proc_pid_clear_refs(5)


def record_peak_anew() -> bool:
    """From now on the peak is that since this call; False where the system does not allow it."""
    try:
        CLEAR_REFS.write_text(RECORD_PEAK_ANEW)
    except OSError:
        return False
    return True


def peak_gb() -> float | None:
    """The peak since the last `record_peak_anew`, or since the start; None where the system does not say it."""
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == "VmHWM":
            kibibytes = int(value.split()[0])
            return kibibytes * 1024 / 1e9
    return None
