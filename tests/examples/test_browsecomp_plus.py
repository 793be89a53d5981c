"""BrowseComp-Plus: small files in the layout of its decrypted questions, judgements and corpus."""

import json
import sys

import pyarrow as pa
import pytest
from pyarrow import parquet

from examples import browsecomp_plus
from memsearcher_jax.agent.base import Scoring
from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.agent.registry import make_agent
from memsearcher_jax.data.config import DataConfig
from memsearcher_jax.data.problems import load
from memsearcher_jax.retrieval.corpus import read_passages
from memsearcher_jax.types import Outcome, Passage, SearchResult, StopReason, Trajectory, Turn

DOCUMENTS = [
    {"docid": "17", "text": '---\ntitle: The "Opus"\ndate: 2020\n---\nOne two three. Four five six.', "url": "u"},
    {"docid": "18", "text": "A page\nwithout a title.", "url": "v"},
]


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["browsecomp_plus", *map(str, words)])
    browsecomp_plus.main()


@pytest.fixture
def root(tmp_path, monkeypatch):
    rows = [{"query_id": "769", "query": "Which opus?", "answer": "Nine", "gold_docs": []}]
    (tmp_path / "decrypted.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "qrels.txt").write_text("769 Q0 17 1\n769 Q0 18 0\n\n769 Q0 99 1\n")
    out = tmp_path / "data" / "browsecomp_plus" / "test.jsonl"
    run(monkeypatch, "questions", tmp_path / "decrypted.jsonl", "--qrels", tmp_path / "qrels.txt", "--out", out)
    return tmp_path / "data"


def test_questions_are_read_by_name_and_evidence_is_counted_by_document(root, tmp_path):
    (problem,) = load(DataConfig(test=("browsecomp_plus",), root=str(root)), tmp_path / "cache").test
    assert (problem.id, problem.question, problem.golden_answers) == ("browsecomp_plus/769", "Which opus?", ("Nine",))
    assert problem.metadata["supporting_ids"] == ["17", "99"]
    results = (SearchResult((Passage("17#0", "x"), Passage("17#40", "y"), Passage("18#0", "z"))),)
    outcome = Outcome(StopReason.ANSWERED, "Nine", (Turn("", "", results=results),))
    agent = make_agent(AgentConfig())
    (scored,) = agent.rewards([Trajectory(problem, 0, outcome, (), "")], Scoring(token_counter=None))
    assert (scored.scores["evidence_recall"], scored.scores["exact_match"]) == (0.5, 1.0)


def test_documents_become_passages(tmp_path, monkeypatch):
    parquet.write_table(pa.Table.from_pylist(DOCUMENTS), tmp_path / "corpus.parquet")
    monkeypatch.setattr(browsecomp_plus, "MAX_WORDS", 6)
    run(monkeypatch, "passages", tmp_path / "corpus.parquet", "--out", tmp_path / "p.jsonl")
    corpus = [passage for _, passage in read_passages(tmp_path / "p.jsonl")]
    assert {passage.title for passage in corpus} == {"The 'Opus'", "A page"}
    texts = [passage.contents.partition("\n")[2] for passage in corpus]
    assert "A page\nwithout a title." in texts and any("Four five six." in text for text in texts)
    assert all(passage.id.partition("#")[0] in ("17", "18") for passage in corpus)


@pytest.mark.parametrize(
    ("what", "content", "message"),
    [
        ("questions", "1 Q0 17 1\n", "file: has no document for question 769"),
        ("questions", "1 17 1\n", "file:1: a line is QUESTION 0 DOCUMENT GRADE"),
        ("passages", '{"docid": 17, "text": null}\n', 'file:1: field "text" must be text, found NoneType'),
    ],
)
def test_a_file_that_does_not_fit_is_an_error(tmp_path, monkeypatch, root, capsys, what, content, message):
    (tmp_path / "file").write_text(content)
    out = root / "browsecomp_plus" / "test.jsonl"
    before = out.read_bytes()
    file = tmp_path / ("decrypted.jsonl" if what == "questions" else "file")
    with pytest.raises(SystemExit):
        run(monkeypatch, what, file, "--qrels", tmp_path / "file", "--out", out)
    assert message in capsys.readouterr().err
    assert out.read_bytes() == before
