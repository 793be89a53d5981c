"""Initialisation of hosts, SIGTERM, and exit statuses."""

import os
import signal
import socket
import subprocess
import sys
import time

import jax
import pytest

from memsearcher_jax.hosts import preemption
from memsearcher_jax.hosts.distributed import Hosts, Interrupted
from memsearcher_jax.hosts.ending import EndReason, RunEnded


@pytest.mark.parametrize(
    ("number", "name", "status"), [(signal.SIGTERM, "SIGTERM", 85), (signal.SIGINT, "Ctrl-C", 130)]
)
def test_a_signal_interrupts_a_rollout_and_has_a_status(number, name, status, capsys):
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background of a shell ignore it
    with pytest.raises(SystemExit) as end, preemption.joined() as hosts:
        hosts.training.set()
        hosts.check()
        os.kill(os.getpid(), number)
        assert hosts.stopping.wait(5)
        with pytest.raises(Interrupted):
            hosts.check()
        raise hosts.ended()
    assert end.value.code == status
    assert capsys.readouterr().err.endswith(f"{name}\n")
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_job_that_cannot_stop_keeps_the_signal_handler_and_other_exceptions_propagate():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyError), preemption.joined(stoppable=False):
        assert signal.getsignal(signal.SIGTERM) is before
        raise KeyError("x")


def test_loss_of_another_host_differs_from_a_local_error():
    """The messages are from JAX 0.10.2."""
    gloo = ValueError("UNKNOWN: Gloo AllGather failed: [pair.cc:547] Connection closed by peer [127.0.0.1]:25495")
    barrier = jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: Barrier timed out. Id: save")
    for loss in (gloo, barrier):
        with pytest.raises(SystemExit) as end:
            try:
                try:
                    raise loss
                except Exception as error:
                    raise OSError("cannot write a checkpoint") from error
            except OSError:
                raise SystemExit(1) from None
        assert preemption._is_host_loss(loss)
        assert preemption._is_host_loss(end.value)
    for local in (
        ValueError("UNAVAILABLE"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"),
        SystemExit(2),
    ):
        assert not preemption._is_host_loss(local)
    lost = (
        "INTERNAL: Getting local topologies failed: Error 1: GetKeyValue() timed out with key: cpu:local_topology/cpu/1"
    )
    assert any(message in lost for message in preemption.JOIN_LOSS_MESSAGES), "of the CPU, for a host that ends early"


@pytest.mark.parametrize("address", ["", "10.0.0.1", "10.0.0.1:"])
def test_an_address_without_a_port_is_refused_in_one_line(address, monkeypatch):
    monkeypatch.setenv(preemption.ADDRESS, address)
    with pytest.raises(ValueError, match=r"JAX_COORDINATOR_ADDRESS is .*: it must be HOST:PORT"):
        preemption._connect(1)


def test_a_machine_without_the_tpu_that_it_should_have_is_refused_in_one_line():
    environment = {name: value for name, value in os.environ.items() if name != preemption.ADDRESS}
    command = [sys.executable, "-c", "from memsearcher_jax.hosts import preemption; preemption._connect(1)"]
    done = subprocess.run(command, env=environment | {"JAX_PLATFORMS": "tpu,cpu"}, stderr=subprocess.PIPE, text=True)
    assert "ValueError: no TPU slice was found" in done.stderr and "unset JAX_PLATFORMS" in done.stderr


def test_the_reason_that_counts_most_is_named():
    hosts = Hosts()
    for reason in (EndReason.SIGNAL, EndReason.FAILURE, EndReason.OUTAGE):
        hosts.stop(reason, reason.value)
    assert (str(hosts.ended()), hosts.ended().reason) == ("failure", EndReason.FAILURE)


def test_work_that_fails_on_one_host_ends_all(monkeypatch):
    def failing() -> int:
        raise KeyError("absent")

    assert Hosts().agreed(lambda: 3) == 3
    with pytest.raises(RunEnded, match="KeyError: 'absent'"):
        Hosts().agreed(failing)
    monkeypatch.setattr(Hosts, "exchange", lambda self, content: [b'[["outage", "lost"]]'] if content else None)
    with pytest.raises(RunEnded, match="lost"):  # on another host
        Hosts().agreed(lambda: 3)


def test_only_a_stop_from_outside_asks_for_a_restart():
    assert {reason for reason in EndReason if reason.status == 85} == {EndReason.SIGNAL, EndReason.OUTAGE}
    assert [reason for reason in EndReason if reason.weights_are_suspect] == [EndReason.COLLAPSE]


JOIN = """
import os, sys
from memsearcher_jax.hosts import preemption
def die(*_): os._exit(9)
if sys.argv[2:] == ["dies"]:
    import jax
    jax.devices = die  # between the connection to the coordinator and that to the other hosts
print("joining", flush=True)
with preemption.joined(timeout=int(sys.argv[1])):
    pass
"""


@pytest.fixture
def start_host():
    """Starts one of `count` hosts that join and finish."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    hosts = []

    def start(index, *arguments, count=2):
        joins = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count), "JAX_PROCESS_ID": str(index)}
        command = [sys.executable, "-c", JOIN, *map(str, arguments)]
        pipe = subprocess.PIPE
        host = subprocess.Popen(command, env=os.environ | joins, stdout=pipe, stderr=pipe, text=True)
        hosts.append(host)
        assert host.stdout.readline() == "joining\n"
        return host

    yield start
    for host in hosts:
        host.kill()
        host.communicate()


def stopped(host, timeout=60) -> str:
    """What a host that exits with 85 writes to stderr."""
    _, errors = host.communicate(timeout=timeout)
    assert host.returncode == 85, errors[-2_000:]
    return errors


def test_hosts_that_finish_exit_with_0(start_host):
    """A thread that still waited for a key of the coordinator would abort the interpreter while it exits."""
    for host in [start_host(index, 60) for index in range(2)]:
        _, errors = host.communicate(timeout=60)
        assert (host.returncode, errors) == (0, "")


@pytest.mark.slow
def test_a_host_that_is_not_joined_in_time_exits_with_85(start_host):
    for host in [start_host(index, 1, count=3) for index in (0, 1)]:
        assert "a host is missing or lost; restart all hosts" in stopped(host)


def test_sigterm_while_hosts_join_exits_with_85(start_host):
    host = start_host(1, 600)
    time.sleep(2)
    host.terminate()
    assert stopped(host, timeout=10).endswith("stopped during startup (SIGTERM)\n")


def test_the_loss_of_a_host_that_has_joined_exits_with_85(start_host):
    """If the coordinator is lost before it answers this host, JAX retries until the timeout and 5 seconds more."""
    coordinator, host = start_host(0, 30, "dies"), start_host(1, 30)
    assert coordinator.wait(60) == 9
    stopped(host)


@pytest.mark.parametrize(
    ("environment", "joins"),
    [
        ({}, False),
        ({"JAX_PLATFORMS": "cpu", "TPU_WORKER_HOSTNAMES": "a,b"}, False),
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, True),
        ({"JAX_PLATFORMS": "tpu"}, True),  # a TPU VM, whose metadata server knows
        ({"JAX_PLATFORMS": "tpu,cpu", "TPU_WORKER_HOSTNAMES": "a,b"}, True),
        ({"JAX_PLATFORMS": "tpu", "TPU_WORKER_HOSTNAMES": "a"}, True),
        ({"JAX_PLATFORMS": "tpu", "TPU_PROCESS_ADDRESSES": "local", "TPU_WORKER_HOSTNAMES": "localhost"}, False),
        ({"JAX_PLATFORMS": "tpu,cpu", "TPU_WORKER_HOSTNAMES": "localhost"}, False),
        ({"JAX_PLATFORMS": "tpu", "TPU_PROCESS_ADDRESSES": "localhost:8476"}, False),
        ({"JAX_PLATFORMS": "tpu", "TPU_PROCESS_ADDRESSES": "localhost:8476,localhost:8477"}, True),
        ({"JAX_PLATFORMS": "tpu", "TPU_WORKER_HOSTNAMES": "localhost", "MEGASCALE_NUM_SLICES": "2"}, True),
        ({"JAX_PLATFORMS": "tpu", "TPU_WORKER_HOSTNAMES": "localhost", "JAX_COORDINATOR_ADDRESS": "a:1"}, True),
    ],
)
def test_the_only_worker_of_a_notebook_joins_nobody(environment, joins):
    assert preemption.must_join(environment) == joins
