"""Every workflow that answers questions trains, is imitated and is evaluated, with prompts of its own."""

import pytest

from memsearcher_jax.agent.base import QuestionAgent
from memsearcher_jax.agent.registry import AGENTS
from memsearcher_jax.launch import evaluate, sft, tpu_train
from memsearcher_jax.logs.metrics import read_metrics
from memsearcher_jax.logs.trajectories import read_trajectories
from memsearcher_jax.types import StopReason
from tests.support import with_flags

WORKFLOWS = [name for name, agent in AGENTS.items() if issubclass(agent, QuestionAgent)]
FAILED = {StopReason.FAULT, StopReason.CONTEXT_FULL, StopReason.SEARCH_FAILED, StopReason.NOT_FINITE}


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_trains_is_imitated_and_is_evaluated(name, small, tmp_path):
    prompts, data = "brief", ""
    if name == "memagent":
        prompts, data = "terse", "--data.synthetic documents --data.documents.train_passages 2"
        data += " --data.documents.test_passages 2"
    run, out = tmp_path / "run", tmp_path / "evaluation"
    flags = ["--agent.workflow", name, "--agent.prompts", prompts, "--reward.metric", "exact_match", "--rl.steps", "1"]
    flags += ["--model.vocab_size", "1536"]  # so that every sampled id is one of the tokenizer
    tpu_train.main([*with_flags(small, *flags), *data.split(), "--out", str(run)])
    evaluate.main(["--checkpoint", str(run), "--out", str(out)])
    flags += ["--sft.trajectories", str(run), "--sft.keep", "best", "--sft.held_out_share", "0", "--sft.epochs", "2"]
    sft.main([*with_flags(small, *flags), *data.split(), "--out", str(tmp_path / "sft")])
    first, last = read_metrics(tmp_path / "sft" / "metrics.jsonl")
    assert 1 <= first["trajectories"] <= 8 and last["loss"] < first["loss"]
    trained, evaluated = (
        list(read_trajectories(file)) for folder in (run, out) for file in (folder / "trajectories").iterdir()
    )
    assert (len(trained), len(evaluated)) == (8, 4)
    for scored in trained + evaluated:
        trajectory, outcome = scored.trajectory, scored.trajectory.outcome
        assert not outcome.error and outcome.stop not in FAILED
        assert scored.reward in (0.0, 0.1, 1.0)
        assert all(any(context.sampled) for context in trajectory.contexts)
        if name == "rag":
            (turn,) = outcome.turns
            assert [query.text for query in turn.queries] == [trajectory.problem.question]
            assert turn.observation and turn.observation in trajectory.transcript
        if name == "direct":
            assert not any(turn.queries for turn in outcome.turns)
            assert len(trajectory.contexts) == 1
