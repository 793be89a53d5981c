"""launch/evaluate.py with scripted policies whose metrics are known."""

import random

import pytest

from examples.warmstart.search import NO_ERRORS, SearchDemonstrator
from memsearcher_jax.data.synthetic.encyclopedia import EncyclopediaConfig, make_encyclopedia
from memsearcher_jax.logs.trajectories import read_trajectories
from tests.support import ScriptedPolicy

LONG_CONTEXT = """
    --model.max_positions 32768 --sampling.context_tokens 16384 --sampling.slots 8 --training.seq_len 16384
    --training.logit_chunk 128 --agent.question_tokens 256 --agent.memory_tokens 4096 --agent.observation_tokens 4096
    --evaluation.max_turns 20
"""
ENCYCLOPEDIA = make_encyclopedia(EncyclopediaConfig())


def read_all(folder):
    return [scored for file in sorted((folder / "trajectories").iterdir()) for scored in read_trajectories(file)]


def oracle(problem):
    return SearchDemonstrator(problem, ENCYCLOPEDIA, NO_ERRORS, random.Random(0))


def test_an_oracle_of_the_encyclopedia_has_full_scores(scripted, capsys):
    result, folder = scripted(oracle)
    assert result["questions"] == len(ENCYCLOPEDIA.test)
    summary = result["evaluation"]["benchmarks"]["encyclopedia"]
    assert len(summary["scores"]) == 5
    assert all(score["mean"] == score["high"] == 1.0 for score in summary["scores"].values())
    assert summary["stops"] == {"answered": 1.0}
    hops = [problem.metadata["hops"] for problem in ENCYCLOPEDIA.test]
    assert summary["searches"] == sum(hops) / len(hops)
    assert summary["turns"] == summary["searches"] + 1
    assert {name: value for name, value in result["metrics"].items() if name.endswith("_hops")} == {
        f"exact_match/{hop}_hops": 1.0 for hop in (1, 2, 3)
    }
    lengths = [len(context.ids) for scored in read_all(folder) for context in scored.trajectory.contexts]
    assert summary["tokens_per_turn"] == pytest.approx(sum(lengths) / len(lengths))
    assert summary["peak_context_tokens"] == max(lengths)
    assert "encyclopedia" in capsys.readouterr().out


def test_all_seven_benchmarks_load_and_run(shared, scripted, capsys):
    """An agent that always answers wrongly."""
    root = shared / "data" / "benchmarks"

    def wrong_answer(problem):
        return ScriptedPolicy(["I do not know.</think>\n\\boxed{no idea whatsoever}"])

    flags = ("--workflow", "direct", "--benchmarks", "all", "--data.root", root, "--evaluation.max_questions", "75")
    result, folder = scripted(wrong_answer, *LONG_CONTEXT.split(), *flags)
    summary = result["evaluation"]["averages"]
    benchmarks = result["evaluation"]["benchmarks"]
    names = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
    assert {name: benchmark["questions"] for name, benchmark in benchmarks.items()} == dict.fromkeys(names, 75)
    assert result["questions"] == len(read_all(folder)) == 525
    assert result["metrics"]["exact_match"] == 0.0
    assert {"macro", "in_distribution", "out_of_distribution", "gap"} == set(summary)
    assert summary["gap"]["exact_match"]["mean"] == 0.0
    output = capsys.readouterr().out
    assert all(word in output for word in ("bamboogle", "in distribution", "out of distribution", "gap"))
