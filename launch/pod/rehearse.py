"""Runs a job of several hosts on this machine, lets things go wrong, and says whether the job survived.

python launch/pod/rehearse.py --config nano --processes 2 --devices 4
python launch/pod/rehearse.py --config tiny --kill 1@step2:update --term 0@step3:rollout -- --rl.steps 5

Every process is a host: launch/tpu_train.py with CPU devices, over gloo. What stands after -- goes to all of them. As a
JobSet does, a job whose hosts were killed or ended with 85 is started again by the same command. Faults are written
HOST@stepN:PHASE+SECONDS: so long after this host has begun this phase of this step, both counted from 0; the phases are
rollout, score, share, update, evaluate and write. With a fault of the retriever, all search by launch/serve_search.py
over HTTP. At the end a second job runs undisturbed, and both are compared.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # where the other commands are

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import cli
import host
import tpu_train
from pod import rehearsed
from pod.retriever import Retriever, write_questions

PHASES = ("rollout", "score", "share", "update", "evaluate", "write")
GRACE_S = 180  # after the first host has ended, before the others are killed


@dataclass
class Job:
    """A command that several processes run, until it is done."""

    words: Sequence[str]
    out: Path
    scratch: Path  # of this rehearsal: logs, marks of faults, compiled programs
    processes: int
    devices: int
    faults: list[dict[str, Any]] = field(default_factory=list)
    retriever: Retriever | None = None  # which the faults of its own kinds befall
    attempts: list[list[int]] = field(default_factory=list)  # exit statuses
    done: set[int] = field(default_factory=set)  # faults that have befallen the retriever

    def run(
        self,
        restarts: int,
        between: Callable[[], object] = lambda: None,
        survives: Callable[[Sequence[int]], bool] = lambda statuses: survived(statuses),
    ) -> bool:
        """Starts the job, and starts it again as a JobSet would; whether it came to its end.

        `between` is called before each new start; `survives` tells by the statuses whether there is one.
        """
        for attempt in range(restarts + 1):
            began = time.monotonic()
            self.attempts.append(self._attempt(attempt))
            statuses = self.attempts[-1]
            seconds = time.monotonic() - began
            print(f"attempt {attempt}: {said(statuses)} after {seconds:.0f} s; {self.state()}", flush=True)
            for line in self.told(attempt):
                print(f"    {line}", flush=True)
            if not any(statuses):
                return True
            if not survives(statuses):
                break
            between()
        for process in range(self.processes):
            log = self.log(attempt, process)
            print(f"--- the end of {log}")
            print("\n".join(log.read_text(errors="replace").splitlines()[-15:]), flush=True)
        return False

    def state(self) -> str:
        """What stands on disk."""
        steps = whole_steps(self.out)
        return f"newest checkpoint: step {steps[-1]}" if steps else "no checkpoint"

    def told(self, attempt: int) -> list[str]:
        """The lines in which the hosts told of faults, stops and losses."""
        wanted = re.compile(
            r"fault: |stopped after|lost |failed|damaged|step \d+ of \d+$|not finite|not written|error: "
        )
        lines = [
            line
            for process in range(self.processes)
            for line in self.log(attempt, process).read_text(errors="replace").splitlines()
        ]
        return list(dict.fromkeys(line[:300] for line in lines if wanted.search(line)))

    def log(self, attempt: int, process: int) -> Path:
        """What a host said."""
        return self.scratch / f"{self.out.name}.attempt_{attempt}.host_{process}.log"

    def mark(self, fault: dict[str, Any]) -> Path:
        """Stands when the fault has struck."""
        return self.scratch / f"{self.out.name}.marks" / str(fault["number"])

    def _attempt(self, attempt: int) -> list[int]:
        if self.retriever:
            self.retriever.wait()
        port = free_port()
        marks = self.scratch / f"{self.out.name}.marks"
        marks.mkdir(exist_ok=True)
        hosts = []
        for process in range(self.processes):
            told = {"host": process, "marks": str(marks), "faults": self.faults}
            environment = os.environ | {
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={self.devices}",
                "JAX_COMPILATION_CACHE_DIR": str(self.scratch / "compiled"),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                host.ADDRESS: f"127.0.0.1:{port}",
                host.COUNT: str(self.processes),
                host.INDEX: str(process),
                rehearsed.VARIABLE: json.dumps(told),
            }
            with open(self.log(attempt, process), "w") as log:
                command = [sys.executable, rehearsed.__file__, *self.words, "--out", str(self.out), "--start_or_resume"]
                hosts.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        try:
            return wait_for(hosts, self._disturb)
        finally:
            for process in hosts:
                process.kill()
                process.wait()

    def _disturb(self) -> None:
        """Lets befall the retriever what a host has marked as due."""
        for fault in self.faults:
            if (
                fault["kind"] in rehearsed.OF_RETRIEVER
                and self.mark(fault).exists()
                and fault["number"] not in self.done
            ):
                self.done.add(fault["number"])
                self.retriever.disturb(fault["kind"], fault["seconds"])


def survived(statuses: Sequence[int]) -> bool:
    """Whether a JobSet would start the job again: a program's own failure ends it."""
    return all(status in (0, host.STOPPED, -signal.SIGKILL) for status in statuses)


def wait_for(hosts: Sequence[subprocess.Popen], meanwhile: Callable[[], None]) -> list[int]:
    """The statuses of all, of which those that outlive another by too long are killed: status -SIGALRM."""
    first_end = None
    while any(process.poll() is None for process in hosts):
        meanwhile()
        time.sleep(0.1)
        if first_end is None and any(process.poll() for process in hosts):
            first_end = time.monotonic()
        if first_end and time.monotonic() - first_end > GRACE_S:
            return [-signal.SIGALRM if process.poll() is None else process.poll() for process in hosts]
    return [process.returncode for process in hosts]


def said(statuses: Sequence[int]) -> str:
    """Statuses in words."""
    names = {0: "done", host.STOPPED: "85, start again", -signal.SIGKILL: "killed", -signal.SIGALRM: "hung"}
    words = [names.get(status, f"ended with {status}") for status in statuses]
    return ", ".join(f"host {index} {ended}" for index, ended in enumerate(words))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def whole_steps(out: Path) -> list[int]:
    """Steps of which there is a checkpoint; without JAX."""
    folder = out / "checkpoints"
    steps = [int(step.name) for step in folder.iterdir() if step.name.isdecimal()] if folder.is_dir() else []
    return sorted(step for step in steps if (folder / str(step) / "_CHECKPOINT_METADATA").exists())


def differences(one: Path, other: Path) -> list[str]:
    """In what two finished runs differ; empty if their newest checkpoints and all that they recorded are the same."""
    found = []
    last, last_of_other = whole_steps(one)[-1], whole_steps(other)[-1]
    if last != last_of_other:
        return [f"the newest checkpoints are of steps {last} and {last_of_other}"]
    metas = [json.loads((run / "checkpoints" / str(last) / "meta" / "metadata").read_text()) for run in (one, other)]
    for item in ("params", "optimizer"):
        digests, others = (meta["digests"][item] for meta in metas)
        wrong = [path for path, digest in digests.items() if others[path] != digest]
        if wrong:
            found.append(f"{item}: {len(wrong)} of {len(digests)} arrays, {wrong[0]} among them")
    if metas[0]["run"] != metas[1]["run"]:
        found.append(f"position: {metas[0]['run']} and {metas[1]['run']}")
    steps, others = (
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (one, other)
    )
    if [step["step"] for step in steps] != [step["step"] for step in others]:
        found.append("metrics of other steps")
    for name in ("reward", "loss", "grad_norm"):
        wrong = [a["step"] for a, b in zip(steps, others, strict=False) if a.get(name) != b.get(name)]
        if wrong:
            found.append(f"{name} of steps {wrong}")
    return found


def fault(kind: str) -> Callable[[str], dict[str, Any]]:
    """Reads a fault of this kind. Raises ValueError in one line."""

    def read(text: str) -> dict[str, Any]:
        match = re.fullmatch(r"(\d+)@step(\d+):([a-z]+)(?:\+(\d+(?:\.\d+)?))?", text)
        if not match or match[3] not in PHASES:
            raise argparse.ArgumentTypeError(
                f"{text!r} is no HOST@stepN:PHASE+SECONDS with a phase of {', '.join(PHASES)}"
            )
        return {
            "kind": kind,
            "host": int(match[1]),
            "step": int(match[2]),
            "phase": match[3],
            "seconds": float(match[4] or 0),
        }

    return read


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = cli.Parser(prog="rehearse.py", description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--config", required=True, metavar="NAME", help="preset of the run")
    parser.add_argument("--processes", type=int, default=2, help="hosts")
    parser.add_argument("--devices", type=int, default=4, help="devices of each")
    kinds = {
        "kill": "kill -9",
        "term": "SIGTERM",
        "delay": "let it wait, for SECONDS",
        "cut": "let the retriever be gone, for SECONDS",
        "slow": "let the retriever not answer, for SECONDS",
        "garbage": "let the retriever answer nonsense, for SECONDS",
    }
    for kind, what in kinds.items():
        parser.add_argument(f"--{kind}", action="append", default=[], type=fault(kind), metavar="FAULT", help=what)
    parser.add_argument("--restarts", type=int, default=10, help="most times that the job is started again")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to keep everything; without it: nowhere")
    return parser


def main(argv: Sequence[str]) -> None:
    with cli.one_line_errors():
        ours, trainers = cli.cut(argv)
        flags = parser().parse_args(ours)
        words = ["--config", flags.config, *trainers]
        cli.parse(tpu_train.Train, words)
        of_retriever = flags.cut + flags.slow + flags.garbage
        given = flags.kill + flags.term + flags.delay + of_retriever
        faults = [one | {"number": number} for number, one in enumerate(given)]
        for one in faults:
            if one["host"] >= flags.processes:
                raise ValueError(f"--{one['kind']} is for host {one['host']}, and there are {flags.processes}, from 0")
        if flags.out and flags.out.exists():
            raise FileExistsError(f"--out {flags.out} exists: choose another folder")
    with contextlib.ExitStack() as stack:
        before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the hosts go along
        stack.callback(signal.signal, signal.SIGTERM, before)
        place = flags.out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rehearsal-")))
        place.mkdir(exist_ok=True, parents=True)
        retriever = None
        if of_retriever:
            retriever = stack.enter_context(contextlib.closing(Retriever(flags.config, place, free_port())))
            words += [*write_questions(flags.config, place / "questions.jsonl"), *retriever.flags]
        job = Job(words, place / "run", place, flags.processes, flags.devices, faults, retriever)
        if not job.run(flags.restarts):
            raise SystemExit("the job did not come to its end")
        missed = [one for one in faults if not job.mark(one).exists()]
        for one in missed:
            print(f"never struck: {rehearsed.named(one)}")
        if faults:
            twin = Job(words, place / "undisturbed", place, flags.processes, flags.devices, retriever=retriever)
            if not twin.run(0):
                raise SystemExit("the undisturbed job did not come to its end")
            found = differences(job.out, twin.out)
            if found or missed:
                raise SystemExit(f"wrong: {'; '.join(found) or 'a fault never struck'}")
            print(f"right: {len(job.attempts) - 1} restarts, and all is bit for bit as in an undisturbed job")


if __name__ == "__main__":
    cli.run(main)
