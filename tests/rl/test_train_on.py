"""training.train_on: which sampled tokens are trained, from the generation that a workflow names to the example."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from memsearcher_jax.agent.registry import AGENTS
from memsearcher_jax.checks import check
from memsearcher_jax.launch import cli
from memsearcher_jax.logs.trajectories import compress_trajectories, decode_trajectory, encode_trajectory
from memsearcher_jax.rl.advantages import multi_context_advantages
from memsearcher_jax.rl.batch import RolloutBatch, from_bytes, make_rollout_batch, to_bytes
from memsearcher_jax.rl.config import RLConfig
from memsearcher_jax.rl.metrics import RolloutStats
from memsearcher_jax.rl.rollout import RolloutDriver, make_jobs
from memsearcher_jax.types import Context, Generate, Outcome, Problem, ScoredTrajectory, StopReason, TextSpan
from tests import samples
from tests.support import byte_tokenizer, make_prompt

TOKENIZER = byte_tokenizer()
MARKED = Context(
    (5, 6, 7, 8, 9), (0.0, -1.0, -2.0, 0.0, -3.0), (False, True, True, False, True), 0, (False,) * 4 + (True,)
)


def alternating(problem):
    """Two contexts: an action, a memory, and an action that goes on in the same turn; then a memory alone."""
    yield Generate(make_prompt("<|im_start|>", problem.question, " ", "", "<|im_end|>"), 4)
    yield Generate((TextSpan(" notes:", True),), 5, kind="memory")
    yield Generate((TextSpan(" and", True),), 3, same_turn=True)
    yield Generate(make_prompt("<|im_start|>", "again", " ", "", "<|im_end|>"), 6, kind="memory")
    return Outcome(StopReason.ANSWERED)


@pytest.mark.parametrize("records_memory", [False, True])
def test_contexts_say_which_of_their_tokens_are_those_of_memories(engine, params, records_memory):
    driver = RolloutDriver(engine, TOKENIZER, alternating, records_memory=records_memory)
    jobs = make_jobs([Problem(f"q{number}", f"Who is {number}?", ()) for number in range(120)], 1)
    trajectories, _ = driver.trajectories(jobs, params, jax.random.key(3), lambda line: None)
    dropped = 0  # end tokens of memories that the same turn continues
    for trajectory in trajectories:
        assert trajectory.outcome.stop is StopReason.ANSWERED, trajectory.outcome.error
        first, second = trajectory.contexts
        if not records_memory:
            assert len(first.memory) == len(second.memory) == 0
            continue
        np.testing.assert_array_equal(second.memory, second.sampled)
        ids = np.array(first.ids)
        notes, rest = (list(TOKENIZER.encode_trusted(text)) for text in (" notes:", " and"))
        begins = [start for start in range(len(ids)) if ids[start : start + len(notes)].tolist() == notes]
        ends = [start for start in range(len(ids)) if ids[start : start + len(rest)].tolist() == rest]
        expected = np.zeros(len(ids), bool)
        expected[begins[0] + len(notes) : ends[-1]] = True
        np.testing.assert_array_equal(first.memory, expected)
        dropped += sum(expected) < 5
        assert not any(np.array(first.memory) & ~np.array(first.sampled))
    assert dropped or not records_memory


def trajectory(*contexts):
    return samples.scored(contexts=contexts).trajectory


def test_the_mask_selects_tokens_and_contexts():
    """A context whose tokens are all of the other kind is no example; the reward's group is the same."""
    memory_alone = replace(MARKED, memory=MARKED.sampled)
    scored = [ScoredTrajectory(trajectory(MARKED, memory_alone), 1.0), ScoredTrajectory(trajectory(MARKED), 0.0)]
    masks = {}
    for train_on in ("all", "actions", "memories"):
        examples = multi_context_advantages(scored, [0, 0], RLConfig(), train_on)
        masks[train_on] = [example.sampled.astype(int).tolist() for example in examples]
        assert {round(abs(example.advantage), 3) for example in examples} == {0.707}
    assert masks["all"] == [[0, 1, 1, 0, 1]] * 3
    assert masks["actions"] == [[0, 1, 1, 0, 0]] * 2
    assert masks["memories"] == [[0, 0, 0, 0, 1], [0, 1, 1, 0, 1], [0, 0, 0, 0, 1]]
    with pytest.raises(ValueError, match=r"training\.train_on actions needs contexts whose memories are marked"):
        multi_context_advantages(
            [ScoredTrajectory(trajectory(samples.context(3)), 1.0)] * 2, [0, 0], RLConfig(), "actions"
        )


def test_the_marks_are_in_files_and_in_the_exchange_of_hosts_where_there_are_some():
    scored = [ScoredTrajectory(trajectory(MARKED), 1.0), ScoredTrajectory(trajectory(MARKED), 0.0)]
    assert decode_trajectory("x", encode_trajectory(scored[0])) == scored[0]
    batch = make_rollout_batch(scored, RolloutStats(), RLConfig(group_size=2), "memories")
    for example, other in zip(batch.examples, from_bytes(to_bytes(batch)).examples, strict=True):
        np.testing.assert_array_equal(example.memory, other.memory)
        np.testing.assert_array_equal(example.sampled, other.sampled)
    plain = ScoredTrajectory(trajectory(replace(MARKED, memory=())), 1.0)
    assert b'"memory": [' not in encode_trajectory(plain) and b'"memory": [0' in encode_trajectory(scored[0])
    examples = multi_context_advantages([plain, replace(plain, reward=0.0)], [0, 0], RLConfig())
    again = from_bytes(to_bytes(RolloutBatch(examples, [])))
    assert [example.memory for example in again.examples] == [None, None]
    with pytest.raises(ValueError, match="a context's ids and memory differ in length"):
        cut = ScoredTrajectory(trajectory(replace(MARKED, memory=(True,))), 1.0)
        decode_trajectory("x", encode_trajectory(cut))
    assert compress_trajectories([plain]) == compress_trajectories([plain])


KINDS = {
    **dict.fromkeys(("memsearcher", "compact", "memagent"), frozenset(("action", "memory"))),
    **dict.fromkeys(("mem1", "memalpha"), frozenset(("memory",))),
}


@pytest.mark.parametrize("workflow", AGENTS)
def test_what_an_agent_does_not_generate_cannot_be_trained(workflow):
    presets = {"memalpha": "tiny_memalpha", "memagent": "tiny_memagent", "memsearcher": "tiny"}
    config = cli.load_preset(presets.get(workflow, f"tiny_{workflow}"))
    assert config.agent.workflow == workflow
    kinds = KINDS.get(workflow, {"action"})
    assert AGENTS[workflow].kinds == kinds

    def refused(**changes):
        try:
            check(replace(config, training=replace(config.training, **changes)))
        except ValueError as error:
            return str(error)
        return ""

    assert not refused() and not refused(train_on="all")
    assert bool(refused(train_on="memories")) == ("memory" not in kinds)
    assert bool(refused(train_on="actions")) == ("action" not in kinds)
    assert bool(refused(memory_weight=0.5)) == (len(kinds) < 2)
    if "memory" not in kinds:
        assert (
            refused(train_on="memories")
            == f"agent.workflow {workflow} writes no memories: set training.train_on to all"
        )
    if len(kinds) == 2:
        assert "memory_weight 0.5 weighs memories against actions" in refused(memory_weight=0.5, train_on="actions")
