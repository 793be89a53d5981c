"""End-to-end training: rollouts, updates, checkpoints, metrics and resumption."""

import io
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memsearcher_jax.agent import prompts
from memsearcher_jax.agent.base import QuestionAgent, Scoring
from memsearcher_jax.checks import check
from memsearcher_jax.config import RunConfig, with_settings
from memsearcher_jax.data.config import DataConfig
from memsearcher_jax.data.synthetic.encyclopedia import make_encyclopedia
from memsearcher_jax.jsonl import flatten
from memsearcher_jax.launch import tpu_train
from memsearcher_jax.launch.cli import load_preset
from memsearcher_jax.logs.metrics import MetricsWriter, read_metrics
from memsearcher_jax.logs.progress import Progress
from memsearcher_jax.logs.trajectories import read_trajectories
from memsearcher_jax.model import qwen
from memsearcher_jax.rl import setup
from memsearcher_jax.rl.config import HealthConfig
from memsearcher_jax.rl.health import HealthMonitor, HealthState
from memsearcher_jax.rl.recovery import Recovery
from memsearcher_jax.rl.state import initial_params, initial_policy, open_state
from memsearcher_jax.rl.timing import Timer
from memsearcher_jax.rl.training_run import open_collector, train_run
from memsearcher_jax.runs import load_weights, run_dir
from memsearcher_jax.training import checkpoint
from memsearcher_jax.training.trainer import Trainer


def small(steps: int, **rl) -> RunConfig:
    """A smaller nano preset on eight devices."""
    rl |= {"steps": steps, "prompts_per_step": 4, "group_size": 3, "checkpoint_every": 2}
    sizes = {
        "model": {"vocab_size": 1_536, "embed_size": 32, "ffn_size": 64, "head_size": 8},
        "mesh": {"data": 2, "fsdp": 2, "tensor": 2},
        "agent": {
            "max_turns": 2,
            "completion_tokens": 8,
            "memory_tokens": 32,
            "observation_tokens": 64,
            "max_calls": 1,
        },
        "sampling": {"slots": 8, "tensor": 2, "context_tokens": 384, "decode_steps_per_call": 8},
        "training": {"seq_len": 384, "minibatch_rows": 4, "logit_chunk": 128},
        "evaluation": {"max_questions": 5},
    }
    return check(with_settings(load_preset("nano"), flatten(sizes | {"rl": rl})))


def run_for(config: RunConfig, out: Path, resume: bool = False):
    """Trains as launch/tpu_train.py does, without the command line."""
    run = setup.prepare(config, out)
    run_dir.open_run_folder(out, config, run.tokenizer.folder)
    state, start = open_state(run, config, out if resume else None)
    writer = MetricsWriter(out, resume_step=state.step if resume else None)
    with writer, Progress("train", config.rl.steps, done=state.step, stream=io.StringIO()) as progress:
        train_run(state, start, open_collector(state, start), out, writer, progress)
    return run


def reopened(config: RunConfig, out: Path):
    """The state and the progress with which the run in `out` would go on under this config."""
    return open_state(setup.prepare(config, out), config, out)


def newest_weights(run, out: Path):
    """The weights of the newest checkpoint, on the host."""
    return jax.device_get(load_weights.load_params(out, run.config.model, run.meshes.train, "float32"))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A run of three steps without interruption."""
    out = tmp_path_factory.mktemp("story") / "straight"
    return run_for(small(3, evaluate_every=2), out), out


def test_metrics_of_every_step_are_written(uninterrupted):
    _, out = uninterrupted
    steps = read_metrics(out / "metrics.jsonl")
    assert [step["step"] for step in steps] == [0, 1, 2]
    for step in steps:
        assert {"reward", "exact_match", "turns", "kl", "entropy", "time/rollout", "tokens_per_second"} <= set(step)
        assert sum(value for name, value in step.items() if name.startswith("stop/")) == pytest.approx(1)
        assert step["logprob_diff_max"] < 1e-4
    assert steps[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert steps[2]["kl"] > 0
    assert ["test/reward" in step for step in steps] == [False, True, False]


def test_trajectories_of_every_step_are_stored(uninterrupted):
    run, out = uninterrupted
    paths = sorted((out / "trajectories").iterdir())
    assert len(paths) == 3
    for path in paths:
        trajectories = list(read_trajectories(path))
        assert len(trajectories) == 12
        for scored in trajectories:
            (context, *_) = scored.trajectory.contexts
            prompt = run.agent.prompts.initial_prompt(scored.trajectory.problem.question)
            opening = sum(run.tokenizer.prompt(prompt), ())
            assert tuple(context.ids[: len(opening)].tolist()) == opening
        again = run.agent.rewards([one.trajectory for one in trajectories], Scoring(run.tokenizer))
        assert [one.reward for one in again] == [one.reward for one in trajectories]


def test_a_resumed_run_equals_an_uninterrupted_run(uninterrupted, tmp_path):
    """Problems, samples, weights and metrics are bit-identical."""
    run, out = uninterrupted
    resumed = shutil.copytree(out, tmp_path / "run")
    shutil.rmtree(resumed / "checkpoints" / "3")
    assert checkpoint.latest_step(resumed / "checkpoints") == 2
    run_for(small(3, evaluate_every=2), resumed, resume=True)
    assert checkpoint.latest_step(resumed / "checkpoints") == 3
    assert_same_run(resumed, out, run)


UNTIMED = ("time/", "tokens_per_second", "host_wait", "host_peak_gb")


def untimed_metrics(out: Path):
    return [
        {name: value for name, value in step.items() if not name.startswith(UNTIMED)}
        for step in read_metrics(out / "metrics.jsonl")
    ]


def assert_same_run(out: Path, other: Path, run):
    jax.tree.map(np.testing.assert_array_equal, newest_weights(run, out), newest_weights(run, other))
    assert untimed_metrics(out) == untimed_metrics(other)


def guarded(steps: int, **health) -> RunConfig:
    config = small(steps, evaluate_every=2, keep_checkpoints=1)
    health = {"on_collapse": "rollback", "patience": 2, "min_reward_fraction": 0.0} | health
    return check(replace(config, health=HealthConfig(**health)))


def test_a_healthy_run_is_the_same_with_rollbacks(uninterrupted, tmp_path):
    run, out = uninterrupted
    run_for(guarded(3), tmp_path / "run")
    jax.tree.map(np.testing.assert_array_equal, newest_weights(run, out), newest_weights(run, tmp_path / "run"))
    assert untimed_metrics(tmp_path / "run") == [step | {"rollbacks": 0} for step in untimed_metrics(out)]


def test_a_resumed_run_keeps_the_frozen_weights_that_it_started_from(uninterrupted, tmp_path):
    """The run in model.path may go on; its newest checkpoint is then another one."""
    source, out = shutil.copytree(uninterrupted[1], tmp_path / "source"), tmp_path / "run"
    config = with_settings(small(1), {"model.path": str(source)})
    run = run_for(config, out)
    initial = newest_weights(run, source)
    (source / "checkpoints" / "2").rename(source / "checkpoints" / "4")
    resumed, start = reopened(config, out)
    assert start.initial_step == 3 and checkpoint.latest_step(source / "checkpoints") == 4
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(resumed.trainer.reference.params), initial)
    shutil.rmtree(source / "checkpoints" / "3")
    with pytest.raises(FileNotFoundError, match=r"source/checkpoints no longer holds step 3, only 4.*: raise rl.keep"):
        reopened(config, out)


def test_changes_are_found_by_comparing_with_the_checkpoint(uninterrupted, tmp_path):
    """However often the run was resumed since: a reward of another measure is never compared with earlier ones."""
    run, out = uninterrupted
    out = shutil.copytree(out, tmp_path / "run")
    changed = with_settings(run.config, {"reward.wrong_answer": 0.5})
    assert reopened(run.config, out)[1].health.best_step == 2
    for _ in range(2):
        _, start = reopened(changed, out)
        assert start.changed == (("reward.wrong_answer", 0.1, 0.5),)
        assert start.health == HealthState()
        run_dir.open_run_folder(out, changed, run.tokenizer.folder)  # as a resumed run does


def test_a_rollback_restores_an_intact_checkpoint_if_the_best_one_is_damaged(uninterrupted, tmp_path):
    run, source = uninterrupted
    out = shutil.copytree(source, tmp_path / "run")
    state, start = reopened(run.config, out)
    start.health.best_step = 3
    for file in (out / "checkpoints" / "3" / "params").rglob("*"):
        if file.is_file() and file.stat().st_size > 1_000:
            file.write_bytes(file.read_bytes()[:-100])
    lines = []
    with checkpoint.Checkpoints(out / "checkpoints", keep=2) as checkpoints:
        outcomes = [OSError("full"), None, None]  # the write of a later step has failed
        failure = mock.patch.object(checkpoints._manager, "wait_until_finished", side_effect=outcomes)
        monitor = HealthMonitor(guarded(3).health, lines.append, start.health)
        with failure:
            Recovery(monitor, checkpoints).restore_best(state, Timer())
    assert len(lines) == 1 and "cannot write a checkpoint" in lines[0]
    shutil.rmtree(out / "checkpoints" / "3")
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.train.params), newest_weights(run, out))


def test_weights_that_become_infinite_roll_back(tmp_path, monkeypatch):
    """To the best evaluation, with new problems and a lower learning rate, and no checkpoint has them."""
    step, saved, rates = Trainer.step, [], []

    def overflows_once(trainer, state, examples, rng, notify, training_step):
        state, metrics = step(trainer, state, examples, rng, notify, training_step)
        rates.append(trainer.config.learning_rate)
        if training_step == 1:
            state = replace(state, params=jax.tree.map(lambda x: x * jnp.inf, state.params))
        return state, metrics

    def save(checkpoints, number, state, *rest):
        saved.append((number, bool(jnp.isfinite(state.params["embed"]).all())))
        return checkpoint_save(checkpoints, number, state, *rest)

    checkpoint_save = checkpoint.Checkpoints.save
    monkeypatch.setattr(Trainer, "step", overflows_once)
    monkeypatch.setattr(checkpoint.Checkpoints, "save", save)
    config = guarded(3)
    run_for(replace(config, rl=replace(config.rl, evaluate_every=1, checkpoint_every=1)), tmp_path / "run")
    steps = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["rollbacks"] for row in steps] == [0, 1, 1] and [row["alarms"] for row in steps] == [0, 1, 0]
    assert rates[2] == pytest.approx(0.3 * rates[0]) and rates[1] == rates[0]
    assert [number for number, _ in saved] == [0, 1, 2, 3] and all(is_finite for _, is_finite in saved)


@pytest.fixture(scope="module")
def base(uninterrupted, tmp_path_factory):
    """Weights in the Hugging Face layout."""
    run, source = uninterrupted
    folder = tmp_path_factory.mktemp("base") / "base"
    load_weights.export(replace(run.config.model, path=str(source)), folder, "float32", run.tokenizer.folder, ())
    return folder


@pytest.mark.slow
def test_a_run_trains_adapters_alone(base, tmp_path):
    """Resumed bit for bit; the base is the reference; evaluation and export read the merged weights."""
    adapters = {"model.lora_rank": 4, "model.lora_targets": ("q_proj", "v_proj", "down_proj")}
    config = check(with_settings(small(2), {"model.path": str(base), "rl.checkpoint_every": 1} | adapters))
    run = run_for(config, tmp_path / "straight")
    resumed = shutil.copytree(tmp_path / "straight", tmp_path / "resumed")
    shutil.rmtree(resumed / "checkpoints" / "2")
    assert checkpoint.latest_step(resumed / "checkpoints") == 1
    run_for(config, resumed, resume=True)
    merged = newest_weights(run, tmp_path / "straight")
    assert_same_run(resumed, tmp_path / "straight", run)

    frozen = jax.device_get(initial_params(run))
    changed = {name for name, x in merged["layers"].items() if (x != frozen["layers"][name]).any()}
    assert changed == {"wq", "wv", "down"}
    np.testing.assert_array_equal(merged["embed"], frozen["embed"])
    steps = read_metrics(tmp_path / "straight" / "metrics.jsonl")
    assert steps[0]["kl"] == pytest.approx(0, abs=1e-6) and steps[1]["kl"] > 0
    assert all(step["logprob_diff_max"] < 1e-4 for step in steps), "the sampler has the merged weights"

    apart, hf = tmp_path / "apart", tmp_path / "hf"
    apart.mkdir()
    assert load_weights.export_adapters(tmp_path / "straight", apart) == str(base)
    trained = replace(run.config.model, path=str(tmp_path / "straight"))
    load_weights.export(trained, hf, "float32", run.tokenizer.folder, ())
    for model in (
        replace(run.config.model, path=str(hf), lora_rank=0),
        replace(run.config.model, path=str(base), adapter=str(apart), lora_rank=0),
    ):
        loaded = jax.device_get(load_weights.load_params(model.path, model, run.meshes.train, "float32"))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), loaded, merged)
    continued = with_settings(run.config, {"model.adapter": str(apart)})
    policy = jax.device_get(initial_policy(replace(run, config=continued)))
    published = qwen.publish(merged, run.config.model, "cpu", "float32")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), policy, published)
    with pytest.raises(ValueError, match=r"model.lora_rank is 8, and 4 in model.adapter"):
        load_weights.check_weights(base, replace(continued.model, lora_rank=8))


def test_a_run_is_self_contained_and_survives_an_outage(base, tmp_path, monkeypatch, capsys):
    """The weights, questions, passages and templates that it began with may change or vanish."""
    given, out = tmp_path / "given", tmp_path / "run"
    shutil.copytree(base, given / "weights")
    shutil.copytree(Path(prompts.__file__).parent / "templates" / "brief" / "memsearcher", given / "templates")
    encyclopedia = make_encyclopedia(load_preset("nano").data.encyclopedia)
    for name, rows in (("corpus", encyclopedia.passages), ("questions", encyclopedia.train)):
        (given / f"{name}.jsonl").write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    files = {
        "model.path": str(given / "weights"),
        "agent.prompts": str(given / "templates"),
        "retrieval.corpus": str(given / "corpus.jsonl"),
    }
    config = with_settings(replace(small(3), data=DataConfig(train=(str(given / "questions.jsonl"),))), files)
    config = with_settings(config, {"training.kl_coefficient": 0.0})
    rewards, calls = QuestionAgent.rewards, iter(range(99))

    def fail_once(*args):
        if next(calls) == 1:
            raise ConnectionError("no answers came")
        return rewards(*args)

    monkeypatch.setattr(QuestionAgent, "rewards", fail_once)
    with pytest.raises(SystemExit) as end:
        tpu_train.train(tpu_train.Train(out=out, run=check(config)), None, Progress)
    assert end.value.code == 85
    assert "stopped after step 1 (ConnectionError: no answers came); checkpoint saved" in capsys.readouterr().err
    template = (given / "templates" / "system.txt").read_text()
    for resumed in range(2):
        shutil.rmtree(given)
        if not resumed:
            (given / "templates").mkdir(parents=True)
            (given / "templates" / "system.txt").write_text("edited")
        tpu_train.main(["--resume", "--out", str(out), "--rl.steps", str(2 + resumed)])
        notes = capsys.readouterr().err
        assert "templates/system.txt has changed since the run began, which goes on with its own copy" in notes
        given.mkdir(exist_ok=True)
    for path in sorted((out / "trajectories").iterdir()):
        for scored in read_trajectories(path):
            assert scored.trajectory.transcript.startswith(f"<|im_start|>system\n{template[:20]}")
