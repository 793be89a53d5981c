"""launch/evaluate.py with policies whose right numbers are known: only the replies are scripted."""

import json
import random
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import evaluate
import pytest

from memsearcher_jax.agent import protocol, reward
from memsearcher_jax.agent.types import Find, Found, Passage, Problem, Prompt, Reply, Stop
from memsearcher_jax.data.demonstrator import Demonstrator, Errors, call, memory
from memsearcher_jax.data.world import WorldConfig, make_world
from memsearcher_jax.report.evaluation import SCORES
from memsearcher_jax.report.memory_quality import Rules, memory_quality, summarise
from memsearcher_jax.report.trajectories import read_trajectories
from memsearcher_jax.rl.run_folder import read_run_config

ROOMY = """
    --model.max_positions 32768 --sampling.context_tokens 16384 --sampling.slots 8 --training.row_tokens 16384
    --training.logit_chunk 128 --agent.question_tokens 256 --agent.memory_tokens 4096 --agent.observation_tokens 4096
    --evaluation.max_turns 20
"""
WIKI = ("2wikimultihopqa", "hotpotqa", "musique")
RULES = Rules(reward.normalize, protocol.memory)
WORLD = make_world(WorldConfig())


def kept(folder):
    return [one for part in sorted((folder / "trajectories").iterdir()) for one in read_trajectories(part)]


def oracle(problem):
    return Demonstrator(problem, WORLD, Errors(0.0, 0.0, 0.0), random.Random(0))


class Forgetful(Demonstrator):
    """Notes what turn 1 found, and nothing from turn 2 on; goes on as if it knew."""

    def _remember(self):
        text = super()._remember()
        return text if len(self.path) == 2 else memory("nothing yet.")


@dataclass
class Copier:
    """Searches once for what the question is about, writes the passages down letter by letter, and answers in vain."""

    problem: Problem
    read_last: str = ""

    def __call__(self, say):
        if not isinstance(say.text, Prompt):
            return Reply(memory(self.read_last))
        if say.text.memory:
            return Reply("No.</think>\n\\boxed{unknown}")
        return Reply(f"Look.</think>\n{call(self.problem.metadata['supporting_titles'][0])}")

    def read(self, find, found):
        self.read_last = found[0].passages[0].contents
        return found


def test_an_oracle_of_the_world_scores_all(scripted, capsys):
    result, folder = scripted(oracle)
    assert result["questions"] == len(WORLD.test)
    found = result["evaluation"]["benchmarks"]["world"]
    assert all(found["scores"][name] == {"mean": 1.0, "low": 1.0, "high": 1.0} for name in SCORES)
    assert found["stops"] == {"answered": 1.0}
    hops = [problem.metadata["hops"] for problem in WORLD.test]
    assert found["searches"] == sum(hops) / len(hops)
    assert found["turns"] == found["searches"] + 1
    assert {name: value for name, value in result["metrics"].items() if name.endswith("_hops")} == {
        f"exact_match/{hop}_hops": 1.0 for hop in (1, 2, 3)
    }
    lengths = [len(context.ids) for one in kept(folder) for context in one.trajectory.contexts]
    assert found["tokens_per_turn"] == pytest.approx(sum(lengths) / len(lengths))
    assert found["peak_context_tokens"] == max(lengths)
    assert "world" in capsys.readouterr().out


def test_a_policy_that_forgets_after_turn_one_shows_it_in_its_memories(scripted):
    def forgetful(problem):
        return Forgetful(problem, WORLD, Errors(0.0, 0.0, 0.0), random.Random(0))

    result, folder = scripted(forgetful)
    assert result["metrics"]["exact_match"] == 1.0  # the script knows better; its memories do not
    long = [one.trajectory for one in kept(folder) if one.trajectory.problem.metadata["hops"] == 3]
    summary = summarise(memory_quality(one, RULES) for one in long)
    held = {turn: numbers["supporting/any_held"].value for turn, numbers in summary.by_turn.items() if turn < 4}
    assert held == {1: 1.0, 2: 0.0, 3: 0.0}
    assert summary.by_turn[2]["supporting/lost"].value == 1.0
    assert summary.by_turn[2]["supporting/lost"].count == len(long)
    assert "supporting/lost" not in summary.by_turn[3]
    assert summary.by_turn[3]["supporting/forgotten"].value == 1.0
    assert summary.at_the_end["golden/held"].value == 0.0


def test_a_verbatim_copier_shows_full_copying(scripted):
    result, folder = scripted(Copier, *ROOMY.split())
    assert result["metrics"]["exact_match"] == 0.0
    summary = summarise(memory_quality(one.trajectory, RULES) for one in kept(folder))
    assert summary.over_turns["memory/copied"].value == 1.0
    assert summary.over_turns["memory/copied"].count == len(WORLD.test)
    assert summary.over_turns["supporting/kept"].value == 1.0


@dataclass
class Reader:
    """Is handed its supporting passages one title at a time, keeps them word for word, and answers with a golden
    answer that its memory holds, if it holds one."""

    problem: Problem
    pages: dict[str, tuple[Passage, ...]]
    unread: list[str] = field(default_factory=list)
    found: str = ""

    def __post_init__(self):
        self.unread = list(self.problem.metadata["supporting_titles"])

    def __call__(self, say):
        if not isinstance(say.text, Prompt):
            return Reply(memory(f"{self.old}\n{self.found}".strip()))
        self.old = say.text.memory
        if self.unread:
            return Reply(f"Look.</think>\n{call(self.unread[0])}")
        known = [answer for answer in self.problem.golden_answers if holds(self.old, answer)]
        return Reply(f"Read.</think>\n\\boxed{{{known[0] if known else 'not found'}}}")

    def read(self, find: Find, found: tuple[Found, ...]):
        passages = self.pages[self.unread.pop(0)]
        self.found = "\n".join(passage.contents for passage in passages)
        return (Found(passages),)


def holds(text, answer):
    return bool(reward.normalize(answer)) and reward.normalize(answer) in reward.normalize(text)


def answerable(folder: Path, pages) -> dict[str, list[bool]]:
    """Whether the supporting passages hold an answer, by dataset: from the files alone."""
    held = {}
    for name in WIKI:
        rows = [json.loads(line) for line in (folder / name / "dev.jsonl").read_text(encoding="utf-8").splitlines()]
        texts = [
            "\n".join(page.contents for title in row["metadata"]["supporting_titles"] for page in pages[title])
            for row in rows
        ]
        held[name] = [
            any(holds(text, answer) for answer in row["golden_answers"]) for row, text in zip(rows, texts, strict=True)
        ]
    return held


@pytest.mark.slow
def test_an_oracle_that_answers_from_the_supporting_passages_of_real_questions(shared, scripted):
    """It is right on every question whose supporting passages hold the answer, and on no other."""
    root, pages = shared / "data" / "wiki_mini", defaultdict(tuple)
    for line in (root / "corpus.jsonl").read_text(encoding="utf-8").splitlines():
        passage = Passage(**json.loads(line))
        pages[passage.title] += (passage,)
    expected = answerable(root, pages)
    search = ("--retrieval.method", "bm25", "--retrieval.corpus", root / "corpus.jsonl")
    result, folder = scripted(
        lambda problem: Reader(problem, pages),
        *ROOMY.split(),
        *search,
        "--data.root",
        root,
        "--benchmarks",
        ",".join(WIKI),
    )
    found = result["evaluation"]["benchmarks"]
    for name, held in expected.items():
        assert found[name]["questions"] == len(held)
        assert found[name]["scores"]["exact_match"]["mean"] == pytest.approx(sum(held) / len(held))
    right = {one.trajectory.problem.id: one.scores["exact_match"] for one in kept(folder)}
    answers = [value for name, held in expected.items() for value in held]
    assert sum(answers) > 0.9 * len(answers)
    assert sorted(right.values()) == sorted(map(float, answers))
    assert result["evaluation"]["inside"]["benchmarks"] == ["hotpotqa"]
    assert result["evaluation"]["outside"]["benchmarks"] == ["2wikimultihopqa", "musique"]
    quality = summarise(memory_quality(one.trajectory, RULES) for one in kept(folder))
    assert quality.over_turns["memory/copied"].value > 0.3  # the new passages; the older ones stand in no observation
    assert quality.over_turns["supporting/lost"].value == 0.0


@pytest.mark.slow
def test_every_workflow_runs_on_the_real_sampler(tmp_path):
    """The packaged model, as a sweep of the workflow: each with its own prompts, and nothing fails."""
    model = "--config tiny_warmstart --model.path package:tiny --retrieval.kind exact --evaluation.questions 4"
    names = ("memsearcher", "react", "direct", "rag")
    evaluate.main([*model.split(), "--out", str(tmp_path / "out"), "--sweep", f"agent.workflow={','.join(names)}"])
    for name in names:
        folder = tmp_path / "out" / f"agent.workflow={name}"
        prompts = read_run_config(folder).agent.prompts
        assert prompts == ("terse" if name == "memsearcher" else f"terse_{name}")
        trajectories = [one.trajectory for one in kept(folder)]
        assert len(trajectories) == 4
        for one in trajectories:
            assert one.outcome.stop not in (Stop.FAULT, Stop.CONTEXT_FULL, Stop.SEARCH_FAILED, Stop.NOT_FINITE)
            assert not one.outcome.error
            if name == "rag":
                (turn,) = one.outcome.turns
                assert [query.text for query in turn.queries] == [one.problem.question]
                assert turn.observation and turn.observation in one.transcript
            if name == "direct":
                assert not any(turn.queries for turn in one.outcome.turns)
                assert len(one.contexts) == 1


def test_all_seven_benchmarks_load_and_run(shared, scripted, capsys):
    """Every question of every file, with an agent that says what it does not know."""
    root = shared / "data" / "benchmarks"

    class Ignorant:
        def __init__(self, problem):
            pass

        def __call__(self, say):
            return Reply("I do not know.</think>\n\\boxed{no idea whatsoever}")

    flags = ("--workflow", "direct", "--benchmarks", "all", "--data.root", root)
    result, folder = scripted(Ignorant, *ROOMY.split(), *flags)
    found = result["evaluation"]
    assert {name: one["questions"] for name, one in found["benchmarks"].items()} == {
        **dict.fromkeys(("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique"), 300),
        "bamboogle": 75,
    }
    assert result["questions"] == len(kept(folder)) == 1_875
    assert result["metrics"]["exact_match"] == 0.0
    assert found["inside"]["benchmarks"] == ["nq", "hotpotqa"]
    assert len(found["outside"]["benchmarks"]) == 5
    assert found["gap"]["exact_match"]["mean"] == 0.0
    said = capsys.readouterr().out
    assert all(word in said for word in ("bamboogle", "in distribution", "out of it", "gap"))
