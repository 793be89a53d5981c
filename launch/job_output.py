"""Where a job of one or several hosts writes: a local directory, which in training may mirror one of a bucket."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from memsearcher_jax.hosts.ending import RunEnded
from memsearcher_jax.launch import cli, outputs, preconditions
from memsearcher_jax.logs.metrics import METRICS_FILE, read_metrics
from memsearcher_jax.logs.progress import announced, format_metrics
from memsearcher_jax.logs.run_facts import PAGE, RESULTS_FILE, WEIGHTS_FILE
from memsearcher_jax.report.page.html import MAX_TRAJECTORIES, write_page
from memsearcher_jax.report.plots import CURVES_FILE, training_curves
from memsearcher_jax.runs.inputs import COPIES, INPUTS_FILE
from memsearcher_jax.runs.remote_dir import RemoteDir, check_address
from memsearcher_jax.runs.run_dir import CHECKPOINTS, INDEX, RUN_FILE, TOKENIZER, is_run

if TYPE_CHECKING:
    from memsearcher_jax.hosts.distributed import Hosts

REPORT_TRAJECTORIES = 1_000  # in the report that training writes; launch/report.py writes larger ones


@dataclass(frozen=True)
class TrainSource(cli.ResumableSource):
    start_or_resume: bool = False
    """Start the run, or resume it if --out holds it already: for a command that is repeated after every stop."""


def localize(source: TrainSource, stack: contextlib.ExitStack) -> tuple[TrainSource, RemoteDir | None]:
    """`source` with a local --out, and the bucket directory that it mirrors, if any.

    --start_or_resume sets --resume if the run exists. An address in --out becomes a temporary directory that holds the
    run's settings, inputs and tokenizer; `stack` removes it. Raises ValueError or OSError in one line.
    """
    if source.start_or_resume and not source.out:
        raise ValueError("--start_or_resume needs --out, the directory of the run")
    address = cli.address_of(source.out)
    if not address:
        is_started = source.start_or_resume and source.out is not None and is_run(source.out)
        return replace(source, resume=source.resume or is_started), None
    check_address(address)
    preconditions.require_extra("gcs", "gcsfs", needed_by=f"--out {address}: ")
    scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="memsearcher-"))
    remote = RemoteDir(address, Path(scratch) / address.rpartition("/")[2])
    exists = remote.holds(RUN_FILE)
    if not exists and remote.holds(CHECKPOINTS):
        raise FileExistsError(f"--out {address} holds {CHECKPOINTS}/, but no {RUN_FILE}: delete it, or choose another")
    resume = source.resume or (source.start_or_resume and exists)
    if exists and not resume:
        raise FileExistsError(f"--out {remote.address} holds a run: continue it with --resume, or choose another")
    if resume and not exists:
        raise FileNotFoundError(f"--out {remote.address} holds no run: there is no {RUN_FILE} in it")
    if exists:
        remote.fetch(only=(RUN_FILE, TOKENIZER, INPUTS_FILE, COPIES))
    remote.link()
    return replace(source, out=remote.folder, resume=resume), remote


def require_shared(out: Path, hosts: Hosts) -> None:
    """Raises ValueError on all hosts unless all see the same directory: orbax would wait forever for their shards."""
    with contextlib.ExitStack() as stack:
        mark_name = ""
        if hosts.first:
            # `outputs.require_vacant` ignores a file of this prefix, which a kill leaves.
            mark = stack.enter_context(tempfile.NamedTemporaryFile(prefix=f".{INDEX}.", dir=out))
            mark_name = Path(mark.name).name
        names = hosts.exchange(mark_name.encode())
        assert names, "every host gives a name"
        mark_of_first_host = out / names[0].decode()
        seen = hosts.exchange(b"yes" if mark_of_first_host.exists() else b"no")
    if seen != [b"yes"] * hosts.count:
        raise ValueError(f"--out {out} is not the same directory on all hosts: choose one that they share, or a bucket")


def open_output(
    source: cli.ResumableSource,
    kind: str,
    hosts: Hosts,
    startup: contextlib.ExitStack,
    job: contextlib.ExitStack,
    wait: float = 0.0,
) -> Path:
    """The directory --out, locked by the first host until `job` ends; a new one is removed if `startup` fails.

    `wait`: seconds in which another process may still leave a run that is resumed.
    """
    out = source.out
    if out is None and hosts.count > 1:
        raise ValueError(f"--out is missing: give one directory that all {hosts.count} hosts write to")
    if out and not hosts.first:
        return out
    if out and source.resume:
        if kind != "evaluate" and (out / WEIGHTS_FILE).is_file() and not (out / CHECKPOINTS).exists():
            raise ValueError(f"{out} holds an evaluation: continue it with launch/evaluate.py")
        job.enter_context(outputs.output_lock(out, wait=wait))
        return out
    return startup.enter_context(outputs.new_output_dir(out, kind, locks=job))


@contextlib.contextmanager
def way_on(place: object) -> Iterator[None]:
    """Around the training of a run in `place`: says how to continue it, if it ends early."""
    with cli.one_line_errors(f"the checkpoints in {place} are intact; fix the error and rerun with --resume"):
        try:
            yield
        except RunEnded as end:
            raise RunEnded(end.reason, f"{end}; continue with --resume --out {place}") from None


def finish(flags: cli.Command, out: Path, place: object, steps: int, remote: RemoteDir | None = None) -> None:
    """Writes the report and the results of a trained run in `out`, which mirrors `remote` if there is one."""
    with cli.one_line_errors():
        if remote:
            per_step = flags.run.rl.prompts_per_step * flags.run.rl.group_size
            remote.fetch_trajectories(REPORT_TRAJECTORIES // per_step + 1)
        page = write_report(out, place, REPORT_TRAJECTORIES)
        metrics = read_metrics(out / METRICS_FILE)
        outputs.write_json(out / RESULTS_FILE, {"steps": len(metrics)})  # last: `has_ended`
        if remote:
            remote.send()
    show_result(flags, out, place, f"step {steps} done, {format_metrics(metrics[-1])}{page}")


def show_result(flags: cli.Command, out: Path, place: object, line: str) -> None:
    """Prints a line about a trained run, and writes its metrics for --json."""
    outputs.write_json(flags.json, {"run": str(place), "metrics": read_metrics(out / METRICS_FILE)})
    print(f"{place}: {line}")


def write_report(out: Path, place: object, max_trajectories: int = MAX_TRAJECTORIES) -> str:
    """Writes the page of a run that has ended, and the learning curves of one that trained; says where to read it.

    "" if it fails, which does not fail the run: whatever is wrong with what the page shows, the results are written.
    """
    try:
        with announced("writing the report"):
            metrics = out / METRICS_FILE
            if metrics.is_file():
                training_curves(metrics, out / CURVES_FILE)
            write_page(out, out / PAGE, max_trajectories=max_trajectories)
    except Exception as error:
        reason = outputs.printable(f"{type(error).__name__}: {error}")
        line = f"{place}: no report ({reason}); once that is fixed: launch/report.py {place}"
        print(line, file=sys.stderr, flush=True)
        return ""
    return f"; read {place}/{PAGE}"
