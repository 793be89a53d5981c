"""The warm start from real questions: what is imitated, and training with the usual command."""

import hashlib
import json
from collections import Counter
from dataclasses import replace

import pytest

from memsearcher_jax.launch import cli, split_questions, tpu_train
from memsearcher_jax.logs.metrics import read_metrics
from memsearcher_jax.rl import setup
from memsearcher_jax.sft import question_tasks
from memsearcher_jax.sft import train as sft

# The last director has no page.
FILMS = [("Ave Caesar", "Ann Low", "Delft"), ("Paradox", "Bob Hay", "London"), ("Rare Bird", "Cy Orr", "")]
SMALL = """
    --config smollm2_warmstart --model.path= --model.lora_rank 0 --model.layers 1 --model.embed_size 24
    --model.ffn_size 32 --model.head_size 8 --model.heads 3 --model.vocab_size 1536
    --training.minibatch_rows 8 --training.grad_accum_steps 1
    --training.warmup_steps 0 --training.seq_len 1536 --sampling.context_tokens 1536 --agent.observation_tokens 384
    --rl.prompts_per_step 3 --rl.steps 2 --sft.measure_every 2
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
def run(flags, tmp_path):
    return setup.prepare(cli.parse(tpu_train.Train, flags).run, tmp_path / "workspace")


def trained_texts(run, examples):
    return [run.tokenizer.transcript(example.ids[example.sampled]) for example in examples]


def test_contexts_up_to_a_failed_search_are_imitated(run):
    demonstrations = question_tasks.make_demonstrations(run, run.problems.train)
    by_film = {one.trajectory.problem.id: one for one in demonstrations}
    assert {film: one.scores["exact_match"] for film, one in by_film.items()} == {
        "Ave Caesar": 1,
        "Paradox": 1,
        "Rare Bird": 0,
    }
    assert {film: len(question_tasks.usable_part(one).contexts) for film, one in by_film.items()} == {
        "Ave Caesar": 3,
        "Paradox": 3,
        "Rare Bird": 1,
    }


def test_questions_about_the_pages_are_files(tmp_path, flags, capsys):
    preset = tmp_path / "small.py"
    preset.write_text(
        "from dataclasses import replace\n"
        "from memsearcher_jax.configs.nano import nano\n"
        "from memsearcher_jax.configs.smollm2 import smollm2\n"
        "agent = replace(smollm2().agent, observation_tokens=384)\n"
        "small = lambda: replace(nano(), agent=agent, sampling=replace(nano().sampling, context_tokens=1536))\n"
    )
    words = [
        tmp_path / "train.jsonl",
        tmp_path / "test.jsonl",
        "--tune",
        0,
        "--test",
        1,
        "--out",
        tmp_path / "questions",
    ]
    words += ["--corpus", tmp_path / "corpus.jsonl", "--config", preset]
    split_questions.main([str(word) for word in words])
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
    words[words.index("--out") + 1] = fewer = tmp_path / "fewer"
    split_questions.main([str(word) for word in [*words, "--generated", 2]])
    files = [(fewer / f"generated_{part}.jsonl").read_text() for part in ("sft", "rl")]
    assert sum(len(content.splitlines()) for content in files) == 2


def test_only_the_replies_of_the_script_are_trained(run):
    examples, metrics = question_tasks.step_examples(run, 0)
    assert metrics["exact_match"] == pytest.approx(2 / 3)
    assert not any("question>" in reply for reply in trained_texts(run, examples))


def test_single_steps_of_every_second_question_are_demonstrated_too(run):
    asked = Counter()
    for step in range(8):
        replies = trained_texts(run, question_tasks.step_examples(run, step)[0])
        thoughts = [reply.partition("</think>")[0] for reply in replies]
        assert sum(thought.endswith(" Then: Where was that person born?") for thought in thoughts) == len(FILMS)
        answered_whole, single_steps = 2, 2  # the second step of Rare Bird has no page
        assert 0 < sum(thought.endswith(" Then: answer.") for thought in thoughts) - answered_whole <= single_steps
        asked.update(thoughts)
    assert asked["Who is the director of Paradox? Then: answer."] > 0
    assert asked["Where was Bob Hay born? Then: answer."] > 8, "as the end of the whole question, and alone"
    assert asked["Where was Cy Orr born? Then: answer."] == 0, "its page is missing, so its demonstration is not right"


def test_held_out_examples_train_one_decision_each(run):
    held_out = question_tasks.held_out_examples(run)
    assert {name: trained_texts(run, examples) for name, examples in held_out.items()} == {
        "plan": ["Who is the director of Old Film? Then: Where was that person born?"],
        "query": ["Old Film", "Di Fox"],
        "next": ["Next: Where was Di Fox born"],
        "answer": ["Bonn. Next: answer Bonn"],
    }


def test_questions_that_share_an_entity_are_one_error_before_training(flags, tmp_path, capsys):
    train = str(tmp_path / "train.jsonl")
    with pytest.raises(SystemExit):
        tpu_train.main([*flags, "--data.test", train, "--out", str(tmp_path / "run")])
    assert "share" in (error := capsys.readouterr().err) and error.count("\n") == 1
    assert "make disjoint files with launch/split_questions.py" in error
    assert not (tmp_path / "run").exists()


def test_workflows_that_no_script_plays_are_errors(run):
    rag = replace(run, config=replace(run.config, agent=replace(run.config.agent, workflow="rag")))
    with pytest.raises(ValueError, match=r"demonstrates memsearcher and react alone: set agent.workflow, which is rag"):
        sft.check(rag)
    streams = replace(run, config=replace(run.config, agent=replace(run.config.agent, workflow="memalpha")))
    with pytest.raises(ValueError, match="demonstrates generated streams alone"):
        sft.check(streams)


def test_a_failed_search_is_a_failure_of_the_service(run):
    class Down:
        def search(self, queries, top_n):
            raise TimeoutError("no route")

    with pytest.raises(ConnectionError, match=r"no demonstration of problem .*: TimeoutError: no route"):
        question_tasks.step_examples(replace(run, searcher=Down()), 0)


def test_the_usual_command_trains_on_them(flags, tmp_path):
    tpu_train.main([*flags, "--out", str(tmp_path / "run")])
    steps = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert all(0 <= steps[-1][f"probability/{name}"] <= 1 for name in question_tasks.DECIDED_SPANS)


def test_the_demonstrations_of_a_step_are_as_recorded(run):
    """As recorded from version 0.2.0."""
    digest = hashlib.sha256()
    for example in question_tasks.step_examples(run, 0)[0]:
        digest.update(example.ids.tobytes() + b"|" + example.sampled.tobytes() + b"\n")
    assert digest.hexdigest()[:16] == "82d83873a2e37ff9"
