"""One of two processes with four fake devices each: publishes weights, then serves work of its own.

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

from memsearcher_jax.agent.types import Find, Outcome, Passage, Problem, Prompt, Query, Say, Stop  # noqa: E402
from memsearcher_jax.model import qwen, sharding  # noqa: E402
from memsearcher_jax.model.config import MeshConfig  # noqa: E402
from memsearcher_jax.rl.rollout import RolloutDriver, jobs_for  # noqa: E402
from memsearcher_jax.sampling.buffer import PromptWidths  # noqa: E402
from memsearcher_jax.sampling.engine import Engine  # noqa: E402
from memsearcher_jax.testing import NANO, NANO_SAMPLING, TinyIndex, byte_tokenizer  # noqa: E402

SETTINGS = replace(NANO_SAMPLING, slots=4, tensor=2, context_tokens=96)


def workflow(problem):
    """As many turns as the problem says."""
    for turn in range(problem.metadata["turns"]):
        yield Say(Prompt("<|im_start|>user\n", problem.question, " ", f"memory {turn}", "\n"), 6)
        yield Find((Query("title", 1),))
    return Outcome(Stop.ANSWERED)


def main() -> None:
    tokenizer = byte_tokenizer()
    train = sharding.make_mesh(MeshConfig(data=1, fsdp=4, tensor=2))
    local = sharding.make_mesh(MeshConfig(data=-1, fsdp=1, tensor=2), jax.local_devices())
    init = jax.jit(lambda key: qwen.init(key, NANO), out_shardings=sharding.param_shardings(NANO, train))
    widths = PromptWidths(prefix=20, question=20, bridge=2, memory=20, suffix=4)
    engine = Engine(NANO, SETTINGS, widths, tokenizer.stop_ids, local)
    driver = RolloutDriver(engine, tokenizer, TinyIndex((Passage("0", '"Title"\nText.'),)), workflow)

    # The second host has twice the work, and only it compiles for longer trajectories.
    problems = [
        Problem(f"{process}-{n}", f"Who is {n}?", (), {"turns": 1 + 2 * process}) for n in range(2 + 3 * process)
    ]
    kept = []
    for step in range(2):
        params = sharding.publish(init(jax.random.key(step)), NANO, local, "float32")
        for job, trajectory in driver.run(jobs_for(problems, 2), params, jax.random.key(10 + step)):
            contexts = [[context.ids, context.logprobs] for context in trajectory.contexts]
            kept.append([step, process, job.number, trajectory.outcome.stop.value, contexts])
    (folder / f"{process}.json").write_text(json.dumps(sorted(kept)))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
