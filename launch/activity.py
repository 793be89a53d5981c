"""Lines on stderr while a command has nothing to show yet: it loads, builds an index or compiles."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from memsearcher_jax.logs.progress import Progress


@contextlib.contextmanager
def announced(activity: str = "starting", every_s: float = 8.0) -> Iterator[Callable[[str], None]]:
    """Prints what takes long every `every_s` seconds, with its age: `activity`, or what the given function was called
    with since.
    """
    with Progress("", 0, quiet_s=every_s) as progress:
        progress.activity(activity)
        yield progress.activity
