"""benchmarks/compaction.py without its runs: what it trains, and what it says of the trajectories of a test."""

import sys
from pathlib import Path

import pytest

from memsearcher_jax.config import differences
from memsearcher_jax.launch import cli
from memsearcher_jax.launch.tpu_train import Train
from memsearcher_jax.types import StopReason
from tests import samples

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import compaction


def test_the_limits_differ_in_the_limit_and_in_what_keeps_updates_equal():
    runs = {name: cli.parse(Train, compaction.settings(name)).run for name in compaction.VARIANTS}
    first, *others = compaction.LIMITS
    sizes = {f"training.{name}" for name in ("seq_len", "minibatch_rows", "minibatch_contexts")}
    allowed = sizes | {"agent.history_tokens", "sampling.context_tokens"}
    for name in others:
        changed = {setting for setting, *_ in differences(runs[first], runs[name])}
        assert {"agent.history_tokens", "training.minibatch_contexts"} <= changed <= allowed
        assert runs[name].model.path == runs[first].model.path
    for name in ("history 0", "history 96"):
        masked = differences(runs[name], runs[f"{name}, actions"])
        assert [setting for setting, *_ in masked] == ["training.train_on"]


def test_a_row_has_means_over_questions_and_ranges_over_seeds(tmp_path):
    """One question of each number of hops: those of one hop are right, and its contexts have 10 and 20 tokens."""
    policies = []
    for seed in (0, 1):
        trajectories = []
        for hops in compaction.HOPS:
            turns = (samples.ANSWERED,) * (2 if hops == 1 else 1)
            stop = StopReason.BAD_MEMORY if hops == 7 and seed else StopReason.ANSWERED
            counts = {"compactions": len(turns) - 1, "memory_tokens": 6}
            metadata = {"relations": ["spouse"] * hops}
            trajectories.append(
                samples.scored(hops <= 1 + seed, turns, id=str(hops), metadata=metadata, stop=stop, counts=counts)
            )
        samples.write_shard(tmp_path / str(seed), trajectories)
        policies.append(compaction.measure("history 0", seed, tmp_path / str(seed)))
    first, second = policies
    assert first.exact_match == {"1": 1} | {str(hops): 0 for hops in range(2, 8)}
    assert first.processed == {"1": 30} | {str(hops): 10 for hops in range(2, 8)}
    assert first.generated == {"1": 2} | {str(hops): 1 for hops in range(2, 8)}
    assert (first.longest["1"], first.longest_of_all, first.memory_tokens) == (20, 20, 6)
    assert second.stops == {"answered": pytest.approx(6 / 7), "bad_memory": pytest.approx(1 / 7)}
    ((label, one_to_three, three, *tokens),) = compaction.table(policies)
    assert (label, one_to_three, three) == ("history 0", ".50 (.33 to .67)", ".00")
    assert tokens[2:5] == ["1", "17", "10"] and ".07 (.00 to .14)" in tokens
    compaction.write(tmp_path, policies)
    assert (tmp_path / "compaction.png").stat().st_size > 1000
