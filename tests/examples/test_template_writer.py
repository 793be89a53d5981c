"""The writer without a model: what it reads in a passage, what it asks, and that its questions pass the filters."""

import json

import pytest

from examples import docstrings
from examples.template_writer import Handler, Page, answer, reply, write
from memsearcher_jax.launch import make_questions
from memsearcher_jax.questions.evidence import Evidence
from memsearcher_jax.questions.writer import answer_prompt, write_prompt
from memsearcher_jax.types import Passage
from tests.http_server import serving_http

ADAM = Page(
    "Optimizers > tools.adam",
    "adam(learning_rate, b1=0.9, name='adam', mask=None)\n\nSee also tools.sgd for the same without moments.\n\n"
    "Args:\n  learning_rate: A global scaling\n    factor; see `schedules`.\n  eps: A constant\n  b1: A decay.",
)
SGD = Page(
    "tools.sgd",
    "| setting | meaning | unit |\n| --- | --- | --- |\n| `rate` | the [size](size.md) of a step | none |\n"
    "| `decay` |  | s |",
)


def facts(page):
    return {fact.property: fact.value for fact in page.facts()}


def user_message(prompt):
    return "".join(span.text for span in prompt.segments if not span.trusted)


def test_facts_are_rows_defaults_and_definitions():
    assert facts(ADAM) == {
        "the default of b1": "0.9",
        "the default of name": "adam",
        "learning_rate": "A global scaling factor",
        "eps": "A constant",
        "b1": "A decay",
    }
    assert facts(SGD) == {
        "the meaning of rate": "the size of a step",
        "the unit of rate": "none",
        "the unit of decay": "s",
    }
    assert facts(Page("An example", "Call adam(learning_rate=0.003) as here:\n>>> adam(b1=0.5)")) == {}


def test_a_question_of_two_pages_describes_the_second_by_the_words_before_its_name():
    question = json.loads(write([ADAM, SGD]))
    assert question["question"].endswith('in the page that Optimizers > tools.adam mentions after "None See also"?')
    assert question["answer"] in facts(SGD).values()
    assert answer(question["question"], [ADAM]) == answer(question["question"], [SGD]) == "unknown"
    assert write([SGD, ADAM]) == "tools.sgd does not lead to Optimizers > tools.adam by a name."
    assert write([Page("Empty", "Nothing here.")]) == "Empty has no fact with a short answer."


def test_it_reads_the_prompts_of_make_questions():
    passage = Passage(SGD.title, f'"{SGD.title}"\n{SGD.text}')
    question = json.loads(reply(user_message(write_prompt(Evidence((passage,), "train")))))
    assert facts(SGD)[question["question"][len("What is ") : -len(" in tools.sgd?")]] == question["answer"]
    assert reply(user_message(answer_prompt(question["question"], passage))) == question["answer"]
    assert reply(user_message(answer_prompt(question["question"]))) == "unknown"


def test_docstrings_become_pages(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["docstrings.py", "bisect", "--out", str(tmp_path)])
    docstrings.main()
    page = (tmp_path / "bisect" / "bisect.insort_left.md").read_text()
    assert page.startswith("# bisect.insort_left\n\ninsort_left(a, x, lo=0, hi=None, *, key=None)\n\nInsert item x")
    assert capsys.readouterr().out == f"{tmp_path / 'bisect'}: {len(list((tmp_path / 'bisect').iterdir()))} pages\n"


@pytest.mark.parametrize("hops", ["1", "2"])
def test_its_questions_pass_the_filters(tmp_path, hops):
    rows = []
    for number in range(12):
        text = (
            f"tool{number}(size={number + 40}, follows=None)\n\n{'It is one of the tools that belong to the box. ' * 2}"
        )
        if number:
            text += f"It extends box.tool{number - 1} in all respects."
        rows.append({"id": str(number), "contents": f'"box.tool{number}"\n{text}'})
    passages = tmp_path / "passages.jsonl"
    passages.write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = ["--passages", str(passages), "--out", str(tmp_path / "made"), "--hops", hops, "--writer.model", "templates"]
    with serving_http(Handler) as address:
        make_questions.main([*argv, "--writer.url", f"{address}/v1", "--json", str(tmp_path / "j.json")])
    result = json.loads((tmp_path / "j.json").read_text())
    assert result["questions"] == result["candidates"] > 3 and result["struck"] == {}
