"""When speculative decoding pays: rollouts of a trained agent with drafts of several lengths and without drafts.

python benchmarks/speculation.py [--path DIR] [--slots 1 16] [--json FILE]

Questions over the synthetic corpus, MemSearcher's turns, temperature 1. Draft tokens are looked up in the context and
verified in one pass. Draws are keyed by position, so every draft length gives the same text and only the time differs.
Prints the mean tokens that a decoding step adds to a row (more than one where drafts are accepted), and the speed-up
over the first draft length. Random weights never repeat their context: benchmarks/rollout.py --speculative-tokens shows
the cost of rejected drafts.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import common
import jax
import tyro

from memsearcher_jax.model.qwen import Params
from memsearcher_jax.rl import init_state, setup
from memsearcher_jax.rl.rollout import RolloutDriver, make_jobs

STEPS = 8  # decoding steps per call, for every draft length


@dataclass(frozen=True)
class Flags(common.Flags):
    """Command-line options."""

    path: str = "package:tiny"
    """Weights: the packaged initial checkpoint, a run of `tiny`, or an export of one."""
    drafts: tuple[int, ...] = (0, 2, 4, 8)
    """Draft lengths; the first is the baseline."""
    slots: tuple[int, ...] = (1, 16)
    """Concurrent contexts."""
    questions: int = 16
    """Trajectories per measurement."""


def main(flags: Flags) -> None:
    config = common.preset("tiny")
    config = replace(config, model=replace(config.model, path=flags.path))
    with tempfile.TemporaryDirectory(prefix="speculation-") as folder:
        run = setup.prepare(config, Path(folder), training=False)
        with jax.set_mesh(run.meshes.train):
            params = setup.publish(run, init_state.initial_params(run))
        common.report((row for slots in flags.slots for row in measure(run, params, slots, flags)), flags.json)


def measure(run: setup.Run, params: Params, slots: int, flags: Flags) -> list[dict[str, float]]:
    """The results of each draft length."""
    drivers = {draft: make_driver(run, slots, draft) for draft in flags.drafts}
    jobs = make_jobs(run.problems.test[: flags.questions], 1)
    for driver in drivers.values():
        driver.executor.engine.warm_up(params)
    programs = {
        draft: partial(driver.rollout, jobs, params, jax.random.key(0), lambda message: None)
        for draft, driver in drivers.items()
    }
    runs = common.alternate(programs, flags.repeats)
    seconds = {draft: statistics.median(seconds for seconds, _ in repeats) for draft, repeats in runs.items()}
    results = {draft: repeats[-1][1] for draft, repeats in runs.items()}
    texts = {draft: [trajectory.transcript for trajectory in results[draft][0]] for draft in drivers}
    stats = {draft: results[draft][1].sampler for draft in drivers}
    baseline = flags.drafts[0]
    return [
        {
            "slots": slots,
            "draft tokens": draft,
            "tokens per step": stats[draft].generated_tokens / (stats[draft].active_slots * STEPS),
            "seconds": seconds[draft],
            "speed-up": seconds[baseline] / seconds[draft],
            "same text": sum(map(str.__eq__, texts[baseline], texts[draft])) / len(jobs),
        }
        for draft in drivers
    ]


def make_driver(run: setup.Run, slots: int, draft: int) -> RolloutDriver:
    """The driver of training with other slots and speculative tokens."""
    sampling = replace(
        run.config.sampling,
        slots=slots,
        decode_batch_sizes=(),
        speculative_tokens=draft,
        decode_steps_per_call=STEPS * (1 + draft),
    )
    return setup.make_driver(replace(run, config=replace(run.config, sampling=sampling)))


if __name__ == "__main__":
    main(tyro.cli(Flags))
