"""What every host of `test_many_hosts.py` does: learns from fixed samples, saves, and reads what others have saved.

python many_hosts.py PORT PROCESS PROCESSES FOLDER      eight devices in all
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

PORT, PROCESS, PROCESSES = (int(word) for word in sys.argv[1:4]) if __name__ == "__main__" else (0, 0, 1)
if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={8 // PROCESSES}"
    )
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import numpy as np  # noqa: E402

if __name__ == "__main__":
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{PORT}", PROCESSES, PROCESS)

from memsearcher_jax.agent.types import Stop  # noqa: E402
from memsearcher_jax.config import RunConfig  # noqa: E402
from memsearcher_jax.model import qwen, sharding  # noqa: E402
from memsearcher_jax.model.config import MeshConfig  # noqa: E402
from memsearcher_jax.report.page_facts import Facts  # noqa: E402
from memsearcher_jax.rl.hosts import Hosts, these  # noqa: E402
from memsearcher_jax.rl.part import Part, gather  # noqa: E402
from memsearcher_jax.rl.trainer import make_trainer  # noqa: E402
from memsearcher_jax.sampling.ledger import Counters  # noqa: E402
from memsearcher_jax.testing import NANO  # noqa: E402
from memsearcher_jax.training import checkpoint, update  # noqa: E402
from memsearcher_jax.training.config import TrainingConfig  # noqa: E402
from memsearcher_jax.training.rows import Sample  # noqa: E402

TRAINING = TrainingConfig(
    row_tokens=32, rows_per_update=8, logit_chunk=16, learning_rate=1e-3, kl_coefficient=0.1, old_logprobs="trainer"
)
CONFIG = replace(RunConfig(), model=NANO, training=TRAINING)
MESH = MeshConfig(data=2, fsdp=2, tensor=2)
META = {"position": 12}


def part_of(host: int, hosts: int) -> Part:
    """What this host has sampled. The last of several has a tenth of the work, and its contexts are short."""
    samples = []
    for number in range(40):
        rng = np.random.default_rng(number)
        length = 3 + number // 2
        samples.append(
            Sample(
                rng.integers(0, NANO.vocab_size, length).astype(np.int32),
                -rng.random(length).astype(np.float32) - 5,
                np.arange(length) > 1,
                float(rng.normal()),
            )
        )
    samples.reverse()
    cut = [0, *(36 for _ in range(hosts - 1)), 40]
    own = samples[cut[host] : cut[host + 1]]
    facts = [Facts("nq", None, 1, 0, Stop.ANSWERED, one.advantage, {"f1": 0.1}, (len(one.ids),)) for one in own]
    return Part(own, facts, Counters(generated_tokens=len(own)), float(len(own)), packed=bytes([host]) * 5_000)


def learn(hosts: Hosts, mesh: jax.sharding.Mesh) -> tuple[update.TrainState, dict, Part]:
    """Two steps from the same start."""
    optimizer = update.make_optimizer(TRAINING)
    whole = gather(hosts, part_of(hosts.index, hosts.count))
    with jax.set_mesh(mesh):
        init = jax.jit(lambda key: qwen.init(key, NANO), out_shardings=sharding.param_shardings(NANO, mesh))
        params = init(jax.random.key(0))
        trainer = make_trainer(CONFIG, mesh, params)
        state = update.init_state(params, NANO, optimizer, mesh)
        for step in range(2):
            state, numbers = trainer.learn(state, whole.samples, np.random.default_rng(step), lambda text: None)
    return state, numbers, whole


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
    """Every array of the state, whole, on every host."""
    everywhere = jax.tree.map(lambda _: sharding.named_sharding(mesh, ()), state)
    with jax.set_mesh(mesh):
        paths = jax.tree.leaves_with_path(jax.jit(lambda x: x, out_shardings=everywhere)(state))
    return {jax.tree_util.keystr(path): np.asarray(x.addressable_data(0)) for path, x in paths}


def main(folder: Path) -> None:
    hosts, mesh = these(), sharding.make_mesh(MESH)
    assert (hosts.index, hosts.count, len(jax.devices())) == (PROCESS, PROCESSES, 8)

    state, numbers, whole = learn(hosts, mesh)
    np.savez(folder / f"learned_{PROCESS}.npz", **leaves(state, mesh), **{f"number {k}": v for k, v in numbers.items()})
    assert len(whole.samples) == len(whole.facts) == 40
    assert whole.counters == Counters(generated_tokens=40)
    assert whole.packed == b"".join(bytes([host]) * 5_000 for host in range(PROCESSES))
    save(folder / "by_two", state)
    np.savez(folder / f"read_{PROCESS}.npz", **leaves(restore(folder / "by_one", mesh), mesh))
    # One that has nothing to tell makes all of them stop, and nobody waits.
    assert gather(hosts, None if hosts.index == 1 else part_of(hosts.index, hosts.count)) is None
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[4]))
