"""Reads the weights of a checkpoint one tensor at a time, to convert them in little memory."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from urllib.parse import quote

import numpy as np
import tensorstore

from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.training.checkpoint_files import error_line, open_reader, read_meta, select_step
from memsearcher_jax.training.checksums import slice_checksum

# Reads one chunk at a time: tensorstore holds everything in memory that it reads concurrently.
SEQUENTIAL_READS = {"file_io_concurrency": {"limit": 1}, "data_copy_concurrency": {"limit": 1}}


class ParamsReader:
    """Reads the newest weights from disk one tensor at a time, to convert them in little memory.

    Raises as `restore_params`, but for damaged numbers only in `check`.
    """

    def __init__(self, directory: str | Path, model_config: ModelConfig):
        with open_reader(directory) as manager:
            step = select_step(manager)
            self._checksums: dict[str, int] = read_meta(manager, step, model_config)["array_checksums"]["params"]
            folder = str(manager.directory / str(step) / "params")
        # tensorstore takes URLs, in which a folder named exp#1 or 50% would be another one.
        self._url = folder if "://" in folder else f"file://{quote(folder)}"
        self._context = tensorstore.Context(SEQUENTIAL_READS)
        self._stores: dict[str, tensorstore.TensorStore] = {}
        self._sums = Counter[str]()

    def read(self, path: str, layer: int | None) -> np.ndarray:
        """One weight, such as "layers.wq", or one layer of it, in the type that was saved."""
        try:
            if path not in self._stores:
                spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": self._url, "path": f"{path}/"}}
                self._stores[path] = tensorstore.open(spec, open=True, read=True, context=self._context).result()
            store = self._stores[path]
            value = np.asarray((store if layer is None else store[layer]).read().result())
        except Exception as error:  # tensorstore raises many types
            raise ValueError(f"{self._url} cannot be read: {path}: {error_line(error)}") from error
        self._sums[path] += slice_checksum(value, (layer or 0) * value.size)
        return value

    def check(self) -> None:
        """Raises ValueError if a checksum differs. Call it after every weight was read exactly once."""
        for path, checksum in self._checksums.items():
            if self._sums[path] % 2**32 != checksum:
                raise ValueError(f"{self._url} is damaged: the checksum of {path} differs")
