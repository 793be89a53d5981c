"""Every workflow that answers questions trains and is evaluated by the same two commands."""

import pytest

from memsearcher_jax.agent.base import QuestionAgent
from memsearcher_jax.agent.registry import AGENTS
from memsearcher_jax.jsonl import parse_object
from memsearcher_jax.launch import evaluate, tpu_train
from memsearcher_jax.logs.trajectories import read_trajectories


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, agent in AGENTS.items() if issubclass(agent, QuestionAgent)])
def test_a_workflow_trains_and_is_evaluated(name, small, tmp_path):
    prompts = "brief" if name == "memsearcher" else f"brief_{name}"
    run, out = tmp_path / "run", tmp_path / "evaluation"
    flags = ["--agent.workflow", name, "--agent.prompts", prompts, "--reward.metric", "exact_match", "--rl.steps", "1"]
    tpu_train.main([*small, *flags, "--out", str(run)])
    (file,) = (run / "trajectories").iterdir()
    trained = list(read_trajectories(file))
    assert len(trained) == 8
    for scored in trained:
        assert not scored.trajectory.outcome.error
        assert scored.reward in (0.0, 0.1, 1.0)
        assert all(any(context.sampled) for context in scored.trajectory.contexts)
    evaluate.main(["--checkpoint", str(run), "--out", str(out), "--evaluation.max_questions", "2"])
    assert parse_object("results", (out / "results.json").read_bytes())["questions"] == 2
