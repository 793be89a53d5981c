"""Files that are replaced in one step: a reader never sees half of one, nor what two processes wrote at once."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def atomic_write(path: Path, content: bytes) -> None:
    """Write a temporary file that then replaces `path`; after an error, which names it, `path` is unchanged."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = error.filename or str(path)  # that of a full disk has none
        raise
