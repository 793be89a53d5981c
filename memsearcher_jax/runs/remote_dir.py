"""A run in a bucket, mirrored by a local directory that is uploaded as it grows.

    gs://BUCKET/RUN        run.json  tokenizer/  metrics.jsonl  tensorboard/  trajectories/  report.html  checkpoints/
    the local directory    the same without checkpoints/, and bucket.json with the address

Cloud Storage supports neither append nor rename, which the files of a run need. So the host writes locally and uploads
each changed file; an upload replaces an object atomically. Uploaded trajectories, which soon fill a disk, are deleted
here. orbax writes checkpoints to the bucket directly, from all hosts. `data/` and `index/` stay on the hosts.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memsearcher_jax.logs.metrics import MetricsWriter
from memsearcher_jax.report.page.run_data import evenly_spaced
from memsearcher_jax.runs.run_dir import BUCKET_FILE, CHECKPOINTS, DATA, INDEX, RUN_FILE

TRAJECTORIES = "trajectories"
NOT_COPIED = (CHECKPOINTS, DATA, INDEX, BUCKET_FILE)
PARTIAL = ".partial"  # suffix of a file that is being written
SCHEME = "gs://"


@dataclass(frozen=True)
class RemoteDir:
    """The bucket directory `address`, such as gs://BUCKET/runs/a, and the local directory that mirrors it."""

    address: str
    folder: Path
    _sent: dict[Path, tuple[int, int]] = field(default_factory=dict, repr=False)  # size and mtime at the last transfer

    def link(self) -> None:
        """Writes the address to the local directory, where `run_dir.checkpoints_of` reads it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / BUCKET_FILE).write_text(json.dumps({"address": self.address}) + "\n", encoding="utf-8")

    def holds(self, name: str) -> bool:
        """Whether the bucket directory has this file or folder. Raises OSError in one line, as all methods do."""
        with _one_line_errors(self.address):
            return _file_system().exists(f"{self.address}/{name}")

    def fetch(self, only: Sequence[str] = ()) -> None:
        """Downloads the top-level entries `only`; by default all but trajectories and NOT_COPIED."""
        with _one_line_errors(self.address):
            files = _file_system()
            tops = {name.rpartition("/")[2]: name for name in files.ls(self.address, detail=False)}
            wanted = only or set(tops) - {*NOT_COPIED, TRAJECTORIES}
            self._get([name for top in tops if top in wanted for name in files.find(tops[top])])

    def fetch_trajectories(self, count: int) -> None:
        """Downloads at most `count` of the files of trajectories, evenly spaced and with the last."""
        with _one_line_errors(self.address):
            objects = sorted(_file_system().find(f"{self.address}/{TRAJECTORIES}"))
            self._get([objects[index] for index in evenly_spaced(len(objects), count)])

    def _get(self, objects: Sequence[str]) -> None:
        """Downloads objects of the bucket to their places in the local directory."""
        paths = [self.folder / _relative_path(name, self.address) for name in objects]
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
        _file_system().get(list(objects), [str(path) for path in paths])
        self._sent.update({path: _state(path) for path in paths})

    def send(self) -> None:
        """Uploads every file that has changed since the last transfer, run.json last: with it the run exists."""
        changed: dict[Path, tuple[int, int]] = {}
        for path in sorted(self.folder.rglob("*")):
            top = path.relative_to(self.folder).parts[0]
            is_private = top in NOT_COPIED or top.startswith(".") or path.name.endswith(PARTIAL)
            if is_private or not path.is_file():
                continue
            state = _state(path)
            if self._sent.get(path) != state:
                changed[path] = state
        run_files = {path: state for path, state in changed.items() if path.name == RUN_FILE}
        other_files = {path: state for path, state in changed.items() if path.name != RUN_FILE}
        self._put(other_files)
        self._put(run_files)
        for path in changed:
            if path.parent.name == TRAJECTORIES:
                path.unlink()

    def _put(self, states: Mapping[Path, tuple[int, int]]) -> None:
        """Uploads files, with their size and mtime before the upload, to their places in the bucket directory."""
        with _one_line_errors(self.address):
            objects = [f"{self.address}/{path.relative_to(self.folder).as_posix()}" for path in states]
            _file_system().put([str(path) for path in states], objects)
        self._sent.update(states)


class UploadingWriter(MetricsWriter):
    """A metrics writer that uploads the run after each step.

    A failed upload is reported on stderr and repeated after the next step, so that a short outage does not end the run.
    `RemoteDir.send` at the end raises if the bucket is still unreachable.
    """

    def __init__(self, remote: RemoteDir, **kwargs: Any):
        self._remote = remote
        super().__init__(remote.folder, **kwargs)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        super().write(step, metrics)
        try:
            self._remote.send()
        except OSError as error:
            print(f"step {step} is not uploaded yet: {error}", file=sys.stderr, flush=True)

    def close(self) -> None:
        super().close()
        with contextlib.suppress(OSError):  # a stopped run has no other upload after a failed one
            self._remote.send()


def check_address(address: str) -> None:
    """Raises ValueError, in one line, unless this is the address of a bucket directory."""
    if not re.fullmatch(r"gs://[^/\s]+(/[^/\s]+)+", address) or "/../" in f"{address}/":
        raise ValueError(f"--out {address}: give {SCHEME}BUCKET/DIR")


@contextlib.contextmanager
def _one_line_errors(address: str) -> Iterator[None]:
    """Turns the library's errors, of a dozen types, into OSError in one line that names the address."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise OSError(
            f"{address}: transfer failed ({reason}): check the address, your access and the local disk"
        ) from error


def _file_system() -> Any:
    """The file system of all buckets, without a cache of listings: other hosts write to it too."""
    import fsspec

    return fsspec.filesystem("gs", use_listings_cache=False)


def _relative_path(name: str, address: str) -> Path:
    """The object's path in the local directory. Raises ValueError if it would be outside."""
    relative = Path(name.removeprefix(address.removeprefix(SCHEME)).lstrip("/"))
    if ".." in relative.parts or relative.is_absolute():
        raise ValueError(f"the object {name} has a name outside the run directory")
    return relative


def _state(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns
