"""Train `nano` in Python, read one of its trajectories, and plot its metrics. Half a minute on a CPU.

    python examples/nano.py [FOLDER]

The `# %%` lines are cells for editors and Jupyter (`jupytext --to notebook examples/nano.py`).
"""

# %% The preset: a frozen RunConfig. `dataclasses.replace` changes settings, `check` refuses what does not fit.
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from memsearcher_jax.checks import check
from memsearcher_jax.launch.cli import load_preset
from memsearcher_jax.logs.metrics import MetricsWriter, read_metrics
from memsearcher_jax.logs.progress import Progress
from memsearcher_jax.logs.trajectories import read_trajectories, step_path
from memsearcher_jax.report.console import show_trajectory
from memsearcher_jax.report.plots import training_curves
from memsearcher_jax.rl import setup
from memsearcher_jax.rl.state import open_state
from memsearcher_jax.rl.training_run import open_collector, train_run
from memsearcher_jax.runs.run_dir import open_run_folder

out = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/example")
preset = load_preset("nano")
config = check(replace(preset, rl=replace(preset.rl, steps=3)))

# %% The parts of a run: tokenizer, meshes, prompts, index and problems. All checks happen here, before any training.
run = setup.prepare(config, out)
open_run_folder(out, config, run.tokenizer.folder)
problem = run.problems.train[0]
print(f"{len(run.problems.train)} training questions, for example: {problem.question} -> {problem.golden_answers[0]}")

# %% Multi-context GRPO: rollouts, rewards, advantages, update, publish. rl/loop.py is the algorithm on one screen.
with MetricsWriter(out) as writer, Progress("train", config.rl.steps) as progress:
    state, start = open_state(run)
    train_run(state, start, open_collector(state, start), out, writer, progress)

# %% A trajectory: each context is what the policy saw in one turn, with the token ids that were trained.
scored = next(read_trajectories(step_path(out, 0)))
show_trajectory(scored.trajectory, Console(), reward=scored.reward, reason=scored.reason)
for number, context in enumerate(scored.trajectory.contexts, start=1):
    print(f"context {number}: {len(context.ids)} tokens, {sum(context.sampled)} of them sampled and trained")

# %% Metrics and their curves.
for step in read_metrics(out / "metrics.jsonl"):
    print(f"step {step['step']}: reward {step['reward']:.3f}, tokens per turn {step['tokens_per_turn']:.0f}")
training_curves(out / "metrics.jsonl", out / "curves.png")
print(f"curves: {out / 'curves.png'}")
