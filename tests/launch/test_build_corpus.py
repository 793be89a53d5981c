"""The command that turns documents into a corpus, and a search over its result."""

import json
from pathlib import Path

import pytest

from memsearcher_jax.data.config import DataConfig
from memsearcher_jax.data.documents import READERS
from memsearcher_jax.data.problems import load
from memsearcher_jax.launch import build_corpus, build_index
from tests.data.document_files import write_pdf
from tests.data.test_paragraphs import FORMS, KERN, KESTREL, OTHER, write

pytest.importorskip("pypdfium2")
pytest.importorskip("bs4")


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "documents"
    folder.mkdir()
    (folder / "rivers.md").write_text("# Rivers\n\nThe Aare flows through Bern.\n\n## Lakes\n\nIt leaves Lake Thun.\n")
    (folder / "towns.html").write_text('<?xml version="1.0"?><page>Bern is a town.')
    (folder / "image.png").write_bytes(b"")
    return folder


def corpus_rows(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_documents_become_an_index(folder, tmp_path, capsys, recwarn):
    corpus, result = tmp_path / "passages.jsonl.gz", tmp_path / "result.json"
    build_corpus.main([str(folder), "--out", str(corpus), "--json", str(result)])
    output = capsys.readouterr()
    assert "3 passages of 2 documents, median 4 words; index them with" in output.out and not recwarn.list
    assert "left out, .png: 1 (image.png)\n" in output.err
    assert json.loads(result.read_text())["passages"] == 3
    build_index.main(f"--retrieval.corpus {corpus} --retrieval.index_type exact --out {tmp_path / 'index'}".split())
    assert "3 passages" in capsys.readouterr().out


def test_all_unreadable_and_empty_documents_are_listed(folder, tmp_path, capsys, monkeypatch):
    (folder / "denied.markdown").touch()
    monkeypatch.setitem(READERS, ".markdown", lambda path: (path / "no folder").read_bytes())
    (folder / "broken.pdf").write_bytes(b"%PDF-1.4 nothing")
    (folder / "blank.html").write_text("<p> </p>")
    (folder / "link.md").symlink_to(folder / "rivers.md")
    corpus = tmp_path / "passages.jsonl"
    with pytest.raises(SystemExit):
        build_corpus.main([str(folder), "--out", str(corpus)])
    listed = capsys.readouterr().err
    assert "2 of 5 documents cannot be read (listed above): mend them, or leave them out with --malformed" in listed
    assert not corpus.exists()
    build_corpus.main([str(folder), "--out", str(corpus), "--malformed", "skip"])
    output = capsys.readouterr()
    assert "3 passages of 2 documents" in output.out
    for line in (
        f"cannot read {folder}/broken.pdf: not a PDF that can be read",
        "cannot read [Errno 20] Not a directory",
        f"without text: {folder}/blank.html",
        "left out, symbolic link: 1 (link.md)",
    ):
        assert line in listed and line in output.err


def test_documents_without_any_text_are_an_error(tmp_path, capsys):
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(SystemExit):
        build_corpus.main([str(tmp_path), "--out", str(tmp_path / "passages.jsonl")])
    assert f"{tmp_path}: its documents contain no text" in capsys.readouterr().err


def test_a_corpus_that_is_built_again_says_what_changed(folder, tmp_path, capsys):
    corpus, result = tmp_path / "passages.jsonl", tmp_path / "result.json"
    build_corpus.main([str(folder), "--out", str(corpus)])
    assert "as before" not in capsys.readouterr().out
    (folder / "rivers.md").write_text("# Rivers\n\nNew first.\n\n## Lakes\n\nIt leaves Lake Thun.\n")
    build_corpus.main([str(folder), "--out", str(corpus), "--json", str(result)])
    assert "2 passages are as before, 1 are new, and 1 are no longer there" in capsys.readouterr().out
    numbers = json.loads(result.read_text())
    assert (numbers["kept"], numbers["new"], numbers["removed"]) == (2, 1, 1)
    first, *_ = corpus_rows(corpus)
    assert first["contents"] == '"Rivers"\nNew first.'


def test_a_file_of_somebody_else_is_not_replaced(folder, tmp_path, capsys):
    for text in ("my notes\n", json.dumps({"id": "1", "contents": "a"}) + "\n"):
        notes = tmp_path / "notes.jsonl"
        notes.write_text(text)
        with pytest.raises(SystemExit):
            build_corpus.main([str(folder), "--out", str(notes)])
        assert "is not a corpus that this command wrote" in capsys.readouterr().err
        assert notes.read_text() == text


def test_what_documents_lose_has_a_line(folder, tmp_path, capsys):
    """Front matter, images, parts of a page, and pages of a PDF that are pictures."""
    write_pdf(folder / "paper.pdf", ["A page with text.", "", ""])
    image = "data:image/png;base64," + "A" * 2_000
    (folder / "rivers.md").write_text(f"---\ntitle: Rivers\n---\nThe ![Aare]({image}) flows.\n")
    page = '<nav>Home</nav><main><p>Bern.<img src="a.png"><aside>A note.</aside></main><footer>Imprint</footer>'
    (folder / "towns.html").write_text(page)
    corpus, result = tmp_path / "passages.jsonl", tmp_path / "result.json"
    build_corpus.main([str(folder), "--out", str(corpus), "--json", str(result)])
    listed = capsys.readouterr().err
    for line in (
        f"without text: {folder}/paper.pdf: 2 of 3 pages (2, 3); OCR recognises scanned pages",
        "left out of 1 documents: front matter, apart from its title: 1",
        "left out of 1 documents: data of embedded images: 1",
        "left out of 1 documents: navigation, side bars, footers and controls of pages: 2",
        "left out of 1 documents: images without a description: 1",
    ):
        assert line + "\n" in listed
    texts = [row["contents"] for row in corpus_rows(corpus)]
    assert texts == ['"paper"\nA page with text.', '"Rivers"\nThe Aare flows.', '"towns"\nBern.\n\nA note.']
    assert json.loads(result.read_text())["left_out"]["data of embedded images"] == 1


def test_a_corpus_of_published_questions(tmp_path, capsys, monkeypatch):
    """The paragraphs become passages, the questions a file to train with, and the audit says what they lack."""
    kind, row = FORMS["hotpotqa"]
    hopeless = row | {"_id": "h", "question": "Who sank her?", "answer": "Bo", "supporting_facts": [["Nowhere", 0]]}
    write(tmp_path, kind, [row, hopeless], "dev")
    monkeypatch.setattr("memsearcher_jax.runs.hub.local_file", lambda name, flag: tmp_path / Path(name).name)
    corpus, result = tmp_path / "made" / "corpus.jsonl", tmp_path / "result.json"
    corpus.parent.mkdir()
    argv = ["--questions", "hf://datasets/owner/hotpot/dev.json", "--out", str(corpus), "--json", str(result)]
    build_corpus.main(argv)
    printed = capsys.readouterr().out
    assert [json.loads(line)["contents"] for line in corpus.read_text().splitlines()] == [
        f'"{paragraph.title}"\n{paragraph.text}' for paragraph in (KESTREL, OTHER, KERN)
    ]
    questions = load(DataConfig(train=(str(corpus.parent / "corpus.dev.jsonl"),)), tmp_path / "data").train
    assert [problem.id for problem in questions] == ["q", "h"]
    assert questions[0].supporting_titles == (KESTREL.title, KERN.title)
    (excluded,) = corpus_rows(corpus.parent / "corpus.hopeless.jsonl")
    assert excluded["id"] == "h" and len(excluded["reasons"]) == 2
    assert "corpus.hopeless.jsonl: 1 of 2 questions, to leave out with --data.exclude" in printed
    assert f"--retrieval.corpus {corpus} --data.train {corpus.parent}/corpus.dev.jsonl" in printed
    numbers = json.loads(result.read_text())
    assert (numbers["passages"], numbers["hopeless"], numbers["repeated_paragraphs"]) == (3, 1, 3)
    assert numbers["searched"]["answers"]["oracle@5"] == 0.5
    build_corpus.main(argv)
    assert "3 passages are as before, 0 are new, and 0 are no longer there" in capsys.readouterr().out


def test_long_files_are_searched_in_part(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("memsearcher_jax.launch.question_corpus.SEARCHED_QUESTIONS", 2)
    kind, row = FORMS["musique"]
    file = write(tmp_path, kind, [row | {"id": f"q{number}"} for number in range(5)])
    build_corpus.main(["--questions", str(file), "--out", str(tmp_path / "c.jsonl")])
    printed = capsys.readouterr().out
    assert "2 of them" in printed and "c.hopeless.jsonl: 0 of 5 questions" in printed


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "give either a folder of documents, or --questions FILE"),
        (["FOLDER", "--questions", "q.json"], "give either a folder of documents, or --questions FILE"),
        (["--questions", "q.json", "--max_words", "9"], "--max_words is of documents"),
        (["--questions", "none.json"], "none.json: no such file"),
        (["--questions", "a/q.json", "b/q.json"], "two files have one name"),
    ],
)
def test_flags_that_contradict_each_other(folder, tmp_path, capsys, argv, message):
    argv = [str(folder) if word == "FOLDER" else word for word in argv]
    with pytest.raises(SystemExit):
        build_corpus.main([*argv, "--out", str(tmp_path / "c.jsonl")])
    assert message in capsys.readouterr().err
