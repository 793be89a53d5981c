"""When guessing ahead pays: rollouts of a trained agent with drafts of several lengths, side by side with none.

python benchmarks/speculation.py [--path DIR] [--slots 1 16] [--json FILE]

Questions of the small world, MemSearcher's turns, temperature 1, a draft of so many tokens looked up in the context and
verified in one pass. Draws are keyed by position, so that every draft gives the same text and only time differs. Prints
what a row of a decoding step adds in the mean (more than one token where guesses are right), and the time against no
draft. Random weights never say what was guessed: benchmarks/rollout.py --draft-tokens shows what guessing costs then.
"""

from __future__ import annotations

import json
import runpy
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import tyro

from memsearcher_jax.rl import build, start
from memsearcher_jax.rl.rollout import RolloutDriver, jobs_for

TINY = Path(__file__).resolve().parents[1] / "configs" / "tiny.py"
STEPS = 8  # of a tick, whatever the draft


@dataclass(frozen=True)
class Flags:
    """What to measure."""

    path: str = "package:tiny"
    """Weights: the packaged start, a run of `tiny`, or an export of one."""
    drafts: tuple[int, ...] = (0, 2, 4, 8)
    """Tokens guessed ahead; the first is what the others are compared with."""
    slots: tuple[int, ...] = (1, 16)
    """Contexts side by side."""
    questions: int = 16
    """Trajectories of one run."""
    repeats: int = 3
    """Runs of each, taking turns; the median counts."""
    json: Path | None = None
    """Also write the numbers to this file."""


def main(flags: Flags) -> None:
    config = runpy.run_path(str(TINY))["tiny"]()
    config = replace(config, model=replace(config.model, path=flags.path))
    with tempfile.TemporaryDirectory(prefix="speculation-") as folder:
        run = build.prepare(config, Path(folder), training=False)
        with jax.set_mesh(run.meshes.train):
            params = build.sampler_params(run, start.starting_params(run))
        rows = [row for slots in flags.slots for row in measured(run, params, slots, flags)]
    for row in rows:
        print("  ".join(f"{key} {value:,.4g}" for key, value in row.items()))
    if flags.json:
        flags.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


def measured(run: build.Run, params, slots: int, flags: Flags) -> list[dict[str, float]]:
    """A row of the table for each draft."""
    drivers = {draft: driver(run, slots, draft) for draft in flags.drafts}
    jobs = jobs_for(run.problems.test[: flags.questions], 1)
    texts: dict[int, list[str]] = {}
    seconds: dict[int, list[float]] = {draft: [] for draft in drivers}
    for one in drivers.values():
        one.engine.warm_up(params)
    for _ in range(flags.repeats):
        for draft, one in drivers.items():
            began = time.perf_counter()
            done = {job.number: trajectory.transcript for job, trajectory in one.run(jobs, params, jax.random.key(0))}
            seconds[draft].append(time.perf_counter() - began)
            texts[draft] = [done[number] for number in sorted(done)]
    first, rows = flags.drafts[0], []
    for draft, one in drivers.items():
        counters = one.engine.counters
        rows.append(
            {
                "slots": slots,
                "draft": draft,
                "tokens a step": counters.generated_tokens / (counters.speaking_slots * STEPS),
                "seconds": statistics.median(seconds[draft]),
                "times as fast": statistics.median(seconds[first]) / statistics.median(seconds[draft]),
                "same text": sum(map(str.__eq__, texts[first], texts[draft])) / len(jobs),
            }
        )
    return rows


def driver(run: build.Run, slots: int, draft: int) -> RolloutDriver:
    """Training's driver with that many slots and tokens guessed ahead."""
    sampling = replace(
        run.config.sampling, slots=slots, decode_rows=(), draft_tokens=draft, decode_tokens=STEPS * (1 + draft)
    )
    return build.make_driver(replace(run, config=replace(run.config, sampling=sampling)))


if __name__ == "__main__":
    main(tyro.cli(Flags))
