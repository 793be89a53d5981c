"""Where the trainer works: in --out, or, if that is in a bucket, in a folder of this machine that stands for it."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import cli

from memsearcher_jax.rl.run_folder import RUN_FILE, TOKENIZER, is_run

if TYPE_CHECKING:  # it loads TensorBoard's writer, which --help does not need
    from memsearcher_jax.rl.bucket import Bucket


def settle(argv: Sequence[str], stack: contextlib.ExitStack) -> tuple[list[str], Bucket | None]:
    """The command line as it stands for a folder here, and the bucket of which that is a part, if any.

    --start_or_resume becomes --resume where a run is, and an address of --out becomes a temporary folder with what
    tells how the run there goes on; `stack` removes it. Raises ValueError or OSError in one line.
    """
    words, flags = list(argv), _first_look(argv)
    if flags.start_or_resume and not flags.out:
        raise ValueError("--start_or_resume needs --out, the folder of the run")
    bucket = _open(flags.out, stack) if cli.is_address(flags.out) else None
    begun = bucket.holds_run() if bucket else is_run(flags.out)
    if flags.start_or_resume and begun and not flags.resume:
        words.append("--resume")
    if bucket is None:
        return words, None
    resume = "--resume" in words
    if begun and not resume:
        raise FileExistsError(f"--out {bucket.address} holds a run: go on with it by --resume, or choose another")
    if resume and not begun:
        raise FileNotFoundError(f"--out {bucket.address} holds no run: there is no run.json in it")
    if begun:
        bucket.fetch(only=(RUN_FILE, TOKENIZER))
    bucket.mark()
    return [_here(word, bucket) for word in words], bucket


def _here(word: str, bucket: Bucket) -> str:
    """--out with the folder in place of the address; any other word as it is."""
    return word.replace(bucket.address, str(bucket.folder)) if word.endswith(bucket.address) else word


def _open(address: str, stack: contextlib.ExitStack) -> Bucket:
    from memsearcher_jax.rl.bucket import Bucket, check_address, check_installed

    check_address(address)
    check_installed(address)
    scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="memsearcher-"))
    return Bucket(address, Path(scratch) / address.rpartition("/")[2])


def _first_look(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--out", default="")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--start_or_resume", action="store_true")
    try:
        return parser.parse_known_args(list(argv))[0]
    except argparse.ArgumentError as error:
        raise ValueError(f"{error} (--help explains every setting)") from error
