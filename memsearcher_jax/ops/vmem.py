"""The memory of a TPU core that a Pallas kernel may use."""

from __future__ import annotations

from jax.experimental.pallas import tpu as pltpu

MAX_BYTES = 64 << 20
"""What kernels are sized for; a core of a v4 has 16 MiB, one of a tpu7x 64 MiB, and others have 128 MiB."""


def vmem_bytes() -> int:
    """Bytes that a kernel may use on the devices that it is compiled for; `MAX_BYTES` where it is interpreted."""
    if not pltpu.is_tpu_device():
        return MAX_BYTES
    return min(MAX_BYTES, pltpu.get_tpu_info().vmem_capacity_bytes)
