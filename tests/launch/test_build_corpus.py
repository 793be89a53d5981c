"""The command that turns documents into a corpus, and a search over its result."""

import json

import pytest

from memsearcher_jax.data.documents import READERS
from memsearcher_jax.launch import build_corpus, build_index

pytest.importorskip("pypdf")
pytest.importorskip("bs4")


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "documents"
    folder.mkdir()
    (folder / "rivers.md").write_text("# Rivers\n\nThe Aare flows through Bern.\n\n## Lakes\n\nIt leaves Lake Thun.\n")
    (folder / "towns.html").write_text('<?xml version="1.0"?><page>Bern is a town.')
    (folder / "image.png").write_bytes(b"")
    return folder


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
