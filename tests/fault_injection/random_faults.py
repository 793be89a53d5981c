"""Fault injection at random: jobs under seeded schedules of faults, each compared with the same job without faults.

python tests/fault_injection/random_faults.py --minutes 10
python tests/fault_injection/random_faults.py --minutes 2 --config nano --hosts 2 --devices 4 --seed 3

Jobs run one after another; none starts after --minutes. Every step but the first has a fault: kill -9 or SIGTERM in
any phase or shortly after its start, so that some interrupt the writing of a checkpoint; a full disk; a gradient that
is not finite; a search service that is down. Between two starts the newest checkpoint is truncated or has a bit
flipped. The question file has malformed rows.

A job passes if its weights, optimizer, position and metrics are bit-identical to those of the job without faults, no
kill has lost more than one step, and its log has a line for every fault. Otherwise the exit status is 1.
"""

from __future__ import annotations

import contextlib
import random
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from faulty_host import Fault
from run_job import MAX_RESTARTS, Job, checkpoint_steps, differences, free_port
from search_service import FaultySearchService, write_questions

from memsearcher_jax.launch import cli

SMALL = "--rl.steps 6 --rl.prompts_per_step 4 --rl.group_size 4 --rl.checkpoint_every 1 --rl.keep_checkpoints 3"
PHASES = ("rollout", "gather", "update", "write")  # of kills and stops
UNUSED_FILE = "_sharding"  # orbax reads it only if no shardings are given
LOG_LINES = {  # that must report a fault
    "sigterm": r"stopped after step",
    "disk_full": r"not written yet|cannot write|[Ff]ile too large",
    "nan": r"gradient is not finite",
    "damaged checkpoint": r"(is damaged|cannot be read).* renamed to",
    "malformed row": r"malformed rows",
    "kill": "fault: kill",
    "search_outage": "fault: search_outage",
}


def schedule(seed: int, hosts: int) -> list[Fault]:
    """A fault of every kind, one in each step from the second to the sixth.

    Consecutive seeds kill in different phases. The kill comes when there are two checkpoints, so that one can be
    damaged, and before the disk is full, while checkpoints are not written.
    """
    rng = random.Random(seed)
    where = {
        "kill": (PHASES[seed % len(PHASES)], rng.choice((0.0, 0.02, 0.1, 0.3))),
        "sigterm": (rng.choice(PHASES), 0.0),
        "nan": ("update", 0.0),
        "search_outage": ("rollout", 5.0),
        "disk_full": ("write", 10.0),
    }
    kinds = ["sigterm", *rng.sample(("kill", "nan", "search_outage"), 3), "disk_full"]
    return [Fault(kind, rng.randrange(hosts), number + 1, *where[kind], number) for number, kind in enumerate(kinds)]


def damage(rng: random.Random, out: Path, truncate: bool) -> str:
    """Truncates one file of the newest of several checkpoints, or flips a bit of it; returns a description."""
    steps = checkpoint_steps(out)
    if len(steps) < 2:
        return ""
    files = (out / "checkpoints" / str(steps[-1])).rglob("*")
    files = sorted(file for file in files if file.is_file() and file.name != UNUSED_FILE)
    file = rng.choice([file for file in files if file.stat().st_size > 1_000])
    content = bytearray(file.read_bytes())
    if truncate:
        del content[len(content) // 2 :]
    else:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)
    return f"{file.relative_to(out)}: {'truncated' if truncate else 'bit flipped'}"


def lost_steps(log: str, newest: int) -> int:
    """Number of finished steps without a checkpoint."""
    done = [int(step) for step in re.findall(r"train (\d+)/\d+  .*left ", log)]
    return max(done, default=newest) - newest


def check_job(
    folder: Path, arguments: Sequence[str], seed: int, hosts: int, devices: int, search: FaultySearchService
) -> list[str]:
    """One job with faults and the same without; returns what failed."""
    rng, arguments, faults = random.Random(seed), [*arguments, "--seed", str(seed)], schedule(seed, hosts)
    print(f"job {seed}: {'; '.join(map(str, faults))}", flush=True)
    job = Job(arguments, folder / "run", folder, hosts, devices, faults, search)
    injected, failures = {"malformed row"}, []

    def before_restart() -> None:
        attempt = len(job.attempts) - 1
        newest = (checkpoint_steps(job.out) or [0])[-1]
        if (lost := lost_steps(job.log(attempt), newest)) > 1:
            failures.append(f"attempt {attempt} lost {lost} steps")
        if "damaged checkpoint" not in injected and (damaged := damage(rng, job.out, truncate=seed % 2 == 0)):
            injected.add("damaged checkpoint")
            print(f"    damaged: {damaged}", flush=True)

    if not job.run(MAX_RESTARTS, before_restart, after_failures=True):  # such as a full disk
        return [*failures, "the job did not finish"]
    nan_faults = [fault for fault in faults if fault.kind == "nan"]  # they change what is learned
    reference = Job(arguments, folder / "reference", folder, hosts, devices, nan_faults, search)
    if not reference.run(0):
        return [*failures, "the reference job did not finish"]
    injected |= {fault.kind for fault in faults if fault.kind == "nan" or job.triggered(fault)}
    log = "\n".join(map(job.log, range(len(job.attempts))))
    failures += [f"no line reports {kind}" for kind in sorted(injected) if not re.search(LOG_LINES[kind], log)]
    return failures + differences(job.out, reference.out)


@dataclass(frozen=True)
class RandomFaults:
    """Run jobs under random faults and compare each with the same job without faults."""

    minutes: float = 10.0
    """No job starts after this time."""
    config: Annotated[str, tyro.conf.arg(metavar="NAME")] = "tiny"
    """Preset."""
    hosts: int = 1
    """Hosts of each job."""
    devices: int = 2
    """Devices of each host."""
    seed: int = 0
    """Seed of the first job; each job has the next one."""
    out: cli.Directory = None
    """Directory to keep everything in. Default: a temporary one."""


def main(argv: Sequence[str]) -> None:
    with cli.one_line_errors():
        ours, trainers = cli.split_passthrough(argv)
        flags = cli.parse_flags(RandomFaults, ours)
    start, seed, failures = time.monotonic(), flags.seed, 0
    with contextlib.ExitStack() as stack:
        folder = flags.out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="random-faults-")))
        folder.mkdir(parents=True, exist_ok=True)
        data = write_questions(flags.config, folder / "questions.jsonl", malformed=True)
        service = FaultySearchService(flags.config, folder, free_port())
        search = stack.enter_context(contextlib.closing(service))
        arguments = ["--config", flags.config, *SMALL.split(), *data, *search.flags, *trainers]
        while time.monotonic() - start < 60 * flags.minutes:
            job_folder = folder / f"job_{seed}"
            job_folder.mkdir()
            failed = check_job(job_folder, arguments, seed, flags.hosts, flags.devices, search)
            print(f"job {seed}: {'failed: ' + '; '.join(failed) if failed else 'passed'}", flush=True)
            failures += len(failed)
            seed += 1
    minutes = (time.monotonic() - start) / 60
    print(f"{seed - flags.seed} jobs in {minutes:.1f} minutes, {failures} failures")
    if failures:
        raise SystemExit(1)


if __name__ == "__main__":
    cli.run(main)
