"""This process as one host of a job: joining the others, SIGTERM and Ctrl-C, and exit statuses.

A host exits with the status of `hosts.ending` where all hosts end together, with 85 after the loss of another host,
and with its own status after its own failure; the others then exit with 1, since they would meet the same error.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from memsearcher_jax.hosts.ending import STOPPED, EndReason, RunEnded

if TYPE_CHECKING:
    from memsearcher_jax.hosts.distributed import Hosts

ADDRESS = "JAX_COORDINATOR_ADDRESS"
COUNT = "JAX_NUM_PROCESSES"
INDEX = "JAX_PROCESS_ID"
WORKER_VARIABLES = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")  # of all hosts of a slice, with commas
LOCAL_NAMES = ("local", "localhost", "127.0.0.1")
STOP_KEY = "memsearcher/stop"  # in the key-value store of the coordinator
FAILED_KEY = "memsearcher/failed"
BROADCAST_SECONDS = 3.0  # in which a failed host stays alive, so that the others see its FAILED_KEY
SIGNALS = (signal.SIGTERM, signal.SIGINT)
JOIN_SECONDS = 3_600  # between the starts of the first and of the last host: a pod may wait for its node or its image
SHUTDOWN_SECONDS = 1_800  # in which hosts wait for each other at the end: the first one still writes the report
GLOO_MESSAGES = ("Gloo ",)
COORDINATOR_MESSAGES = ("GetKeyValue", "ABORTED", "CANCELLED", "DEADLINE_EXCEEDED", "heartbeat", "onnection")
JOIN_LOSS_MESSAGES = (*GLOO_MESSAGES, *COORDINATOR_MESSAGES)
HOST_LOSS_MESSAGES = (*JOIN_LOSS_MESSAGES, "UNAVAILABLE")  # while hosts join, a missing TPU is UNAVAILABLE, too
MISSING = "a host is missing or lost; restart all hosts"  # during startup


@contextlib.contextmanager
def joined(*, stoppable: bool = True, timeout: int = JOIN_SECONDS) -> Iterator[Hosts]:
    """The hosts of the job until the block ends; if `stoppable`, SIGTERM or Ctrl-C to one asks all of them to stop.

    A second Ctrl-C ends the process at once. Without `stoppable` the block never checks `Hosts.stopping`, and both
    signals end the process.

    JAX joins the hosts first where the environment names a coordinator (JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES,
    JAX_PROCESS_ID), or where JAX_PLATFORMS begins with tpu and the slice may have other hosts (`must_join`). All must
    start within `timeout` seconds. Until all have joined, SIGTERM, the timeout and the loss of a host exit with 85.
    Raises ValueError in one line if the devices belong to several hosts that are not joined.
    """
    job = _Job()
    with signals_watched(job.on_signal) if stoppable else contextlib.nullcontext():
        if must_join(os.environ):
            job.join(timeout)
        import jax

        from memsearcher_jax.hosts.distributed import Hosts

        hosts = Hosts(jax.process_index(), jax.process_count())
        if hosts.count > 1 and job.client is None:
            raise ValueError(f"the devices belong to {hosts.count} hosts, which are not joined: set {ADDRESS}")
        try:
            job.watch(hosts)
            yield hosts
        except RunEnded as end:
            print(f"{job.prefix}{end}", file=sys.stderr, flush=True)
            job.shutdown()
            raise SystemExit(end.reason.status) from None
        except BaseException as error:
            if job.client is None:
                raise
            job.abort(error)
        else:
            job.shutdown()


def must_join(environment: Mapping[str, str]) -> bool:
    """Whether this process is to join others, or may be: JAX finds out which, on a TPU.

    A notebook's TPU has one host whose only worker is named local or localhost, which JAX cannot resolve.
    """
    if ADDRESS in environment:
        return True
    if not environment.get("JAX_PLATFORMS", "").startswith("tpu"):
        return False
    if any(name.startswith("MEGASCALE_") for name in environment):
        return True
    workers = [environment[name].split(",") for name in WORKER_VARIABLES if environment.get(name)]
    is_alone = all(len(names) == 1 and names[0].partition(":")[0] in LOCAL_NAMES for names in workers)
    return not (workers and is_alone)


def label(hosts: Hosts, what: str) -> str:
    """The start of every progress line."""
    return what if hosts.count == 1 else f"host {hosts.index}: {what}"


def _connect(timeout: int) -> Any:
    """JAX's client of the coordinator; None if this is the only host."""
    names_coordinator = ADDRESS in os.environ
    parameters = _job_from_environment() if names_coordinator else {}

    import jax

    # JAX's own SIGTERM handler would report the signal only at a later step.
    jax.config.update("jax_enable_preemption_service", False)
    if os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            **parameters, initialization_timeout=timeout, shutdown_timeout_seconds=SHUTDOWN_SECONDS
        )
    except ValueError as error:
        if names_coordinator:
            raise
        way_out = f"without a TPU unset JAX_PLATFORMS, or set {ADDRESS}"
        raise ValueError(f"no TPU slice was found ({error}): {way_out}") from error
    jax.devices()  # connects all hosts before any of them waits for the first one to build something
    if jax.process_count() == 1:
        return None
    from jax._src import distributed  # JAX has no public API for the key-value store

    return distributed.global_state.client


def _job_from_environment() -> dict[str, Any]:
    """The parameters of `jax.distributed.initialize` besides the address. Raises ValueError in one line."""
    address = os.environ[ADDRESS]
    if not re.fullmatch(r".+:\d+", address):
        raise ValueError(f"{ADDRESS} is {address!r}: it must be HOST:PORT")
    parameters = {}
    for name, parameter in ((COUNT, "num_processes"), (INDEX, "process_id")):
        value = os.environ.get(name, "")
        if not value.isdecimal():
            raise ValueError(f"{ADDRESS} is set, but {name} is {value!r}: it must be a number")
        parameters[parameter] = int(value)
    return parameters


class _Job:
    """The start of this host, and the stop and failure messages between hosts."""

    hosts: Hosts  # from `watch` on

    def __init__(self) -> None:
        self.client: Any = None  # of the coordinator, if there are other hosts
        self.prefix = ""
        self._started = False
        self._listeners: list[threading.Thread] = []
        self._abort_status = STOPPED
        self._on_abort = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._aborted)

    def join(self, timeout: int) -> None:
        """Connects to the other hosts, or exits with 85 if one of them is missing or lost."""
        # JAX aborts the process, in C++, at the timeout and after the loss of the coordinator.
        ctypes.CDLL(None).signal(signal.SIGABRT, self._on_abort)
        try:
            self.client = _connect(timeout)
        except RuntimeError as error:  # JaxRuntimeError, and xla_bridge's, which contains the text of one
            if not any(message in str(error) for message in JOIN_LOSS_MESSAGES):
                raise
            self._exit(f"{MISSING} ({_one_line(error)})", STOPPED)
        if self.client is None:
            ctypes.CDLL(None).signal(signal.SIGABRT, None)

    def watch(self, hosts: Hosts) -> None:
        """Starts to listen to the other hosts."""
        self.hosts = hosts
        self._started = True
        if self.client is None:
            return
        self.prefix = f"host {hosts.index}: "
        self._when(STOP_KEY, self._on_stop)
        self._when(FAILED_KEY, self._on_failure)

    def on_signal(self, number: int) -> None:
        """Asks all hosts to stop. Before they have joined, or this only one trains, there is nothing to save."""
        reason = EndReason.INTERRUPT if number == signal.SIGINT else EndReason.SIGNAL
        name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
        others_wait_for_this_host = self._started and self.client
        has_something_to_save = self._started and self.hosts.training.is_set()
        if not (others_wait_for_this_host or has_something_to_save):
            self._exit(f"stopped during startup ({name})", reason.status)
        if number == signal.SIGINT:
            if self.hosts.stopping.is_set():
                self._exit("stopped at once (Ctrl-C again); the last checkpoint is intact", reason.status)
            line = "stopping: the step under way is dropped or finished, then saved; Ctrl-C again stops at once"
            with contextlib.suppress(OSError):
                os.write(2, f"{self.prefix}{line}\n".encode())
        message = f"{name} on host {self.hosts.index}" if self.client else name
        self.hosts.stop(reason, message)
        if self.client:
            with contextlib.suppress(Exception):  # the job ends in any case
                self.client.key_value_set(STOP_KEY, json.dumps([reason.value, message]), allow_overwrite=True)

    def shutdown(self) -> None:
        """Waits until all hosts have finished their writes."""
        if self.client:
            import jax

            with contextlib.suppress(Exception):  # another host may be gone; this one has nothing left to do
                jax.distributed.shutdown()  # ends the calls in which the listeners wait
            # A thread that returns from C++ while the interpreter exits would abort the process.
            for listener in self._listeners:
                listener.join(BROADCAST_SECONDS)
            ctypes.CDLL(None).signal(signal.SIGABRT, None)

    def abort(self, error: BaseException) -> NoReturn:
        """Exits because of an error; waiting for lost hosts would take minutes."""
        if not isinstance(error, SystemExit | KeyboardInterrupt):
            traceback.print_exception(error)
        if _is_host_loss(error):
            time.sleep(BROADCAST_SECONDS)  # the other host may still report its failure
            self._exit(f"host lost; restart all hosts ({_one_line(error)})", STOPPED)
        status = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
        self._abort_status = status
        with contextlib.suppress(Exception):
            self.client.key_value_set(FAILED_KEY, f"host {self.hosts.index} failed ({_one_line(error)})")
        if self.hosts.first:
            time.sleep(BROADCAST_SECONDS)  # the first host serves the keys
        self._exit("failed", status)

    def _when(self, key: str, then: Callable[[str], object]) -> None:
        def wait() -> None:
            while True:
                try:
                    then(self.client.blocking_key_value_get(key, 600_000))
                    return
                except Exception as error:
                    if "DEADLINE_EXCEEDED" not in str(error):
                        return  # the coordinator is lost: JAX aborts the process

        listener = threading.Thread(target=wait, daemon=True)
        self._listeners.append(listener)
        listener.start()

    def _on_stop(self, content: str) -> None:
        reason, message = json.loads(content)
        self.hosts.stop(EndReason(reason), message)

    def _on_failure(self, reason: str) -> None:
        if not reason.startswith(f"host {self.hosts.index} "):
            self._abort_status = 1
            if self.hosts.first:
                time.sleep(BROADCAST_SECONDS / 2)
            self._exit(reason, 1)

    def _aborted(self, _: int) -> None:
        reason = "coordinator lost; restart all hosts" if self._started else MISSING
        if self._abort_status != STOPPED:
            reason = "aborted"
        self._exit(reason, self._abort_status)

    def _exit(self, reason: str, status: int) -> NoReturn:
        with contextlib.suppress(OSError):  # nobody reads stderr any more
            os.write(2, f"{self.prefix}{reason}\n".encode())
        os._exit(status)


@contextlib.contextmanager
def signals_watched(
    on_signal: Callable[[int], object], handler: Callable[[int, Any], object] = lambda number, frame: None
) -> Iterator[None]:
    """Calls `on_signal` in a thread at SIGTERM or SIGINT, even while the main thread waits for a device or a host.

    The main thread calls `handler` when it is back in Python.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set signal handlers
        return
    receiver, sender = socket.socketpair()
    sender.setblocking(False)

    def wait() -> None:
        while number := receiver.recv(1):
            if number[0] in SIGNALS:
                on_signal(number[0])

    handlers = handle_signals(handler)
    wakeup_fd = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=wait, daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup_fd)
        for number, earlier in handlers.items():
            signal.signal(number, earlier)
        sender.close()


def handle_signals(handler: Callable[[int, Any], object]) -> dict[int, Any]:
    """Sets the handler of SIGTERM and SIGINT and returns the earlier ones.

    A shell makes its background jobs ignore SIGINT; an ignored signal stays ignored.
    """
    heeded = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heeded}


def _is_host_loss(error: BaseException | None) -> bool:
    """Whether the cause is a device program, or a barrier, that failed because another host is lost.

    Gloo's errors are ValueErrors or JAX's own, and may be wrapped, for instance by the checkpoint writer.
    """
    import jax

    while error is not None:
        is_jax_error = isinstance(error, jax.errors.JaxRuntimeError)
        messages = HOST_LOSS_MESSAGES if is_jax_error else GLOO_MESSAGES
        if any(message in str(error) for message in messages):
            return True
        error = error.__cause__ or error.__context__
    return False


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
