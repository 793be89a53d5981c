"""A host of `test_two_hosts_agree_on_the_checkpoints_of_a_bucket`: resumes a run whose newest step is damaged.

Before, the second host alone cannot read the weights: the first must not wait for it.

python bucket_host.py PORT PROCESS ADDRESS      four devices
"""

import os
import sys
from pathlib import Path
from unittest import mock

PORT, PROCESS, ADDRESS = sys.argv[1], int(sys.argv[2]), sys.argv[3]
os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{PORT}", 2, PROCESS)

from memsearcher_jax.model import sharding  # noqa: E402
from memsearcher_jax.model.config import MeshConfig  # noqa: E402
from memsearcher_jax.training import checkpoint, update  # noqa: E402
from memsearcher_jax.training.config import TrainingConfig  # noqa: E402

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tests.support import NANO  # noqa: E402


def unreadable(*_: object) -> None:
    raise checkpoint.DamagedCheckpointError("permission denied")


def main() -> None:
    mesh = sharding.make_mesh(MeshConfig(data=1, fsdp=-1, tensor=1))
    damage: list[str] = []
    with jax.set_mesh(mesh):
        assert checkpoint.latest_step(ADDRESS) == 3
        target = update.abstract_state(NANO, update.make_optimizer(TrainingConfig()), mesh)
        with mock.patch.object(checkpoint, "_read_meta", unreadable if PROCESS == 1 else checkpoint._read_meta):
            try:
                checkpoint.restore_params(ADDRESS, NANO, target.params, 2)
                raise AssertionError("the second host cannot read it")
            except checkpoint.DamagedCheckpointError as error:
                assert str(error).startswith(("host 1 cannot read checkpoint", "permission denied")[PROCESS]), error
        step, state, meta = checkpoint.restore_latest(ADDRESS, NANO, target, damage.append)
        assert (step, meta, len(damage)) == (2, {"position": 2}, 1), (step, meta, damage)
        with checkpoint.Checkpoints(ADDRESS, keep=2) as checkpoints:
            assert checkpoints.newest == 2
            checkpoints.save(3, state, NANO, {"position": 3})
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
