"""Trains a policy to imitate recorded trajectories: its own best ones, a teacher's, or demonstrations.

python launch/sft.py --config tiny --sft.trajectories runs/NAME --sft.keep best --sft.min_reward 0.5
python launch/sft.py --resume --out runs/NAME                             # continue after a stop
"""

from __future__ import annotations

if __name__ == "__main__":
    import memsearcher_jax.launch.__main__  # noqa: F401  (runs `main` below)

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from memsearcher_jax.checks import check_supervised
from memsearcher_jax.config import agent_of, differences, to_dict
from memsearcher_jax.hosts import preemption
from memsearcher_jax.launch import cli, job_output
from memsearcher_jax.logs import trackers
from memsearcher_jax.logs.metrics import MetricsWriter
from memsearcher_jax.logs.progress import Progress, announced
from memsearcher_jax.logs.run_facts import has_ended
from memsearcher_jax.runs import hub, load_weights
from memsearcher_jax.runs.inputs import keep_inputs, with_own_inputs
from memsearcher_jax.runs.run_dir import open_run_folder, read_run_config


@dataclass(frozen=True)
class SFT(cli.Command, cli.ResumableSource):
    """Train a policy to imitate recorded trajectories."""

    def check(self) -> None:
        check_supervised(self.run)  # first: the rules of reinforcement learning would name settings of a teacher
        super().check()


def main(argv: Sequence[str], progress_type: type[Progress] = Progress) -> None:
    """`progress_type` shows the progress, and may observe it."""
    with contextlib.ExitStack() as job:
        with cli.one_line_errors(), contextlib.ExitStack() as startup, announced("loading weights and trajectories"):
            flags = cli.parse(SFT, argv)
            config = flags.run
            if not config.sft.trajectories:
                raise ValueError("--sft.trajectories is missing: give trajectory files, a folder of them, or a run")
            if config.training.needs_kinds:
                raise ValueError(
                    "training.train_on and training.memory_weight are of reinforcement learning: supervised learning "
                    "trains all sampled tokens alike; leave them out"
                )
            if config.published_model and not config.model.path:
                raise ValueError("--model.path is missing: the preset of a published model needs its weights")
            trackers.check_installed(config.rl.trackers)
            hosts = job.enter_context(preemption.joined())
            if hosts.count > 1:
                raise ValueError(f"supervised learning runs on one host, and these are {hosts.count}: start it on one")
            out = job_output.open_output(flags, "sft", hosts, startup, job)

            # JAX takes seconds to import; --help and errors do not need it.
            import jax

            from memsearcher_jax.data.problems import ProblemSplits
            from memsearcher_jax.hosts.meshes import Meshes
            from memsearcher_jax.model import sharding
            from memsearcher_jax.rl import setup
            from memsearcher_jax.sft import recorded, train
            from memsearcher_jax.training import update

            local = hub.local(with_own_inputs(out, config) if flags.resume else config)
            if local.model.path:
                load_weights.check_weights(local.model.path, local.model)
            tokenizer = setup.open_tokenizer(local.model)
            data = recorded.load(local.sft, local.seed, tokenizer, local.model.vocab_size, local.training.seq_len)
            update.check_param_dtype(local.model)
            mesh = sharding.make_mesh(local.mesh, jax.devices())
            update.fit_to_mesh(local.training, mesh)
            run = setup.Run(local, agent_of(local), Meshes(mesh, mesh), tokenizer, None, ProblemSplits((), ()))
            state, meta = train.open_state(run, data, out if flags.resume else None)
            done = state.step
            if done >= data.steps and has_ended(out):
                line = f"step {done} of {data.steps} is already done; raise --sft.epochs to continue"
                job_output.show_result(flags, out, out, line)
                return
            changes = differences(read_run_config(out), config) if flags.resume else []
            _, notes = keep_inputs(out, config, meta["initial_step"], weights=not done or bool(local.model.lora_rank))
            for line in [f"{name} changed: {then!r} -> {now!r}" for name, then, now in changes] + notes:
                print(f"{out}: {line}", file=sys.stderr)
            open_run_folder(out, config, tokenizer.folder)
            resume_step = done if flags.resume else None
            writer = MetricsWriter(out, resume_step=resume_step, trackers=config.rl.trackers, settings=to_dict(config))
            print(f"{out}: {len(data.train):,} trajectories, step {done} of {data.steps}", file=sys.stderr)
            for reason, count in data.left_out.items():
                print(f"{out}: left out {count:,} {reason}", file=sys.stderr)
        with job_output.way_on(out), writer, progress_type("sft", data.steps, done=done) as progress:
            hosts.training.set()
            train.train(state, data, meta, out, writer, progress, hosts)
        job_output.finish(flags, out, out, data.steps)
