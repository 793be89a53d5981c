"""One of two processes with four fake devices each: publishes weights, then runs the rollouts of its own problems.

python two_hosts.py PORT PROCESS FOLDER
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

port, process, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)

from memsearcher_jax.model import qwen, sharding  # noqa: E402
from memsearcher_jax.model.config import MeshConfig  # noqa: E402
from memsearcher_jax.rl.rollout import RolloutDriver, make_jobs  # noqa: E402
from memsearcher_jax.sampling.engine import Engine  # noqa: E402
from memsearcher_jax.types import Generate, Outcome, Passage, Problem, Query, Search, StopReason  # noqa: E402

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tests.support import NANO, NANO_SAMPLING, TinyIndex, byte_tokenizer, make_prompt  # noqa: E402

SETTINGS = replace(NANO_SAMPLING, slots=4, tensor=2, context_tokens=96)


def workflow(problem):
    """`problem.metadata["turns"]` turns, each a generation and a search."""
    for turn in range(problem.metadata["turns"]):
        yield Generate(make_prompt("<|im_start|>user\n", problem.question, " ", f"memory {turn}", "\n"), 6)
        yield Search((Query("title", 1),))
    return Outcome(StopReason.ANSWERED)


def main() -> None:
    tokenizer = byte_tokenizer()
    train = sharding.make_mesh(MeshConfig(data=1, fsdp=4, tensor=2))
    local = sharding.make_mesh(MeshConfig(data=-1, fsdp=1, tensor=2), jax.local_devices())
    init = jax.jit(lambda key: qwen.init(key, NANO), out_shardings=sharding.param_shardings(NANO, train))
    engine = Engine(NANO, SETTINGS, tokenizer.stop_ids, local)
    searcher = TinyIndex((Passage("0", '"Title"\nText.'),))
    driver = RolloutDriver(engine, tokenizer, workflow, searcher)

    # The second host has more problems, and only this host has long trajectories.
    problems = [
        Problem(f"{process}-{n}", f"Who is {n}?", (), {"turns": 1 + 2 * process}) for n in range(2 + 3 * process)
    ]
    recorded = []
    for step in range(2):
        params = sharding.publish(init(jax.random.key(step)), NANO, local, "float32")
        key = jax.random.key(10 + step)
        trajectories, _ = driver.trajectories(make_jobs(problems, 2), params, key, lambda line: None)
        for number, trajectory in enumerate(trajectories):
            contexts = [[context.ids, context.logprobs] for context in trajectory.contexts]
            recorded.append([step, process, number, trajectory.outcome.stop.value, contexts])
    (folder / f"{process}.json").write_text(json.dumps(sorted(recorded)))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
