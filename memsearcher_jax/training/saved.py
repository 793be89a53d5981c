"""The weights of a checkpoint, read from disk piece by piece: for whoever writes them on and never needs them whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore

from memsearcher_jax.model import qwen
from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.training.digest import host_sums, written

# One chunk of a file at a time: what is read at once would all be in memory at once.
ONE_AT_A_TIME = {"file_io_concurrency": {"limit": 1}, "data_copy_concurrency": {"limit": 1}}


class SavedParams:
    """The weights below `folder`, an item that orbax wrote, of the model that `config` describes.

    `digests`: what they were when they were saved, by path such as "layers.wq".
    """

    def __init__(self, folder: str | Path, config: ModelConfig, digests: dict[str, str]):
        self._address = str(folder) if "://" in str(folder) else f"file://{folder}"
        self._digests = digests
        self._context = tensorstore.Context(ONE_AT_A_TIME)
        self._declared = {
            jax.tree_util.keystr(path, simple=True, separator="."): weight
            for path, weight in jax.tree.leaves_with_path(qwen.declared(config))
        }
        self._sums: dict[str, list[int]] = {path: [0, 0] for path in self._declared}
        self._open: dict[str, Any] = {}

    def read(self, path: str, layer: int | None) -> np.ndarray:
        """One weight in the type that it was saved in, or one layer of a stacked one. Raises ValueError if damaged."""
        try:
            stored = self._stored(path)
            value = np.asarray((stored if layer is None else stored[layer]).read().result())
        except Exception as error:  # tensorstore's, of any of its types
            raise ValueError(f"{self._address} cannot be read: {path}: {str(error).splitlines()[0][:200]}") from error
        start = 0 if layer is None else layer * value.size
        self._sums[path] = [
            (so_far + new) % 2**32 for so_far, new in zip(self._sums[path], host_sums(value, start), strict=True)
        ]
        return value

    def check(self) -> None:
        """Raises ValueError unless what was read is what was saved. Every weight must have been read, once."""
        for path, sums in self._sums.items():
            if written(*sums) != self._digests.get(path):
                raise ValueError(f"{self._address} is damaged: {path} is not what was saved")

    def _stored(self, path: str) -> Any:
        if path not in self._open:
            spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": self._address, "path": f"{path}/"}}
            self._open[path] = tensorstore.open(spec, open=True, read=True, context=self._context).result()
            shape = tuple(self._declared[path].shape)
            if self._open[path].shape != shape:
                raise ValueError(f"its shape is {self._open[path].shape}, not {shape}")
        return self._open[path]
