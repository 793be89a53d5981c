"""A host of `test_many_hosts.py`: trains on fixed examples, saves a checkpoint and restores that of other processes.

python many_hosts.py PORT PROCESS PROCESSES FOLDER      eight devices in total
"""

import os
import sys
from concurrent.futures import Future
from pathlib import Path

PORT, PROCESS, PROCESSES = (int(word) for word in sys.argv[1:4]) if __name__ == "__main__" else (0, 0, 1)
if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={8 // PROCESSES}"
    )
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

if __name__ == "__main__":
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{PORT}", PROCESSES, PROCESS)

from memsearcher_jax.hosts.distributed import Hosts, Interrupted  # noqa: E402
from memsearcher_jax.hosts.ending import EndReason, RunEnded  # noqa: E402
from memsearcher_jax.logs.trajectories import step_path  # noqa: E402
from memsearcher_jax.model import qwen, sharding  # noqa: E402
from memsearcher_jax.model.config import MeshConfig  # noqa: E402
from memsearcher_jax.rl.batch import RolloutBatch, exchange  # noqa: E402
from memsearcher_jax.rl.metrics import RolloutStats  # noqa: E402
from memsearcher_jax.rl.recorder import Recorder  # noqa: E402
from memsearcher_jax.rl.timing import Timer  # noqa: E402
from memsearcher_jax.sampling.scheduler import SamplerStats  # noqa: E402
from memsearcher_jax.training import checkpoint, update  # noqa: E402
from memsearcher_jax.training.config import TrainingConfig  # noqa: E402
from memsearcher_jax.training.packing import TrainingExample  # noqa: E402
from memsearcher_jax.training.trainer import make_trainer  # noqa: E402
from memsearcher_jax.types import StopReason, TrajectorySummary  # noqa: E402

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tests.support import NANO  # noqa: E402

TRAINING = TrainingConfig(
    seq_len=32, minibatch_rows=8, logit_chunk=16, learning_rate=1e-3, kl_coefficient=0.1, old_logprobs="trainer"
)
MESH = MeshConfig(data=2, fsdp=2, tensor=2)
OTHER_MESH = MeshConfig(data=1, fsdp=8, tensor=1)
META = {"position": 12}


def make_batch(host: int, hosts: int) -> RolloutBatch:
    """The rollouts of a host. The last of several hosts has a tenth of the examples, with short contexts."""
    examples = []
    for number in range(40):
        rng = np.random.default_rng(number)
        length = 3 + number // 2
        examples.append(
            TrainingExample(
                rng.integers(0, NANO.vocab_size, length).astype(np.int32),
                -rng.random(length).astype(np.float32) - 5,
                np.arange(length) > 1,
                float(rng.normal()),
                number % 4,
            )
        )
    examples.reverse()
    bounds = [0, *(36 for _ in range(hosts - 1)), 40]
    local = examples[bounds[host] : bounds[host + 1]]
    summaries = [
        TrajectorySummary("nq", None, 1, 0, StopReason.ANSWERED, example.advantage, {"f1": 0.1}, (len(example.ids),))
        for example in local
    ]
    return RolloutBatch(
        local,
        summaries,
        RolloutStats(SamplerStats(generated_tokens=len(local)), float(len(local)), (0.1 * host,)),
    )


def init_params(mesh: jax.sharding.Mesh, seed: int) -> dict:
    init = jax.jit(lambda key: qwen.init(key, NANO), out_shardings=sharding.param_shardings(NANO, mesh))
    return init(jax.random.key(seed))


def train(hosts: Hosts, mesh: jax.sharding.Mesh) -> tuple[update.TrainState, dict, RolloutBatch]:
    """Two training steps from fixed initial weights."""
    optimizer = update.make_optimizer(TRAINING)
    batch = exchange(hosts, make_batch(hosts.index, hosts.count))
    with jax.set_mesh(mesh):
        params = init_params(mesh, 0)
        trainer = make_trainer(NANO, TRAINING, mesh, params, method="grpo", temperature=1.0)
        state = update.init_state(params, NANO, optimizer, mesh)
        for step in range(2):
            state, metrics = trainer.step(state, batch.examples, np.random.default_rng(step), lambda text: None, step)
    return state, metrics, batch


def save(folder: Path, state: update.TrainState) -> None:
    with checkpoint.Checkpoints(folder, keep=2) as checkpoints:
        checkpoints.save(2, state, NANO, META)


def restore(folder: Path, mesh: jax.sharding.Mesh) -> update.TrainState:
    with jax.set_mesh(mesh):
        target = update.abstract_state(NANO, update.make_optimizer(TRAINING), mesh)
        step, state, meta = checkpoint.restore_latest(folder, NANO, target, print)
    assert (step, meta) == (2, META)
    return state


def leaves(state: update.TrainState, mesh: jax.sharding.Mesh) -> dict[str, np.ndarray]:
    """Every array of the state, replicated to every host."""
    replicated = jax.tree.map(lambda _: sharding.named_sharding(mesh, ()), state)
    with jax.set_mesh(mesh):
        paths = jax.tree.leaves_with_path(jax.jit(lambda x: x, out_shardings=replicated)(state))
    return {jax.tree_util.keystr(path): np.asarray(x.addressable_data(0)) for path, x in paths}


def keep_trajectories(hosts: Hosts, folder: Path) -> None:
    """The first host gets those of all hosts; where one host cannot write its own, all end."""
    recorder = Recorder(folder, None, None, hosts, dict)
    compressed = Future()
    compressed.set_result(bytes([hosts.index]) * 5_000)
    recorder.keep(3, compressed, Timer())
    everyones = b"".join(bytes([host]) * 5_000 for host in range(PROCESSES))
    assert recorder.trajectories == ({step_path(folder, 3): everyones} if hosts.first else {})
    if not hosts.first:
        compressed = Future()
        compressed.set_exception(ValueError("problem 'q1' cannot be written as JSON"))
    with pytest.raises(RunEnded, match=r"^ValueError: problem 'q1' cannot be written as JSON$"):
        recorder.keep(4, compressed, Timer())
    hosts.reasons.clear()
    hosts.stopping.clear()


def main(folder: Path) -> None:
    hosts, mesh = Hosts(jax.process_index(), jax.process_count()), sharding.make_mesh(MESH)
    assert (hosts.index, hosts.count, len(jax.devices())) == (PROCESS, PROCESSES, 8)

    state, metrics, batch = train(hosts, mesh)
    np.savez(folder / f"learned_{PROCESS}.npz", **leaves(state, mesh), **{f"metric {k}": v for k, v in metrics.items()})
    assert len(batch.examples) == len(batch.summaries) == 40
    assert batch.stats.sampler == SamplerStats(generated_tokens=40)
    keep_trajectories(hosts, folder)
    save(folder / "by_two_processes", state)
    np.savez(folder / f"read_{PROCESS}.npz", **leaves(restore(folder / "by_one_process", mesh), mesh))
    other_mesh = sharding.make_mesh(OTHER_MESH)
    moved = restore(folder / "by_two_processes", other_mesh)
    np.savez(folder / f"moved_{PROCESS}.npz", **leaves(moved, other_mesh))
    # If a host has no batch, all hosts end with the reason that counts most, and none blocks.
    with hosts.guarded():
        raise Interrupted if hosts.index == 0 else ConnectionError("no answer")
    hosts.stop(EndReason.SIGNAL, "SIGTERM")
    with pytest.raises(RunEnded, match=r"^ConnectionError: no answer$") as end:
        exchange(hosts, None if hosts.index == 1 else make_batch(hosts.index, hosts.count))
    assert end.value.reason is EndReason.OUTAGE
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[4]))
