"""Runs a training job of several hosts on this machine, injects faults, and checks that it recovers.

python tests/fault_injection/run_job.py --config nano --hosts 2 --devices 4
python tests/fault_injection/run_job.py --config tiny --kill 1@step2:update --sigterm 0@step3:rollout -- --rl.steps 5

Every host is a process: launch/tpu_train.py with CPU devices, over gloo. All get the arguments after --. A job whose
hosts were killed or exited with status 85 is restarted, as a JobSet does. A fault is written HOST@stepN:PHASE+SECONDS:
it is triggered SECONDS after this host has begun this phase of this step, both counted from 0; the phases are rollout,
rewards, gather, update, publish, evaluate and write. Finally a second job runs without faults, and both are compared.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import faulty_host
import tyro
from faulty_host import Fault

from memsearcher_jax.hosts import preemption
from memsearcher_jax.launch import cli, command_words, tpu_train
from memsearcher_jax.logs.progress import announced

MAX_RESTARTS = 30
GRACE_SECONDS = 180  # between the exit of the first host and the kill of the others
LOG_LINES = re.compile(
    r"fault: |stopped after|host lost|coordinator lost|failed|damaged|step \d+ of \d+$"
    r"|not finite|not written|cannot write|error: "
)
RESTARTED = (0, preemption.STOPPED, -signal.SIGKILL)  # the statuses after which a JobSet restarts its hosts
STATUSES = {0: "done", preemption.STOPPED: "stopped (85)", -signal.SIGKILL: "killed", -signal.SIGALRM: "hung"}


@dataclass
class Job:
    """A training command that several processes run and restart until it is done."""

    arguments: Sequence[str]
    out: Path
    scratch: Path  # logs, triggered faults
    hosts: int
    devices: int
    faults: Sequence[Fault] = ()
    attempts: list[list[int]] = field(default_factory=list)  # exit statuses

    def run(self, max_restarts: int) -> bool:
        """Starts the job and restarts it as a JobSet does; returns whether all hosts finished."""
        self._triggered.mkdir(exist_ok=True)
        attempt = 0
        while True:
            start = time.monotonic()
            with announced(f"{self.out.name}: attempt {attempt}"):
                statuses = self._attempt(attempt)
            self.attempts.append(statuses)
            seconds = time.monotonic() - start
            print(f"attempt {attempt}: {describe(statuses)} after {seconds:.0f} s; {self._newest()}", flush=True)
            logs = [self._log_file(attempt, host).read_text(errors="replace") for host in range(self.hosts)]
            lines = [line[:300] for log in logs for line in log.splitlines() if LOG_LINES.search(line)]
            for line in dict.fromkeys(lines):
                print(f"    {line}", flush=True)
            if not any(statuses):
                return True
            if attempt == max_restarts or not set(statuses) <= set(RESTARTED):
                break
            attempt += 1
        for host, log in enumerate(logs):
            print(f"--- the last lines of {self._log_file(attempt, host)}")
            print("\n".join(log.splitlines()[-15:]), flush=True)
        return False

    def triggered(self, fault: Fault) -> bool:
        return (self._triggered / str(fault.number)).exists()

    @property
    def _triggered(self) -> Path:
        return self.scratch / f"{self.out.name}.triggered"

    def _log_file(self, attempt: int, host: int) -> Path:
        return self.scratch / f"{self.out.name}.attempt_{attempt}.host_{host}.log"

    def _newest(self) -> str:
        steps = checkpoint_steps(self.out)
        return f"newest checkpoint: step {steps[-1]}" if steps else "no checkpoint"

    def _attempt(self, attempt: int) -> list[int]:
        port, processes = free_port(), []
        command = [sys.executable, faulty_host.__file__, *self.arguments, "--out", str(self.out), "--start_or_resume"]
        for host in range(self.hosts):
            faults = {"host": host, "triggered": str(self._triggered), "faults": list(map(asdict, self.faults))}
            environment = os.environ | {
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={self.devices}",
                # Stored programs for several CPU devices can wait for each other forever in their collectives.
                "JAX_ENABLE_COMPILATION_CACHE": "false",
                preemption.ADDRESS: f"127.0.0.1:{port}",
                preemption.COUNT: str(self.hosts),
                preemption.INDEX: str(host),
                faulty_host.VARIABLE: json.dumps(faults),
            }
            with open(self._log_file(attempt, host), "w") as log:
                processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        try:
            return wait_for(processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()


def wait_for(processes: Sequence[subprocess.Popen]) -> list[int]:
    """The statuses of all; -SIGALRM for those still running GRACE_SECONDS after the first failure."""
    first_failure = None
    while any(process.poll() is None for process in processes):
        time.sleep(0.1)
        if first_failure is None and any(process.poll() for process in processes):
            first_failure = time.monotonic()
        if first_failure and time.monotonic() - first_failure > GRACE_SECONDS:
            break
    statuses = [process.poll() for process in processes]
    return [-signal.SIGALRM if status is None else status for status in statuses]


def describe(statuses: Sequence[int]) -> str:
    return ", ".join(f"host {host} {STATUSES.get(end, f'failed ({end})')}" for host, end in enumerate(statuses))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def checkpoint_steps(out: Path) -> list[int]:
    """Steps with a complete checkpoint, ascending; without JAX."""
    files = (out / "checkpoints").glob("*/_CHECKPOINT_METADATA")
    return sorted(int(file.parent.name) for file in files if file.parent.name.isdecimal())


def differences(first: Path, second: Path) -> list[str]:
    """How two finished runs differ; empty if the newest checkpoints and all recorded metrics are identical."""
    last, other = checkpoint_steps(first)[-1], checkpoint_steps(second)[-1]
    if last != other:
        return [f"the newest checkpoints are of steps {last} and {other}"]
    differing = []
    metas = [json.loads((run / "checkpoints" / str(last) / "meta" / "metadata").read_text()) for run in (first, second)]
    for item in ("params", "optimizer"):
        ours, theirs = (meta["array_checksums"][item] for meta in metas)
        wrong = [path for path, checksum in ours.items() if theirs[path] != checksum]
        if wrong:
            differing.append(f"{item}: {len(wrong)} of {len(ours)} arrays, such as {wrong[0]}")
    for meta in metas:  # a run that was stopped before its last evaluation makes it after its last checkpoint
        meta["run"].get("health", {}).pop("evaluated", None)
    if metas[0]["run"] != metas[1]["run"]:
        differing.append(f"position: {metas[0]['run']} and {metas[1]['run']}")
    ours, theirs = (
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (first, second)
    )
    if [step["step"] for step in ours] != [step["step"] for step in theirs]:
        differing.append("metrics of other steps")
    for name in ("reward", "loss", "grad_norm"):
        wrong = [a["step"] for a, b in zip(ours, theirs, strict=False) if a.get(name) != b.get(name)]
        if wrong:
            differing.append(f"{name} of steps {wrong}")
    return differing


Faults = Annotated[tuple[str, ...], tyro.conf.arg(metavar="FAULT")]


@dataclass(frozen=True)
class RunJob:
    """Run a training job of several hosts on this machine, inject faults, and check that it recovers."""

    config: Annotated[str, tyro.conf.arg(metavar="NAME")]
    """Preset of the run."""
    hosts: int = 2
    """Number of hosts."""
    devices: int = 4
    """Devices of each host."""
    kill: Faults = ()
    """kill -9."""
    sigterm: Faults = ()
    """SIGTERM."""
    out: cli.Directory = None
    """Directory to keep everything in. Default: a temporary one."""

    def faults(self) -> list[Fault]:
        """All faults in the order of the flags. Raises ValueError."""
        given = [(kind, text) for kind in faulty_host.SIGNALS for text in getattr(self, kind)]
        faults = [Fault.parse(kind, text, number) for number, (kind, text) in enumerate(given)]
        for fault in faults:
            if fault.host >= self.hosts:
                raise ValueError(f"--{fault.kind}: there is no host {fault.host}: they are 0 to {self.hosts - 1}")
        return faults


def main(argv: Sequence[str]) -> None:
    with cli.one_line_errors():
        ours, trainers = command_words.split_passthrough(argv)
        flags = cli.parse_flags(RunJob, ours)
        arguments = ["--config", flags.config, *trainers]
        cli.parse(tpu_train.Train, arguments)
        faults = flags.faults()
        if flags.out and flags.out.exists():
            raise FileExistsError(f"--out {flags.out} exists: choose another directory")
    with contextlib.ExitStack() as stack:
        # Without a handler, SIGTERM would leave the hosts running.
        handler = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        stack.callback(signal.signal, signal.SIGTERM, handler)
        folder = flags.out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="run-job-")))
        folder.mkdir(exist_ok=True, parents=True)
        job = Job(arguments, folder / "run", folder, flags.hosts, flags.devices, faults)
        if not job.run(MAX_RESTARTS):
            raise SystemExit("the job did not finish")
        if not faults:
            return
        reference = Job(arguments, folder / "reference", folder, flags.hosts, flags.devices)
        if not reference.run(0):
            raise SystemExit("the reference job did not finish")
        failures = [f"never triggered: {fault}" for fault in faults if not job.triggered(fault)]
        failures += differences(job.out, reference.out)
        if failures:
            raise SystemExit(f"failed: {'; '.join(failures)}")
        print(f"passed: {len(job.attempts) - 1} restarts; the result is bit-identical to a job without faults")


if __name__ == "__main__":
    cli.run(main)
