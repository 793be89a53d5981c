"""launch/evaluate.py with scripted policies whose metrics are known."""

import json
import random
from collections import defaultdict

import pytest

from examples.warmstart.questions import QuestionDemonstrator
from examples.warmstart.search import NO_ERRORS, SearchDemonstrator, format_memory, format_search
from memsearcher_jax.agent import reward
from memsearcher_jax.data.synthetic.encyclopedia import EncyclopediaConfig, make_encyclopedia
from memsearcher_jax.logs.trajectories import read_trajectories
from memsearcher_jax.types import Completion, Passage, Prompt, SearchResult
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


class SupportingPassageReader:
    """Gets the supporting passages of one title per search, stores them verbatim, and answers with a golden answer that
    its memory contains, if there is one."""

    def __init__(self, problem, pages):
        self.problem, self.pages = problem, pages
        self.unread, self.latest = list(problem.metadata["supporting_titles"]), ""

    def __call__(self, request):
        if not isinstance(request.text, Prompt):
            return Completion(format_memory(f"{self.old}\n{self.latest}".strip()))
        self.old = request.text["memory"]
        if self.unread:
            return Completion(f"Look.</think>\n{format_search(self.unread[0])}")
        answers = [answer for answer in self.problem.golden_answers if contains_answer(self.old, answer)]
        return Completion(f"Read.</think>\n\\boxed{{{answers[0] if answers else 'not found'}}}")

    def observe(self, request, results):
        passages = self.pages[self.unread.pop(0)]
        self.latest = "\n".join(passage.contents for passage in passages)
        return (SearchResult(passages),)


def contains_answer(text, answer):
    return bool(reward.normalize(answer)) and reward.normalize(answer) in reward.normalize(text)


@pytest.mark.slow
def test_exactly_the_real_questions_whose_passages_contain_an_answer_are_answered(shared, scripted):
    root, pages, answerable = shared / "data" / "wiki_mini", defaultdict(tuple), {}
    for line in (root / "corpus.jsonl").read_text(encoding="utf-8").splitlines():
        passage = Passage(**json.loads(line))
        pages[passage.title] += (passage,)

    def reader(problem):
        titles = problem.metadata["supporting_titles"]
        text = "\n".join(passage.contents for title in titles for passage in pages[title])
        answerable[problem.id] = any(contains_answer(text, answer) for answer in problem.golden_answers)
        return SupportingPassageReader(problem, pages)

    flags = ["--retrieval.method", "bm25", "--retrieval.corpus", root / "corpus.jsonl", "--data.root", root]
    flags += ["--benchmarks", "2wikimultihopqa,hotpotqa,musique"]
    result, folder = scripted(reader, *LONG_CONTEXT.split(), *flags)
    assert {scored.trajectory.problem.id: scored.scores["exact_match"] for scored in read_all(folder)} == answerable
    assert 0.9 * len(answerable) < sum(answerable.values())
    averages, benchmarks = result["evaluation"]["averages"], result["evaluation"]["benchmarks"]
    assert sum(benchmark["questions"] for benchmark in benchmarks.values()) == len(answerable)
    assert averages["in_distribution"]["f1"]["mean"] == benchmarks["hotpotqa"]["scores"]["f1"]["mean"]


def test_all_seven_benchmarks_load_and_run(shared, scripted, capsys):
    """All questions of all benchmarks, with an agent that always answers wrongly."""
    root = shared / "data" / "benchmarks"

    def wrong_answer(problem):
        return ScriptedPolicy(["I do not know.</think>\n\\boxed{no idea whatsoever}"])

    flags = ("--workflow", "direct", "--benchmarks", "all", "--data.root", root)
    result, folder = scripted(wrong_answer, *LONG_CONTEXT.split(), *flags)
    summary = result["evaluation"]["averages"]
    benchmarks = result["evaluation"]["benchmarks"]
    assert {name: benchmark["questions"] for name, benchmark in benchmarks.items()} == {
        **dict.fromkeys(("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique"), 300),
        "bamboogle": 75,
    }
    assert result["questions"] == len(read_all(folder)) == 1_875
    assert result["metrics"]["exact_match"] == 0.0
    assert {"macro", "in_distribution", "out_of_distribution", "gap"} == set(summary)
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
