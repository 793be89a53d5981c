"""The progress of a run: a live bar on a terminal, plain lines in a file or a pipe."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from memsearcher_jax.logs.metric_names import PHASE_PREFIX, MetricName

# The metrics of a step that are displayed, in this order, with their format.
DISPLAYED = {
    MetricName.REWARD: "reward {:.3f}",
    MetricName.EXACT_MATCH: "EM {:.3f}",
    MetricName.ACCURACY: "accuracy {:.3f}",
    MetricName.TURNS: "turns {:.1f}",
    MetricName.TOKENS_PER_SECOND: "{:,.0f} tok/s",
    MetricName.PASSAGES_PER_SECOND: "{:,.0f} passages/s",
    MetricName.QUESTIONS: "questions {:,.0f}",
}


def format_metrics(metrics: Mapping[str, float]) -> str:
    """One line with the metrics of `DISPLAYED`, then the seconds of each phase and the host's peak memory.

    After them the seconds in which the devices waited for the host, if they are more than a tenth of the rollout.
    """
    parts = [form.format(metrics[name]) for name, form in DISPLAYED.items() if name in metrics]
    phases = [name for name in metrics if name.startswith(PHASE_PREFIX)]
    parts += [f"{name.removeprefix(PHASE_PREFIX)} {metrics[name]:.1f}s" for name in phases]
    if MetricName.HOST_PEAK_GB in metrics:
        parts.append(f"host {metrics[MetricName.HOST_PEAK_GB]:.2f} GB")
    host_wait = metrics.get(MetricName.HOST_WAIT, 0.0)
    if host_wait > 0.1 * metrics.get(f"{PHASE_PREFIX}rollout", math.inf):
        parts.append(f"host_wait {host_wait:.1f}s")
    return "  ".join(parts)


class Progress:
    """Shows `label`, the number of completed items of `total`, if there is one, the latest metrics and the activity.

    On a terminal: a live bar of the total with the remaining time. Otherwise: plain lines without control characters,
    one per `advance`, and one with the activity and its time after `quiet_s` seconds without a line, also while a
    program compiles. Use it as a context manager.
    """

    def __init__(
        self,
        label: str,
        total: int,
        *,
        done: int = 0,
        quiet_s: float = 8.0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._label = label
        self._total = total
        self._done = done
        self._first_done = done  # of an interrupted run
        self._quiet_s = quiet_s
        self._stream = stream or sys.stderr
        self._clock = clock
        self._started = clock()
        self._printed = self._started  # when the last line was
        self._activity_began = self._started
        self._metrics = ""
        self._activity = ""
        self._closed = threading.Event()
        self._live: Live | None = None
        console = Console(file=self._stream)
        if total and self._stream.isatty() and not console.is_dumb_terminal:
            self._bar = RichProgress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task(label, total=total, completed=done)
            self._live = Live(get_renderable=self._render, console=console, refresh_per_second=4)

    def advance(self, metrics: Mapping[str, float], *, by: int = 1) -> None:
        """Add `by` completed items; `metrics` are the latest."""
        self._done += by
        self._metrics = format_metrics(metrics)
        self._activity = ""
        if self._live:
            self._bar.advance(self._task, by)
        else:
            self._print_line(f"left {self._time_left()}")

    def activity(self, text: str) -> None:
        """Show what happens between two advances, such as "rollout 37/64"."""
        self._activity = text
        self._activity_began = self._clock()
        self._break_silence()

    def note(self, text: str) -> None:
        """Print a permanent line, such as a warning."""
        if self._live:
            self._live.console.print(Text(text))
        else:
            print(f"{self._label}: {text}", file=self._stream, flush=True)

    def __enter__(self) -> Progress:
        if self._live:
            self._live.start()
        else:
            threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed.set()
        if self._live:
            self._live.stop()

    def _watch(self) -> None:
        while not self._closed.wait(min(1.0, self._quiet_s)):
            self._break_silence()

    def _break_silence(self) -> None:
        if not self._live and self._clock() - self._printed >= self._quiet_s:
            seconds = self._clock() - self._activity_began
            duration = f" … {seconds:.0f} s" if seconds >= 1 else ""
            self._print_line((self._activity + duration).strip())

    def _render(self) -> RenderableType:
        lines = [Text(part, no_wrap=True, overflow="ellipsis") for part in (self._metrics, self._activity) if part]
        return Group(self._bar.get_renderable(), *lines)

    def _print_line(self, tail: str) -> None:
        self._printed = self._clock()
        count = f"{self._done}/{self._total}" if self._total else ""
        parts = (f"{self._label} {count}".strip(), self._metrics, tail)
        print("  ".join(part for part in parts if part), file=self._stream, flush=True)

    def _time_left(self) -> str:
        """Estimated from the items that this process completed, without those of an interrupted run."""
        seconds_each = (self._clock() - self._started) / max(self._done - self._first_done, 1)
        return str(timedelta(seconds=round(seconds_each * max(self._total - self._done, 0))))


@contextlib.contextmanager
def announced(activity: str = "starting", every_s: float = 8.0) -> Iterator[Callable[[str], None]]:
    """Says on stderr every `every_s` seconds what a command does that has nothing to show yet, and for how long.

    That is `activity`, or what the given function was called with since.
    """
    with Progress("", 0, quiet_s=every_s) as progress:
        progress.activity(activity)
        yield progress.activity
