"""Writes the demonstrations that the packaged weights were trained on, as trajectory files for launch/sft.py.

python -m examples.warmstart.demonstrate --config tiny_warmstart --out demos
python launch/sft.py --config tiny_warmstart --sft.trajectories demos --sft.held_out demos/held_out --out DIR
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from examples.warmstart import documents, questions, search, streams
from examples.warmstart.record import open_run
from memsearcher_jax.launch import cli, outputs
from memsearcher_jax.logs.atomic_write import atomic_write
from memsearcher_jax.logs.trajectories import compress_trajectories, step_path
from memsearcher_jax.ranges import CountOrZero
from memsearcher_jax.rl.setup import prepare
from memsearcher_jax.types import ScoredTrajectory

STEPS = {
    "tiny_warmstart": 400,
    "tiny_baselines_warmstart": 100,
    "tiny_compact_warmstart": 24,
    "tiny_memagent_warmstart": 220,
    "tiny_memalpha_warmstart": 200,
}

SCRIPTS = {
    **dict.fromkeys(("memsearcher", "react", "compact", "search_r1", "rag", "direct"), search),
    "memagent": documents,
    "memalpha": streams,
}
"""By agent.workflow, of generated data."""
QUESTION_SCRIPTS = dict.fromkeys(("memsearcher", "react", "rag"), questions)


@dataclass(frozen=True)
class Demonstrate(cli.Command):
    """Write demonstrations for the agent of --config, one file for each training step, and held-out ones."""

    out: cli.Directory = None
    """Directory to write; it must be new."""
    steps: CountOrZero = 0
    """Training steps; 0: as many as the packaged weights took."""


def main(argv: Sequence[str]) -> None:
    with cli.one_line_errors():
        flags = cli.parse(Demonstrate, argv)
        workflow = flags.run.agent.workflow
        synthetic = flags.run.data.is_synthetic
        scripts = SCRIPTS if synthetic else QUESTION_SCRIPTS
        if workflow not in scripts:
            kind = "generated" if synthetic else "real"
            raise ValueError(f"on {kind} data agent.workflow {', '.join(scripts)} are demonstrated, not {workflow}")
        script = scripts[workflow]
        with outputs.new_output_dir(flags.out, "demonstrations") as out:
            if synthetic:
                run = open_run(flags.run)
            else:
                run = prepare(flags.run, out, training=False)
                questions.check_disjoint(run.problems.train, run.problems.test)
            steps = flags.steps or STEPS.get(flags.config, 30)
            write(out / "held_out", 0, script.held_out(run))
            for number in range(steps):
                write(out, number, script.step(run, number))
                print(f"{out}: demonstrated step {number + 1} of {steps}", file=sys.stderr)


def write(folder: Path, step: int, demonstrations: Iterable[ScoredTrajectory]) -> None:
    """Writes the file of a step; every demonstration is of a problem of its own."""
    numbered = []
    for number, demonstration in enumerate(demonstrations):
        trajectory = demonstration.trajectory
        problem = replace(trajectory.problem, id=f"{step}/{number}/{trajectory.problem.id}")
        numbered.append(replace(demonstration, trajectory=replace(trajectory, problem=problem)))
    atomic_write(step_path(folder, step), compress_trajectories(numbered))


if __name__ == "__main__":
    cli.run(main)
