"""launch/evaluate.py with scripted policies whose metrics are known."""

import json
import random
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from examples.warmstart.questions import QuestionDemonstrator
from examples.warmstart.search import NO_ERRORS, SearchDemonstrator, format_memory, format_search
from memsearcher_jax.agent import reward
from memsearcher_jax.data.synthetic.encyclopedia import EncyclopediaConfig, make_encyclopedia
from memsearcher_jax.launch import evaluate
from memsearcher_jax.logs.trajectories import read_trajectories
from memsearcher_jax.report.memory_quality import mean_metrics, memory_quality
from memsearcher_jax.runtime.run_dir import read_run_config
from memsearcher_jax.types import Completion, Passage, Problem, Prompt, Search, SearchResult, StopReason

LONG_CONTEXT = """
    --model.max_positions 32768 --sampling.context_tokens 16384 --sampling.slots 8 --training.seq_len 16384
    --training.logit_chunk 128 --agent.question_tokens 256 --agent.memory_tokens 4096 --agent.observation_tokens 4096
    --evaluation.max_turns 20
"""
DATASETS = ("2wikimultihopqa", "hotpotqa", "musique")
ENCYCLOPEDIA = make_encyclopedia(EncyclopediaConfig())


def read_all(folder):
    return [scored for file in sorted((folder / "trajectories").iterdir()) for scored in read_trajectories(file)]


def oracle(problem):
    return SearchDemonstrator(problem, ENCYCLOPEDIA, NO_ERRORS, random.Random(0))


class Forgetful(SearchDemonstrator):
    """Stores the results of turn 1, and nothing from turn 2 on, but still answers correctly."""

    def memory(self):
        return super().memory() if len(self.chain) == 2 else "nothing yet."


@dataclass
class VerbatimCopier:
    """Searches once for the first supporting title, copies a passage verbatim to its memory, and answers wrongly."""

    problem: Problem
    read_last: str = ""

    def __call__(self, request):
        if not isinstance(request.text, Prompt):
            return Completion(format_memory(self.read_last))
        if request.text["memory"]:
            return Completion("No.</think>\n\\boxed{unknown}")
        return Completion(f"Look.</think>\n{format_search(self.problem.metadata['supporting_titles'][0])}")

    def observe(self, request, results):
        self.read_last = results[0].passages[0].contents
        return results


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


def test_memory_quality_detects_forgotten_facts(scripted):
    def forgetful(problem):
        return Forgetful(problem, ENCYCLOPEDIA, NO_ERRORS, random.Random(0))

    result, folder = scripted(forgetful)
    assert result["metrics"]["exact_match"] == 1.0  # the script answers without its memory
    long = [scored.trajectory for scored in read_all(folder) if scored.trajectory.problem.metadata["hops"] == 3]
    done = [memory_quality(trajectory) for trajectory in long]
    first, second, third = (mean_metrics(quality.turns[turn].metrics for quality in done) for turn in range(3))
    assert [means["supporting/any_held"].value for means in (first, second, third)] == [1.0, 0.0, 0.0]
    assert second["supporting/lost"].value == 1.0
    assert second["supporting/lost"].count == len(long)
    assert "supporting/lost" not in third
    assert third["supporting/forgotten"].value == 1.0
    assert mean_metrics(quality.last for quality in done)["golden/held"].value == 0.0


def test_memory_quality_detects_verbatim_copies(scripted):
    result, folder = scripted(VerbatimCopier, *LONG_CONTEXT.split())
    assert result["metrics"]["exact_match"] == 0.0
    done = [memory_quality(scored.trajectory) for scored in read_all(folder)]
    means = mean_metrics(turn.metrics for quality in done for turn in quality.turns)
    assert means["memory/copied"].value == 1.0
    assert means["memory/copied"].count == len(ENCYCLOPEDIA.test)
    assert means["supporting/kept"].value == 1.0


@dataclass
class SupportingPassageReader:
    """Gets the supporting passages of one title per search, stores them verbatim, and answers with a golden answer that
    its memory contains, if there is one."""

    problem: Problem
    pages: dict[str, tuple[Passage, ...]]
    unread: list[str] = field(default_factory=list)
    latest: str = ""

    def __post_init__(self):
        self.unread = list(self.problem.metadata["supporting_titles"])

    def __call__(self, request):
        if not isinstance(request.text, Prompt):
            return Completion(format_memory(f"{self.old}\n{self.latest}".strip()))
        self.old = request.text["memory"]
        if self.unread:
            return Completion(f"Look.</think>\n{format_search(self.unread[0])}")
        answers = [answer for answer in self.problem.golden_answers if contains_answer(self.old, answer)]
        return Completion(f"Read.</think>\n\\boxed{{{answers[0] if answers else 'not found'}}}")

    def observe(self, request: Search, results: tuple[SearchResult, ...]):
        passages = self.pages[self.unread.pop(0)]
        self.latest = "\n".join(passage.contents for passage in passages)
        return (SearchResult(passages),)


def contains_answer(text, answer):
    return bool(reward.normalize(answer)) and reward.normalize(answer) in reward.normalize(text)


def answerable(folder: Path, pages) -> dict[str, list[bool]]:
    """Whether the supporting passages of each question contain an answer, by dataset, computed from the files."""
    held = {}
    for name in DATASETS:
        rows = [json.loads(line) for line in (folder / name / "dev.jsonl").read_text(encoding="utf-8").splitlines()]
        texts = [
            "\n".join(page.contents for title in row["metadata"]["supporting_titles"] for page in pages[title])
            for row in rows
        ]
        held[name] = [
            any(contains_answer(text, answer) for answer in row["golden_answers"])
            for row, text in zip(rows, texts, strict=True)
        ]
    return held


@pytest.mark.slow
def test_an_oracle_with_supporting_passages_answers_all_answerable_real_questions(shared, scripted):
    """Exactly the questions whose supporting passages contain an answer are answered correctly."""
    root, pages = shared / "data" / "wiki_mini", defaultdict(tuple)
    for line in (root / "corpus.jsonl").read_text(encoding="utf-8").splitlines():
        passage = Passage(**json.loads(line))
        pages[passage.title] += (passage,)
    expected = answerable(root, pages)
    search = ("--retrieval.method", "bm25", "--retrieval.corpus", root / "corpus.jsonl")
    result, folder = scripted(
        lambda problem: SupportingPassageReader(problem, pages),
        *LONG_CONTEXT.split(),
        *search,
        "--data.root",
        root,
        "--benchmarks",
        ",".join(DATASETS),
    )
    benchmarks = result["evaluation"]["benchmarks"]
    for name, held in expected.items():
        assert benchmarks[name]["questions"] == len(held)
        assert benchmarks[name]["scores"]["exact_match"]["mean"] == pytest.approx(sum(held) / len(held))
    right = {scored.trajectory.problem.id: scored.scores["exact_match"] for scored in read_all(folder)}
    answers = [value for name, held in expected.items() for value in held]
    assert sum(answers) > 0.9 * len(answers)
    assert sorted(right.values()) == sorted(map(float, answers))
    averages, benchmarks = result["evaluation"]["averages"], result["evaluation"]["benchmarks"]
    assert averages["in_distribution"]["f1"]["mean"] == benchmarks["hotpotqa"]["scores"]["f1"]["mean"]
    done = [memory_quality(scored.trajectory) for scored in read_all(folder)]
    means = mean_metrics(turn.metrics for quality in done for turn in quality.turns)
    assert means["memory/copied"].value > 0.3  # the new passages; the older ones are in no observation
    assert means["supporting/lost"].value == 0.0


@pytest.mark.slow
def test_every_workflow_runs_on_the_sampling_engine(tmp_path):
    """With the packaged model: each workflow has its own prompts, and no trajectory fails."""
    model = (
        "--config tiny_warmstart --model.path package:tiny --retrieval.index_type exact --evaluation.max_questions 4"
    )
    for name in ("memsearcher", "react", "search_r1", "direct", "rag"):
        folder = tmp_path / name
        evaluate.main([*model.split(), "--out", str(folder), "--workflow", name])
        prompts = read_run_config(folder).agent.prompts
        assert prompts == ("terse" if name == "memsearcher" else f"terse_{name}")
        trajectories = [scored.trajectory for scored in read_all(folder)]
        assert len(trajectories) == 4
        for trajectory in trajectories:
            assert trajectory.outcome.stop not in (
                StopReason.FAULT,
                StopReason.CONTEXT_FULL,
                StopReason.SEARCH_FAILED,
                StopReason.NOT_FINITE,
            )
            assert not trajectory.outcome.error
            if name == "rag":
                (turn,) = trajectory.outcome.turns
                assert [query.text for query in turn.queries] == [trajectory.problem.question]
                assert turn.observation and turn.observation in trajectory.transcript
            if name == "direct":
                assert not any(turn.queries for turn in trajectory.outcome.turns)
                assert len(trajectory.contexts) == 1


def test_all_seven_benchmarks_load_and_run(shared, scripted, capsys):
    """All questions of all benchmarks, with an agent that always answers wrongly."""
    root = shared / "data" / "benchmarks"

    class WrongAnswer:
        def __init__(self, problem):
            pass

        def __call__(self, request):
            return Completion("I do not know.</think>\n\\boxed{no idea whatsoever}")

    flags = ("--workflow", "direct", "--benchmarks", "all", "--data.root", root)
    result, folder = scripted(WrongAnswer, *LONG_CONTEXT.split(), *flags)
    summary = result["evaluation"]
    assert {name: benchmark["questions"] for name, benchmark in summary["benchmarks"].items()} == {
        **dict.fromkeys(("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique"), 300),
        "bamboogle": 75,
    }
    assert result["questions"] == len(read_all(folder)) == 1_875
    assert result["metrics"]["exact_match"] == 0.0
    assert summary["in_distribution"]["benchmarks"] == ["nq", "hotpotqa"]
    assert len(summary["out_of_distribution"]["benchmarks"]) == 5
    assert summary["gap"]["exact_match"]["mean"] == 0.0
    output = capsys.readouterr().out
    assert all(word in output for word in ("bamboogle", "in distribution", "out of distribution", "gap"))


def test_choices_are_reported_with_the_score_of_a_rule(scripted, questions, corpus, capsys):
    file = questions("q.jsonl", "Who is older, Ada or Bob?", "Who is older, Bob or Ada?", "Who wrote it?")
    flags = ["--data", str(file), "--retrieval.corpus", str(corpus), "--retrieval.index_type", "exact"]
    result, _ = scripted(QuestionDemonstrator, *flags)
    assert (result["choices"], result["guessed_exact_match"]) == (2, 0.5)
    assert "2 of 3 questions are choices, of which a rule without a model gets 50% right" in capsys.readouterr().out
    result, _ = scripted(QuestionDemonstrator, *flags, "--data.questions", "span", out="spans")
    assert result["questions"] == 1 and "choices" not in result
