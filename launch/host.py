"""This process as one host of a job: finding the others, hearing SIGTERM, and leaving so that the job survives.

Exit status 85 means "stopped from outside, all is saved: start every host again"; anything else but 0 is the program's
own failure and would only repeat. A host ends with 85 when it was told to stop or lost another host, and with its own
status when it failed itself; the others then end with 1, for they would meet the same error again.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from memsearcher_jax.rl.hosts import Hosts

STOPPED = 85  # no shell, signal or Python ends with it
ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
STOP, FAILED = "memsearcher/stop", "memsearcher/failed"  # keys that all hosts see
TO_BE_HEARD_S = 3.0  # that a host stays after it has said that it failed, and waits for another to say so
LAST_WORDS_S = 1_800  # that hosts wait for each other at the end: the first one still writes the report
LOST = ("Gloo ", "UNAVAILABLE", "ABORTED", "CANCELLED", "DEADLINE_EXCEEDED", "onnection", "heartbeat")


@contextlib.contextmanager
def joined(*, stops: bool = True) -> Iterator[Hosts]:
    """The hosts of the job, this one among them, until the block ends; SIGTERM to any asks all of them to stop.

    Without `stops` nobody looks whether the run is to stop, and SIGTERM ends the process as it does any other.

    Where the environment names a coordinator (JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID), or
    JAX_PLATFORMS begins with tpu and the TPU's own environment tells of the others, JAX joins them first.
    Raises ValueError in one line where the devices belong to several hosts that nothing joins.
    """

    client = _join() if ADDRESS in os.environ or os.environ.get("JAX_PLATFORMS", "").startswith("tpu") else None
    from memsearcher_jax.rl.hosts import Stopped, these

    hosts = these()
    if hosts.count > 1 and client is None:
        raise ValueError(f"the devices belong to {hosts.count} hosts that do not know each other: set {ADDRESS}")
    job = _Job(hosts, client)
    told = _hearing_sigterm(lambda: job.ask_to_stop(f"SIGTERM on host {hosts.index}"))
    with told if stops else contextlib.nullcontext():
        try:
            job.watch()
            yield hosts
        except Stopped as stop:
            print(f"{job.name}{stop}", file=sys.stderr, flush=True)
            job.leave_together()
            raise SystemExit(STOPPED) from None
        except BaseException as error:
            if client is None:
                raise
            job.leave_at_once(error)
        else:
            job.leave_together()


def label(hosts: Hosts, what: str) -> str:
    """What every line of progress begins with."""
    return what if hosts.count == 1 else f"host {hosts.index}: {what}"


def _join() -> Any:
    """JAX's client of the service that all hosts share; None where this is the only host."""
    import jax

    # JAX would take SIGTERM for itself, and tell of it only when a later step asks.
    jax.config.update("jax_enable_preemption_service", False)
    if os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    known = (os.environ[ADDRESS], *(_number(name) for name in (COUNT, INDEX))) if ADDRESS in os.environ else ()
    jax.distributed.initialize(*known, shutdown_timeout_seconds=LAST_WORDS_S)
    jax.devices()  # all hosts meet here, also those that will wait for the first one to build something
    if jax.process_count() == 1:
        return None
    from jax._src import distributed  # the only way to its keys and values

    return distributed.global_state.client


def _number(name: str) -> int:
    value = os.environ.get(name, "")
    if not value.isdecimal():
        raise ValueError(f"{ADDRESS} is set and {name} is {value!r}: it must be a number")
    return int(value)


class _Job:
    """What this host tells the others, and hears from them, beside the work."""

    def __init__(self, hosts: Hosts, client: Any):
        self.hosts, self.client = hosts, client
        self.name = f"host {hosts.index}: " if client else ""
        self._status = STOPPED  # with which an abort ends this process
        self._on_abort = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._aborted)

    def watch(self) -> None:
        """Begins to listen to the others."""
        if self.client is None:
            return
        # Whoever loses the service of keys and values is aborted by JAX, in C++.
        ctypes.CDLL(None).signal(signal.SIGABRT, self._on_abort)
        self._when(STOP, self.hosts.stop)
        self._when(FAILED, self._another_failed)

    def ask_to_stop(self, reason: str) -> None:
        """Tells all hosts, this one first."""
        self.hosts.stop(reason)
        if self.client:
            with contextlib.suppress(Exception):  # the job ends in any case
                self.client.key_value_set(STOP, reason, allow_overwrite=True)

    def leave_together(self) -> None:
        """Waits for all hosts; whatever they were still writing is written then."""
        if self.client:
            import jax

            jax.distributed.shutdown()

    def leave_at_once(self, error: BaseException) -> NoReturn:
        """Ends this process because of an error; waiting for hosts that are no more would take minutes."""
        if not isinstance(error, SystemExit | KeyboardInterrupt):
            traceback.print_exception(error)
        if _is_of_another(error):
            time.sleep(TO_BE_HEARD_S)  # in which the other may say that it failed
            self._end(f"lost another host; start all of them again ({_one_line(error)})", STOPPED)
        status = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
        self._status = status
        with contextlib.suppress(Exception):
            self.client.key_value_set(FAILED, f"host {self.hosts.index} failed ({_one_line(error)})")
        if self.hosts.first:
            time.sleep(TO_BE_HEARD_S)  # the keys go when this host goes
        self._end("failed", status)

    def _when(self, key: str, then: Callable[[str], object]) -> None:
        def wait() -> None:
            while True:
                try:
                    return then(self.client.blocking_key_value_get(key, 600_000))
                except Exception as error:
                    if "DEADLINE_EXCEEDED" not in str(error):
                        return None  # the service is gone: JAX ends the process

        threading.Thread(target=wait, daemon=True).start()

    def _another_failed(self, reason: str) -> None:
        if not reason.startswith(f"host {self.hosts.index} "):
            self._status = 1
            if self.hosts.first:
                time.sleep(TO_BE_HEARD_S / 2)
            self._end(reason, 1)

    def _aborted(self, _: int) -> None:
        self._end("lost the first host; start all of them again" if self._status == STOPPED else "ended", self._status)

    def _end(self, why: str, status: int) -> NoReturn:
        os.write(2, f"{self.name}{why}\n".encode())
        os._exit(status)


@contextlib.contextmanager
def _hearing_sigterm(told: Callable[[], object]) -> Iterator[None]:
    """Calls `told` in a thread as soon as SIGTERM comes, also while the program waits for a device or a host."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may say who hears signals
        return
    hears, wakes = socket.socketpair()
    wakes.setblocking(False)

    def wait() -> None:
        while number := hears.recv(1):
            if number[0] == signal.SIGTERM:
                told()

    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    woken_before = signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=wait, daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(woken_before)
        signal.signal(signal.SIGTERM, before)
        wakes.close()


def _is_of_another(error: BaseException | None) -> bool:
    """Whether this began with a device program, or a meeting, that failed because another host is gone.

    Gloo's failures come as ValueError or as JAX's own, and whoever was saving made another error of them.
    """
    import jax

    while error is not None:
        words = LOST if isinstance(error, jax.errors.JaxRuntimeError) else LOST[:1]
        if any(word in str(error) for word in words):
            return True
        error = error.__cause__ or error.__context__
    return False


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
