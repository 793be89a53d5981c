"""The paragraphs that benchmarks publish with their questions, in every form in which they are published."""

import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from memsearcher_jax.data.config import DataConfig
from memsearcher_jax.data.paragraphs import Paragraph, read_published
from memsearcher_jax.data.problems import load
from memsearcher_jax.jsonl import MalformedRow

KESTREL = Paragraph("Kestrel (ship)", "The Kestrel was a brig. She was built by Ada Kern.")
KERN = Paragraph('"Ada" Kern', "Ada Kern was born in Marn.")
OTHER = Paragraph("Emden", "Emden is a port.")
QUESTION = "Where was the builder of the Kestrel born?"
SENTENCES = {
    KESTREL.title: ["The Kestrel was a brig.", " She was built by Ada Kern."],
    OTHER.title: ["Emden is a port."],
    KERN.title: ["Ada Kern was born in Marn."],
}
SUPPORTING = [[KESTREL.title, 1], [KERN.title, 0]]
COLUMNS = {"title": list(SENTENCES), "sentences": list(SENTENCES.values())}
FACT_COLUMNS = {"title": [title for title, _ in SUPPORTING], "sent_id": [number for _, number in SUPPORTING]}
MUSIQUE = [
    {"idx": number, "title": title, "paragraph_text": "".join(sentences), "is_supporting": title != OTHER.title}
    for number, (title, sentences) in enumerate(SENTENCES.items())
]
STEPS = [
    {"question": "step", "answer": "x", "support_paragraph": paragraph}
    for paragraph in MUSIQUE
    if paragraph["is_supporting"]
]
FLASHRAG = {"id": "q", "question": QUESTION, "golden_answers": ["Marn"]}
FORMS = {
    "hotpotqa": ("json", {"_id": "q", "question": QUESTION, "answer": "Marn", "supporting_facts": SUPPORTING,
                          "context": [list(pair) for pair in SENTENCES.items()], "type": "bridge"}),
    "musique": ("jsonl", {"id": "q", "question": QUESTION, "answer": "Marn", "answer_aliases": ["marn"],
                          "paragraphs": MUSIQUE, "question_decomposition": [{"paragraph_support_idx": 0}]}),
    "flashrag": ("jsonl", FLASHRAG | {"metadata": {"supporting_facts": FACT_COLUMNS, "context": COLUMNS}}),
    "flashrag content": ("jsonl", FLASHRAG | {"metadata": {
        "supporting_facts": FACT_COLUMNS, "context": {"title": COLUMNS["title"], "content": COLUMNS["sentences"]}}}),
    "flashrag musique": ("jsonl", FLASHRAG | {"metadata": {"question_decomposition": STEPS}}),
    "hub hotpotqa": ("parquet", {"id": "q", "question": QUESTION, "answer": "Marn", "type": "bridge",
                                 "supporting_facts": FACT_COLUMNS, "context": COLUMNS}),
    "hub 2wiki": ("parquet", {"_id": "q", "question": QUESTION, "answer": "Marn",
                              "supporting_facts": json.dumps(SUPPORTING),
                              "context": json.dumps([list(pair) for pair in SENTENCES.items()])}),
    "hub musique": ("parquet", {"id": "q", "question": QUESTION, "answer": "Marn", "paragraphs": MUSIQUE}),
}  # fmt: skip


def write(folder, kind, rows, name="questions"):
    file = folder / f"{name}.{kind}"
    if kind == "parquet":
        parquet.write_table(pa.Table.from_pylist(rows), file)
    elif kind == "json":
        file.write_text(json.dumps(rows))
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("form", FORMS)
def test_paragraphs_of_every_form(tmp_path, form):
    kind, row = FORMS[form]
    file = write(tmp_path, kind, [row])
    published = read_published([file], on_file=lambda file: None)
    wanted = [KESTREL, KERN] if form == "flashrag musique" else [KESTREL, OTHER, KERN]
    assert list(published.paragraphs) == wanted
    (problem,) = published.problems[file]
    assert problem.supporting_titles == (KESTREL.title, KERN.title)
    assert problem.golden_answers[0] == "Marn"
    assert not {"context", "paragraphs", "question_decomposition", "supporting_facts"} & problem.metadata.keys()
    passages = [passage for passage, _ in published.passages()]
    assert [passage.id for passage in passages] == [str(number) for number in range(len(wanted))]
    assert {passage.title for passage in passages} >= set(problem.supporting_titles)
    assert passages[0].contents == f'"{KESTREL.title}"\n{KESTREL.text}'
    trained = load(DataConfig(train=(str(file),)), tmp_path / "data").train
    assert trained[0].supporting_titles == problem.supporting_titles, "the file itself names them, too"


def test_a_paragraph_is_there_once(tmp_path):
    """Spaces and the form of characters make no difference; another text under the title does."""
    kind, row = FORMS["hotpotqa"]
    again = row | {"_id": "r", "context": [[KESTREL.title, ["The  Kestrel was a brig. She was built by Ada Kern.\xad"]],
                                           [KESTREL.title, ["Another text."]], ["Empty", []]]}  # fmt: skip
    first = write(tmp_path, kind, [row, again], "first")
    second = write(tmp_path, kind, [row], "second")
    published = read_published([first, second], on_file=lambda file: None)
    assert list(published.paragraphs) == [KESTREL, OTHER, KERN, Paragraph(KESTREL.title, "Another text.")]
    assert published.repeated == 4
    assert [len(problems) for problems in published.problems.values()] == [2, 1]


@pytest.mark.parametrize(
    "fields",
    [
        {"context": [["title alone"]]},
        {"context": [[1, ["x"]]]},
        {"context": 3},
        {"context": None, "paragraphs": [{"paragraph_text": "x"}]},
        {"context": "[broken"},
        {"context": {"title": ["a", "b"], "sentences": [["x"]]}},
    ],
)
def test_malformed_paragraphs_are_an_error_or_skipped(tmp_path, fields):
    kind, row = FORMS["hotpotqa"]
    file = write(tmp_path, kind, [row, row | {"_id": "bad"} | fields])
    with pytest.raises(MalformedRow, match=r"questions.json, entry 2: its paragraphs have no title and text"):
        read_published([file], on_file=lambda file: None)
    messages = []
    published = read_published([file], messages.append, on_file=lambda file: None)
    assert len(messages) == 1 and [problem.id for problem in published.problems[file]] == ["q"]


def test_questions_without_paragraphs_are_counted(tmp_path):
    kind, row = FORMS["hotpotqa"]
    plain = {"id": "plain", "question": QUESTION, "golden_answers": ["Marn"]}
    file = write(tmp_path, kind, [row, plain])
    assert read_published([file], on_file=lambda file: None).without_paragraphs == 1
    with pytest.raises(ValueError, match=r"plain.jsonl: its questions come without paragraphs \(none of the fields"):
        read_published([write(tmp_path, "jsonl", [plain], "plain")], on_file=lambda file: None)
