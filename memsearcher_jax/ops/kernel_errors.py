"""Says what to do when a Pallas kernel does not compile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax

KERNEL_WORDS = ("mosaic", "pallas", "vmem", "tpu_custom_call")
"""Words of the messages of compilers about kernels; the compiler of the other operations has none of them."""


class KernelError(RuntimeError):
    """A kernel did not compile. The message is one line."""


@contextlib.contextmanager
def way_around_kernels(setting: str) -> Iterator[None]:
    """Raises the error of a kernel that does not compile as a KernelError, which names `setting`: "xla" avoids kernels.

    Other errors pass, among them those of running programs.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        if not is_of_kernel(error):
            raise
        reason = str(error).strip().splitlines()[0]
        raise KernelError(
            f"a Pallas kernel did not compile: set {setting} to xla, which needs none ({reason})"
        ) from error


def is_of_kernel(error: Exception) -> bool:
    """Whether a failed compilation is that of a kernel."""
    message = str(error).lower()
    return any(word in message for word in KERNEL_WORDS)
