"""A run that lives in a bucket: worked on in a folder of this machine, and copied there as it grows.

    gs://BUCKET/RUN     run.json  tokenizer/  metrics.jsonl  tensorboard/  trajectories/  report.html  checkpoints/
    the folder here     the same without checkpoints/, and bucket.json, which names the address

A bucket knows neither appending nor renaming, by which the files of a run are written. So a host works in a folder of
its own and sends each file whole when it has changed; there an object is replaced at once or not at all. Checkpoints go
another way: orbax writes them to the bucket itself, all hosts together. `data/` and `index/` stay on the hosts.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memsearcher_jax.report.metrics import MetricsWriter
from memsearcher_jax.rl.run_folder import BUCKET_FILE, CHECKPOINTS, DATA, INDEX, RUN_FILE

STAYS = (CHECKPOINTS, DATA, INDEX, BUCKET_FILE)
UNFINISHED = ".partial"  # of the name of a file that is being written
SCHEME = "gs://"


@dataclass(frozen=True)
class Bucket:
    """The folder `address`, such as gs://BUCKET/runs/a, and what stands for it on this machine."""

    address: str
    folder: Path
    _sent: dict[Path, tuple[int, int]] = field(default_factory=dict, repr=False)  # size and time when it was sent

    def mark(self) -> None:
        """Makes the folder stand for the address: `run_folder.checkpoints_of` asks for it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / BUCKET_FILE).write_text(json.dumps({"address": self.address}) + "\n", encoding="utf-8")

    def holds_run(self) -> bool:
        """Whether a run was begun there. Raises OSError in one line, as all methods do."""
        with _Reached(self.address):
            return _files().exists(f"{self.address}/{RUN_FILE}")

    def fetch(self, only: Sequence[str] = ()) -> None:
        """Copies here what stands there under these names at the top, without any: everything but what stays."""
        with _Reached(self.address):
            files = _files()
            tops = {name.rpartition("/")[2]: name for name in files.ls(self.address, detail=False)}
            wanted = [name for top, name in tops.items() if (top in only if only else top not in STAYS)]
            there = [name for top in wanted for name in files.find(top)]
            here = [self.folder / _below(name, self.address) for name in there]
            for path in here:
                path.parent.mkdir(parents=True, exist_ok=True)
            files.get(there, [str(path) for path in here])
        self._sent.update({path: _state(path) for path in here})

    def send(self) -> None:
        """Copies every file there that has changed since it was sent or fetched."""
        now = {path: _state(path) for path in sorted(self.folder.rglob("*")) if path.is_file() and self._goes(path)}
        changed = [path for path, state in now.items() if self._sent.get(path) != state]
        with _Reached(self.address):
            there = [f"{self.address}/{path.relative_to(self.folder).as_posix()}" for path in changed]
            _files().put([str(path) for path in changed], there)
        self._sent.update({path: now[path] for path in changed})

    def _goes(self, path: Path) -> bool:
        top = path.relative_to(self.folder).parts[0]
        return top not in STAYS and not top.startswith(".") and not path.name.endswith(UNFINISHED)


class SendingWriter(MetricsWriter):
    """A writer of metrics that sends the folder after each step.

    What cannot be sent is told on stderr and goes with the next step: a bucket that is out of reach for a moment ends
    no run. Whoever wants to know that all has arrived calls `Bucket.send` at the end.
    """

    def __init__(self, bucket: Bucket, **kwargs: Any):
        self._bucket = bucket
        super().__init__(bucket.folder, **kwargs)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        super().write(step, metrics)
        try:
            self._bucket.send()
        except OSError as error:
            print(f"step {step} is not in the bucket yet: {error}", file=sys.stderr, flush=True)


def check_address(address: str) -> None:
    """Raises ValueError, in one line, for what is no folder of a bucket."""
    if not re.fullmatch(r"gs://[^/\s]+(/[^/\s]+)+", address) or "/../" in f"{address}/":
        raise ValueError(f"--out {address}: name a folder as {SCHEME}BUCKET/FOLDER, or one of this machine")


def check_installed(address: str) -> None:
    """Raises ValueError, in one line, where the library is missing."""
    if importlib.util.find_spec("gcsfs") is None:
        raise ValueError(f"--out {address}: gcsfs is not installed: pip install 'memsearcher_jax[gcs]'")


class _Reached:
    """Turns whatever the library raises, of a dozen types, into OSError in one line that names the address."""

    def __init__(self, address: str):
        self._address = address

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception):
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise OSError(f"{self._address} is out of reach ({reason}): see that it exists and may be used") from error


def _files() -> Any:
    """The library's view of all buckets, without a memory of what was listed: other hosts write there too."""
    import fsspec

    return fsspec.filesystem("gs", use_listings_cache=False)


def _below(name: str, address: str) -> Path:
    """Where the object belongs in the folder. Raises ValueError for a name that would lead out of it."""
    relative = Path(name.removeprefix(address.removeprefix(SCHEME)).lstrip("/"))
    if ".." in relative.parts or relative.is_absolute():
        raise ValueError(f"the object {name} has a name that leads out of the folder")
    return relative


def _state(path: Path) -> tuple[int, int]:
    told = path.stat()
    return told.st_size, told.st_mtime_ns
