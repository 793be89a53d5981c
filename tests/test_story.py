"""The story of DESIGN, section 1, from end to end: a question goes in, other weights come out."""

import io
import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from cli import load_preset

from memsearcher_jax.config import RunConfig, check
from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.report.metrics import MetricsWriter, read_metrics
from memsearcher_jax.report.progress import Progress
from memsearcher_jax.report.trajectories import Scored, read_trajectories
from memsearcher_jax.rl import build, run_folder, score, source, start
from memsearcher_jax.rl.loop import train
from memsearcher_jax.training import checkpoint


def small(steps: int, **rl) -> RunConfig:
    """The nano preset with less of everything, over eight devices."""
    nano = load_preset("nano")
    return check(
        replace(
            nano,
            model=replace(nano.model, vocab_size=1_536, embed_size=32, ffn_size=64, head_size=8),
            mesh=MeshConfig(data=2, fsdp=2, tensor=2),
            agent=replace(
                nano.agent, max_turns=2, reply_tokens=8, memory_tokens=32, observation_tokens=64, max_calls=1
            ),
            sampling=replace(nano.sampling, slots=8, tensor=2, context_tokens=384, decode_tokens=8),
            training=replace(nano.training, row_tokens=384, rows_per_update=4, logit_chunk=128),
            rl=replace(nano.rl, steps=steps, problems=4, rollouts=3, checkpoint_every=2, **rl),
            evaluation=replace(nano.evaluation, questions=5),
        )
    )


def run_for(config: RunConfig, out: Path, resume: bool = False):
    """What launch/tpu_train.py does, without the command line."""
    run = build.prepare(config, out)
    run_folder.open_run_folder(out, config, run.tokenizer.folder)
    begin = start.resumed(run, out) if resume else start.fresh(run)
    writer = MetricsWriter(out, resume_step=begin.step if resume else None)
    with writer, Progress("train", config.rl.steps, done=begin.step, stream=io.StringIO()) as progress:
        train(run, begin, out, writer, progress)
    return run


def weights_of(run, out: Path):
    """The newest checkpoint's weights, on one device."""
    return jax.device_get(source.load_params(out, run.config.model, run.meshes.train, "float32"))


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Three steps without a break."""
    out = tmp_path_factory.mktemp("story") / "straight"
    return run_for(small(3, evaluate_every=2), out), out


def test_a_question_goes_in_and_other_weights_come_out(straight):
    run, out = straight
    before = jax.device_get(start.starting_params(run))
    after = weights_of(run, out)
    moved = [float(np.abs(a - b).max()) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)]
    assert all(np.isfinite(moved))
    assert max(moved) > 1e-4
    assert checkpoint.latest_step(out / "checkpoints") == 3


def test_the_numbers_of_every_step_are_written(straight):
    _, out = straight
    steps = read_metrics(out / "metrics.jsonl")
    assert [step["step"] for step in steps] == [0, 1, 2]
    for step in steps:
        assert {"reward", "exact_match", "turns", "kl", "entropy", "seconds/rollout", "tokens_per_second"} <= set(step)
        assert sum(value for name, value in step.items() if name.startswith("stop/")) == pytest.approx(1)
        assert step["logprob_difference_max"] < 1e-4
    assert steps[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert steps[2]["kl"] > 0
    assert ["test/reward" in step for step in steps] == [False, True, False]


def test_the_trajectories_of_every_step_are_kept(straight):
    run, out = straight
    for path in sorted((out / "trajectories").iterdir()):
        kept = list(read_trajectories(path))
        assert len(kept) == 12
        for one in kept:
            (context, *_) = one.trajectory.contexts
            opening = run.tokenizer.prompt(run.prompts.opening(one.trajectory.problem.question))
            assert context.ids[: len(opening)] == sum(opening.parts, ())
            assert one.reward == score.scored(one.trajectory).reward


def test_a_resumed_run_ends_where_an_unbroken_one_does(straight, tmp_path):
    """Bit for bit: the same problems, the same draws, the same weights, the same numbers."""
    run, out = straight
    run_for(small(2, evaluate_every=2), tmp_path / "run")
    run_for(small(3, evaluate_every=2), tmp_path / "run", resume=True)
    jax.tree.map(np.testing.assert_array_equal, weights_of(run, out), weights_of(run, tmp_path / "run"))
    for ours, theirs in zip(
        read_metrics(out / "metrics.jsonl"), read_metrics(tmp_path / "run" / "metrics.jsonl"), strict=True
    ):
        timed = ("seconds/", "tokens_per_second")
        assert {k: v for k, v in ours.items() if not k.startswith(timed)} == {
            k: v for k, v in theirs.items() if not k.startswith(timed)
        }


def test_a_run_folder_is_complete_in_itself(straight):
    run, out = straight
    assert run_folder.read_run_config(out) == run.config
    assert json.loads((out / "tokenizer" / "tokenizer.json").read_text())["model"]["type"] == "BPE"


@pytest.mark.slow
def test_the_loop_learns_what_is_rewarded(tmp_path, monkeypatch):
    """Rewarded for common tokens, the policy says them: the whole path carries the signal, and with the right sign."""

    def rewarded(trajectory):
        said = [id for one in trajectory.contexts for id, own in zip(one.ids, one.sampled, strict=True) if own]
        return Scored(trajectory, float(np.mean([id < 300 for id in said])), "", {"exact_match": 0.0})

    monkeypatch.setattr(score, "scored", rewarded)
    config = small(12, save_trajectories=False)
    config = replace(
        config,
        mesh=MeshConfig(data=1, fsdp=8, tensor=1),
        agent=replace(config.agent, reply_tokens=4),
        sampling=replace(config.sampling, slots=32, tensor=1),
        training=replace(config.training, rows_per_update=8, learning_rate=3e-2, entropy_coefficient=0.0),
        rl=replace(config.rl, problems=8, rollouts=8, checkpoint_every=12),
    )
    run_for(config, tmp_path / "run")
    rewards = [step["reward"] for step in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert np.mean(rewards[:2]) < 0.35
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.3, rewards
