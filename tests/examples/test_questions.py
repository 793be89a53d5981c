"""Scripted answers to real questions: the steps of questions, and what of the script's trajectories is imitated."""

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest

from examples.warmstart import demonstrate, questions, split_questions
from examples.warmstart.questions import QuestionDemonstrator, decompose
from memsearcher_jax.launch import cli
from memsearcher_jax.logs.trajectories import read_trajectories, step_path
from memsearcher_jax.rl import setup
from memsearcher_jax.types import Generate, Problem, Prompt, TextSpan
from tests.support import with_flags

REST = "Who is the father of B. Hay?"


@pytest.mark.parametrize(
    ("question", "name", "first", "rest"),
    [
        ("When did Al Low's father die?", "Al Low", "Who is Al Low's father?", "When did B. Hay die?"),
        (
            "Who is the father of the director of film Up (Film)?",
            "Up (Film)",
            "Who is the director of film Up (Film)?",
            REST,
        ),
        ("Who is the maternal grandfather of Al Low?", "Al Low", "Who is the mother of Al Low?", REST),
        ("Who is the father of Al Low's wife?", "Al Low", "Who is Al Low's wife?", REST),
        ("Who is Al Low's father-in-law?", "Al Low", "Who is Al Low's spouse?", "Who is B. Hay's father?"),
    ],
)
def test_a_question_about_a_described_person_has_two_steps(question, name, first, rest):
    assert decompose(question, name, "B. Hay") == (first, rest)


@pytest.mark.parametrize("question", ["Who wrote Al Low?", "Who is Al Low's father-figure?", "Who is Al Low's father?"])
def test_other_questions_have_no_steps(question):
    assert decompose(question, "Al Low", "B. Hay") is None


def document_problem(question: str, *titles: str) -> Problem:
    ids = [f"{title}.md:0" for title in titles]
    return Problem("q", question, ("0.1",), {"supporting_titles": list(titles), "supporting_ids": ids})


def test_questions_about_documents_are_queries():
    """A page of one's own documents is several passages, so its name alone does not find the right one."""
    question = "What is the default of rate in tools.sgd"
    policy = QuestionDemonstrator(document_problem(f"{question}?", "tools.sgd"))
    assert policy.wanted == ("tools.sgd", question)
    unnamed = QuestionDemonstrator(document_problem("How large is a step of descent?", "tools.sgd"))
    assert unnamed.wanted == ("tools.sgd", "How large is a step of descent")


def test_the_last_page_is_searched_for_what_the_question_asks_of_it():
    question = 'What is the default of rate in the page that tools.adam mentions after "See also"?'
    policy = QuestionDemonstrator(document_problem(question, "tools.adam", "tools.sgd"))
    assert policy.wanted == ("tools.adam", "tools.adam")
    assert policy._read('"tools.adam"\nSee also tools.sgd.') == "See also tools.sgd. Next: tools.sgd."
    assert policy.wanted == ("tools.sgd", "What is the default of rate tools.sgd")
    assert policy._read('"tools.sgd"\nsgd(rate=0.1)') == f"{question} 0.1. Next: answer 0.1."
    assert policy.answer == "0.1"


@pytest.mark.parametrize(("passage", "answer"), [('"tools.sgd"\nsgd(rate=0.1)', "0.1"), ('"other"\nNothing.', "")])
def test_rag_is_demonstrated_from_what_it_shows(passage, answer):
    policy = QuestionDemonstrator(document_problem("How large is 0.1?", "tools.sgd"), workflow="rag")
    shown = Prompt((TextSpan("How large is 0.1?", trusted=False), TextSpan(passage, trusted=False)))
    assert policy(Generate(shown, 8)).text == f"The passages have the answer.</think>\n\\boxed{{{answer}}}"


# The last director has no page.
FILMS = [("Ave Caesar", "Ann Low", "Delft"), ("Paradox", "Bob Hay", "London"), ("Rare Bird", "Cy Orr", "")]
SMALL = """
    --config smollm2_warmstart --model.path= --model.lora_rank 0 --model.layers 1 --model.embed_size 24
    --model.ffn_size 32 --model.head_size 8 --model.heads 3 --model.vocab_size 1536
    --training.seq_len 1536 --sampling.context_tokens 1536 --agent.observation_tokens 384
"""


def row(film: str, place: str) -> dict:
    """A question about the birthplace of a film's director."""
    director = {name: director for name, director, _ in FILMS}[film]
    titles = {"supporting_titles": [director, film]}
    question = f"Where was the director of {film} born?"
    return {"id": film, "question": question, "golden_answers": [place or "Rome"], "metadata": titles}


@pytest.fixture
def flags(tmp_path):
    """Flags of a small run on three questions; one about another film is held out."""
    passages = [(film, f"{film} is a film directed by {director}.") for film, director, _ in FILMS]
    passages += [("Ann Low", "Ann Low is a Dutch director. She was born in Delft.")]
    passages += [("Bob Hay", "Bob Hay was born in London.")]
    passages += [("Old Film", "Old Film is a film directed by Di Fox."), ("Di Fox", "Di Fox was born in Bonn.")]
    passages += [("New Film", "New Film is a film directed by Em Ito."), ("Em Ito", "Em Ito was born in Ulm.")]
    lines = [json.dumps({"id": str(id), "contents": f'"{title}"\n{text}'}) for id, (title, text) in enumerate(passages)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps(row(film, place)) for film, _, place in FILMS))
    test = row("Paradox", "Bonn") | {"id": "old", "question": "Where was the director of Old Film born?"}
    test["metadata"] = {"supporting_titles": ["Old Film", "Di Fox"]}
    (tmp_path / "test.jsonl").write_text(json.dumps(test))
    files = {"--retrieval.corpus": "corpus", "--data.train": "train", "--data.test": "test"}
    return [*SMALL.split(), *(word for flag, name in files.items() for word in (flag, str(tmp_path / f"{name}.jsonl")))]


@pytest.fixture
def run(flags, tmp_path, monkeypatch):
    monkeypatch.setattr(questions, "PER_STEP", 3)
    return setup.prepare(cli.parse(demonstrate.Demonstrate, flags).run, tmp_path / "workspace", training=False)


def trained_texts(run, demonstrations):
    return [
        run.tokenizer.transcript([id for id, sampled in zip(context.ids, context.sampled, strict=True) if sampled])
        for one in demonstrations
        for context in one.trajectory.contexts
    ]


def test_held_out_examples_train_one_decision_each(run):
    held_out = {}
    for one in questions.held_out(run):
        held_out.setdefault(one.trajectory.problem.metadata["source"], []).extend(trained_texts(run, [one]))
    assert held_out == {
        "plan": ["Who is the director of Old Film? Then: Where was that person born?"],
        "query": ["Old Film", "Di Fox"],
        "next": ["Next: Where was Di Fox born"],
        "answer": ["Bonn. Next: answer Bonn"],
    }


@pytest.mark.parametrize(
    ("more", "expected"),
    [("", "82d83873a2e37ff9"), ("--agent.workflow react", "083c84d97a7b53a1")],
)
def test_the_files_hold_the_demonstrations_of_the_packaged_weights(flags, tmp_path, monkeypatch, more, expected):
    """As recorded from version 0.2.0, token for token."""
    monkeypatch.setattr(questions, "PER_STEP", 3)
    demonstrate.main([*flags, *more.split(), "--steps", "1", "--out", str(tmp_path / "demos")])
    demonstrated = list(read_trajectories(step_path(tmp_path / "demos", 0)))
    digest = hashlib.sha256()
    for context in (context for one in demonstrated for context in one.trajectory.contexts):
        digest.update(np.asarray(context.ids, np.int32).tobytes() + b"|" + bytes(context.sampled) + b"\n")
    assert digest.hexdigest()[:16] == expected
    contexts = {one.trajectory.problem.id.split("/")[-1]: len(one.trajectory.contexts) for one in demonstrated[:3]}
    if not more:
        assert contexts == {"Ave Caesar": 3, "Paradox": 3, "Rare Bird": 1}, "up to the search that failed"
    held_out = list(read_trajectories(step_path(tmp_path / "demos" / "held_out", 0)))
    assert len({one.trajectory.problem.id for one in held_out}) == len(held_out) > 2


def test_a_failed_search_is_a_failure_of_the_service(run):
    class Down:
        def search(self, queries, top_n):
            raise TimeoutError("no route")

    with pytest.raises(ConnectionError, match=r"no demonstration of problem .*: TimeoutError: no route"):
        questions.step(replace(run, searcher=Down()), 0)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--data.test {train}", 'share "ann low": make disjoint files with'),
        ("--agent.workflow mem1", "on real data agent.workflow memsearcher, react, rag are demonstrated, not mem1"),
        ("--data.train --data.test --agent.workflow mem1", "memagent, memalpha are demonstrated, not mem1"),
    ],
)
def test_what_the_script_cannot_demonstrate_is_refused(flags, tmp_path, refused, more, message):
    more = more.format(train=tmp_path / "train.jsonl").split()
    assert message in refused(demonstrate.main, [*with_flags(flags, *more), "--out", tmp_path / "demos"])
    assert not (tmp_path / "demos").exists()


def test_questions_about_the_pages_are_files(tmp_path, flags, capsys):
    files = [str(tmp_path / "train.jsonl"), str(tmp_path / "test.jsonl")]
    words = [*files, *SMALL.split(), "--retrieval.corpus", str(tmp_path / "corpus.jsonl"), "--tune", "0", "--test", "1"]
    split_questions.main([*words, "--out", str(tmp_path / "questions")])
    rows = {
        file.stem: [json.loads(line) for line in file.read_text().splitlines()]
        for file in (tmp_path / "questions").iterdir()
    }
    assert rows.keys() == {"train", "tune", "test", "generated_sft", "generated_rl"}
    generated = [*rows["generated_sft"], *rows["generated_rl"]]
    held_out = {title for row in rows["test"] for title in row["metadata"]["supporting_titles"]}
    assert {row["golden_answers"][0] for row in rows["generated_sft"]} == {"Dutch", "Delft", "London"}
    assert [row["golden_answers"][0] for row in rows["generated_rl"]] == ["Ulm"], "New Film is in no other file"
    assert not any(held_out & {*row["metadata"]["supporting_titles"]} for row in generated)
    assert "questions in generated_rl.jsonl" in capsys.readouterr().out
    split_questions.main([*words, "--out", str(tmp_path / "fewer"), "--generated", "2"])
    files = [(tmp_path / "fewer" / f"generated_{part}.jsonl").read_text() for part in ("sft", "rl")]
    assert sum(len(content.splitlines()) for content in files) == 2
