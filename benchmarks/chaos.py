"""Endurance: jobs under a seeded schedule of faults, each compared with the same job left alone.

python benchmarks/chaos.py --minutes 10
python benchmarks/chaos.py --minutes 2 --config nano --processes 2 --devices 4 --seed 3

Until the minutes are over, one job after the other (none is begun after that). Every step of a job but the first has a
fault: kill -9 or SIGTERM in any phase and shortly after it, so that it also falls into the writing of a checkpoint; a
disk on which no file can grow; a clock that jumps; a host that is late; a gradient that is not finite; a search service
that is gone, does not answer, or answers nonsense. Between two starts the newest checkpoint is sometimes cut off or has
a bit flipped. The questions come from a file with rows that are none. Last, the weights are exported, by a process that
is killed on the way and then by one that is not.

Right is a job that ends with the weights, the optimiser, the position and the recorded numbers of the one left alone,
bit for bit, that never lost more than one step to a kill, and whose log has a line for every fault. Exit status 1
otherwise.
"""

from __future__ import annotations

import contextlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "launch"))

import cli
import export_hf
from pod import rehearse, rehearsed
from pod.retriever import Retriever, write_questions

SMALLER = "--rl.steps 6 --rl.problems 4 --rl.rollouts 4 --rl.checkpoint_every 1 --rl.keep_checkpoints 3"
KILL_PHASES = ("rollout", "share", "update", "write")
OTHER_KINDS = ("term", "full", "clock", "cut", "delay", "nan", "slow", "garbage")
PHASES = {"full": "write", "nan": "update", "cut": "rollout", "slow": "rollout", "garbage": "rollout"}
RESTARTS = 30
UNREAD = "_sharding"  # orbax writes it for those who do not say where arrays belong; a run says so and never opens it
FAILED_BY_FULL_DISK = 1
LINES = {
    "kill": r"fault: kill",
    "term": r"stopped after step",
    "full": r"is not written|[Ff]ile too large",
    "clock": r"fault: clock",
    "delay": r"fault: delay",
    "cut": r"fault: cut",
    "slow": r"fault: slow",
    "garbage": r"fault: garbage",
    "nan": r"updates had a gradient that is not finite",
    "damage": r"(is damaged|cannot be read).* it is kept as",
    "row": r"malformed rows are left out",
}


def schedule(seed: int, steps: int, processes: int) -> list[dict[str, Any]]:
    """A fault for every step but the first, whose end is the first checkpoint; one of them kills a host.

    Jobs whose seeds follow each other kill in one phase after the other, and of six steps each any two strike in every
    way that there is. None kills so early that there is one checkpoint only, which would not be damaged, or right after
    the disk was full, of which the job would have had no time to tell.
    """
    rng, others = random.Random(seed), max(0, steps - 2)
    kinds = [OTHER_KINDS[(seed * others + number) % len(OTHER_KINDS)] for number in range(others)]
    rng.shuffle(kinds)
    kinds.insert(rng.randint(min(1, others), others), "kill")
    if "full" in kinds[:-1] and kinds[(full := kinds.index("full")) + 1] == "kill":
        other = full + 2 if full + 2 < len(kinds) else 0
        kinds[full], kinds[other] = kinds[other], kinds[full]
    if kinds[-1] == "term":  # in the last step nothing is left to stop
        kinds = [kinds[-1], *kinds[:-1]]
    faults = []
    for step, kind in enumerate(kinds, start=1):
        phase = KILL_PHASES[seed % len(KILL_PHASES)] if kind == "kill" else PHASES.get(kind) or rng.choice(KILL_PHASES)
        seconds = {
            "kill": rng.choice((0.0, 0.02, 0.1, 0.3)),
            "full": 30.0,
            "clock": rng.choice((-86_400.0, 86_400.0)),
            "delay": 3.0,
            "cut": 5.0,
            "slow": 5.0,
            "garbage": 5.0,
        }.get(kind, 0.0)
        host = rng.randrange(processes)
        faults.append(
            {"number": len(faults), "kind": kind, "host": host, "step": step, "phase": phase, "seconds": seconds}
        )
    return faults


def damage(rng: random.Random, out: Path, cuts: bool) -> str:
    """Cuts one file of the newest of several checkpoints off, or flips a bit of it; what was done."""
    steps = rehearse.whole_steps(out)
    if len(steps) < 2:
        return ""
    folder = out / "checkpoints" / str(steps[-1])
    files = (file for file in folder.rglob("*") if file.is_file() and file.name != UNREAD)
    files = sorted(file for file in files if file.stat().st_size > 1_000)
    file = rng.choice(files)
    content = bytearray(file.read_bytes())
    if cuts:
        del content[len(content) // 2 :]
        done = "cut off"
    else:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        done = "a bit flipped"
    file.write_bytes(content)
    return f"{file.relative_to(out)}: {done}"


def lost_steps(said: str, newest: int) -> int:
    """Steps that the job had told to be done and no checkpoint holds."""
    done = [int(step) for step in re.findall(r"train (\d+)/\d+  .*left ", said)]
    return max(done, default=newest) - newest


def export(rng: random.Random, run: Path) -> list[str]:
    """Kills an export and starts it again; what was wrong."""
    out, wrong = run.with_name("exported"), []
    command = [sys.executable, export_hf.__file__, "--checkpoint", str(run), "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        began = time.monotonic()
        while process.poll() is None and not list(out.parent.glob(".exported.*.partial")):
            time.sleep(0.005)
        time.sleep(rng.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
        print(f"killed an export after {time.monotonic() - began:.1f} s", flush=True)
    if out.exists() and any(out.iterdir()) and not (out / "tokenizer.json").exists():
        wrong.append("a killed export left half a folder")
    elif not (out / "tokenizer.json").exists():
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not (out / "tokenizer.json").exists():
            wrong.append(f"an export after a killed one fails: {done.stderr[-300:]}")
    return wrong


def round_of_faults(
    place: Path, words: Sequence[str], seed: int, processes: int, devices: int, retriever: Retriever
) -> list[str]:
    """One job under faults, and the same left alone; what was wrong."""
    rng, words = random.Random(seed), [*words, "--seed", str(seed)]
    steps = int(re.search(r"--rl.steps (\d+)", " ".join(words))[1])
    faults = schedule(seed, steps, processes)
    print(f"job {seed}: {'; '.join(map(rehearsed.named, faults))}", flush=True)
    job = rehearse.Job(words, place / "run", place, processes, devices, faults, retriever)
    struck, wrong = {"row"}, []

    def between() -> None:
        attempt = len(job.attempts) - 1
        said = "\n".join(job.log(attempt, process).read_text(errors="replace") for process in range(processes))
        newest = (rehearse.whole_steps(job.out) or [0])[-1]
        if (lost := lost_steps(said, newest)) > 1:
            wrong.append(f"attempt {attempt} lost {lost} steps")
        # Jobs cut off and flip in turn, so that a few show both.
        if "damage" not in struck and (done := damage(rng, job.out, cuts=seed % 2 == 0)):
            struck.add("damage")
            print(f"    damaged: {done}", flush=True)

    def survives(statuses: Sequence[int]) -> bool:
        full = any(status == FAILED_BY_FULL_DISK for status in statuses)
        return rehearse.survived([0 if full and status == FAILED_BY_FULL_DISK else status for status in statuses])

    if not job.run(RESTARTS, between, survives):
        return [*wrong, "the job did not come to its end"]
    twin_faults = [fault for fault in faults if fault["kind"] == "nan"]
    twin = rehearse.Job(words, place / "undisturbed", place, processes, devices, twin_faults, retriever)
    if not twin.run(0):
        return [*wrong, "the job that was left alone did not come to its end"]
    struck |= {fault["kind"] for fault in faults if fault["kind"] == "nan" or job.mark(fault).exists()}
    said = "\n".join(file.read_text(errors="replace") for file in place.glob("run.attempt_*.log"))
    wrong += [f"no line tells of {kind}" for kind in sorted(struck) if not re.search(LINES[kind], said)]
    return wrong + rehearse.differences(job.out, twin.out) + export(rng, job.out)


def main(argv: Sequence[str]) -> None:
    parser = cli.Parser(prog="chaos.py", description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=10.0, help="no job is begun after so long")
    parser.add_argument("--config", default="tiny", metavar="NAME", help="preset")
    parser.add_argument("--processes", type=int, default=1, help="hosts of each job")
    parser.add_argument("--devices", type=int, default=2, help="devices of each host")
    parser.add_argument("--seed", type=int, default=0, help="of the first job; the next has the next one")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to keep everything; without it: nowhere")
    with cli.one_line_errors():
        ours, trainers = cli.cut(argv)
        flags = parser.parse_args(ours)
    began, seed, wrong = time.monotonic(), flags.seed, []
    with contextlib.ExitStack() as stack:
        top = flags.out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        top.mkdir(parents=True, exist_ok=True)
        data = write_questions(flags.config, top / "questions.jsonl", torn=True)
        retriever = stack.enter_context(contextlib.closing(Retriever(flags.config, top, rehearse.free_port())))
        words = ["--config", flags.config, *SMALLER.split(), *data, *retriever.flags, *trainers]
        while time.monotonic() - began < 60 * flags.minutes:
            place = top / f"job_{seed}"
            place.mkdir()
            found = round_of_faults(place, words, seed, flags.processes, flags.devices, retriever)
            print(f"job {seed}: {'wrong: ' + '; '.join(found) if found else 'right'}", flush=True)
            wrong += found
            seed += 1
    minutes = (time.monotonic() - began) / 60
    print(f"{seed - flags.seed} jobs in {minutes:.1f} minutes, {len(wrong)} things wrong")
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    cli.run(main)
