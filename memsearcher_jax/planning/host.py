"""What a run needs of its hosts: the time of a step in which devices wait for them, memory and disk."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memsearcher_jax.config import RunConfig
from memsearcher_jax.planning.roofline import Topology, Workload

# It loads JAX, which reads its environment then.
if TYPE_CHECKING:
    from memsearcher_jax.planning.tpu_plan import ResidentMemory

# GB of memory of a TPU VM by its chips, of docs.cloud.google.com/tpu/docs: VM types of v5e and v6e (172 or 176 for one
# chip of v6e), and the page of TPU7x for v5p and tpu7x. v4: as others report it, not compared with a page of Google.
VM_MEMORY_GB = {
    "v4": {4: 407},
    "v5e": {1: 48, 4: 192, 8: 384},
    "v5p": {4: 448},
    "v6e": {1: 172, 4: 720, 8: 1_440},
    "tpu7x": {4: 960},
}
ROOT_DISK_GB = 100  # of a TPU VM
# Per passage of 100 words and a vector of 768 numbers (docs/retrieve.md): ScaNN searches in memory, its files and the
# texts are on disk.
PASSAGE_MEMORY_BYTES = 35e9 / 21_015_324
PASSAGE_DISK_BYTES = 52e9 / 21_015_324
WEIGHT_FILE_ITEMSIZE = 2  # published weights are in bfloat16


@dataclass(frozen=True)
class HostTime:
    """CPU seconds of one host in a step."""

    rollout: float  # while the devices sample
    between: float  # after the rollout, before the update: the devices wait
    overlaps: bool  # whether calls are dispatched before the host has handled the one before

    def hidden(self, device_seconds: float) -> float:
        """Seconds of `rollout` in which the devices work, if these roll out for so long."""
        return min(self.rollout, device_seconds) if self.overlaps else 0.0

    def waited(self, device_seconds: float) -> float:
        """Seconds in which the devices wait for the host."""
        return self.rollout - self.hidden(device_seconds) + self.between


def host_time(config: RunConfig, workload: Workload, topology: Topology) -> HostTime:
    trajectories = config.rl.prompts_per_step * config.rl.group_size
    of_host = math.ceil(trajectories / topology.hosts)
    return HostTime(
        rollout=of_host * workload.host_ms / 1e3,
        between=(of_host * workload.between_ms + trajectories * workload.packing_ms) / 1e3,
        overlaps=config.sampling.async_scheduling != "off",
    )


@dataclass(frozen=True)
class HostSpace:
    """Bytes that a run needs of the memory and of the disk of one host."""

    memory: dict[str, float]  # by what takes it
    disk: dict[str, float]
    memory_limit: float | None  # None: not known
    disk_limit: float | None

    @property
    def excess(self) -> list[str]:
        """A line for each of memory and disk that does not suffice, with ways out."""
        lines = []
        if self.memory_limit and (needed := sum(self.memory.values())) > self.memory_limit:
            lines.append(
                f"host memory: {needed / 1e9:.0f} GB are more than the {self.memory_limit / 1e9:.0f} of the VM: search "
                "by a service (retrieval.url), or a smaller corpus (--workload.passages)"
            )
        if self.disk_limit and (needed := sum(self.disk.values())) > self.disk_limit:
            lines.append(
                f"host disk: {needed / 1e9:.0f} GB are more than the {self.disk_limit / 1e9:.0f} of a root disk: "
                "attach a data disk, or write to a bucket (--out gs://BUCKET/FOLDER), or keep fewer checkpoints "
                "(rl.keep_checkpoints)"
            )
        return lines


def host_space(
    config: RunConfig, workload: Workload, topology: Topology, memory: ResidentMemory, weights: int
) -> HostSpace:
    """The space of one host of a run whose model has this many `weights`.

    A checkpoint is copied to the host before it is written. Hosts of one slice write it to a folder that they share.
    """
    host_devices = len(topology.host_devices)
    in_memory = {
        "copy of the train state": memory.state * host_devices,
        "index": workload.passages * PASSAGE_MEMORY_BYTES,
    }
    if config.training.offload_reference:
        in_memory["reference"] = memory.reference * host_devices
    on_disk = {"weights": weights * WEIGHT_FILE_ITEMSIZE, "index": workload.passages * PASSAGE_DISK_BYTES}
    if topology.hosts == 1:
        kept = config.rl.keep_checkpoints + 2  # the best one, and the one that is being written
        on_disk[f"{kept} checkpoints"] = kept * memory.state * host_devices
    memory_gb = VM_MEMORY_GB.get(topology.generation, {}).get(topology.host_chips)
    return HostSpace(
        memory=in_memory,
        disk=on_disk,
        memory_limit=memory_gb * 1e9 if memory_gb else None,
        disk_limit=ROOT_DISK_GB * 1e9 if topology.generation in VM_MEMORY_GB else None,
    )
