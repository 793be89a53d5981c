"""The trainer's --out: a local directory, or a temporary one that mirrors a directory of a bucket."""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from memsearcher_jax.launch import cli, preconditions
from memsearcher_jax.runtime.remote_dir import RemoteDir, check_address
from memsearcher_jax.runtime.run_dir import RUN_FILE, TOKENIZER, is_run


@dataclass(frozen=True)
class TrainSource(cli.ResumableSource):
    start_or_resume: bool = False
    """Start the run, or resume it if --out holds it already: for a command that is repeated after every stop."""


def localize(source: TrainSource, stack: contextlib.ExitStack) -> tuple[TrainSource, RemoteDir | None]:
    """`source` with a local --out, and the bucket directory that it mirrors, if any.

    --start_or_resume sets --resume if the run exists. An address in --out becomes a temporary directory that holds the
    run's settings and tokenizer; `stack` removes it. Raises ValueError or OSError in one line.
    """
    if source.start_or_resume and not source.out:
        raise ValueError("--start_or_resume needs --out, the directory of the run")
    if not cli.is_address(source.out):
        started = source.start_or_resume and source.out is not None and is_run(source.out)
        return replace(source, resume=source.resume or started), None
    address = str(source.out).replace(":/", "://", 1)  # Path merges the two slashes
    check_address(address)
    preconditions.require_extra("gcs", "gcsfs", needed_by=f"--out {address}: ")
    scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="memsearcher-"))
    remote = RemoteDir(address, Path(scratch) / address.rpartition("/")[2])
    exists = remote.holds_run()
    resume = source.resume or (source.start_or_resume and exists)
    if exists and not resume:
        raise FileExistsError(f"--out {remote.address} holds a run: continue it with --resume, or choose another")
    if resume and not exists:
        raise FileNotFoundError(f"--out {remote.address} holds no run: there is no {RUN_FILE} in it")
    if exists:
        remote.fetch(only=(RUN_FILE, TOKENIZER))
    remote.link()
    return replace(source, out=remote.folder, resume=resume), remote
