"""Folders of documents as passages."""

import re

import matplotlib
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsearcher_jax.data.documents import WORD, UnreadableDocument, find_documents, read_passages, split_text

pytest.importorskip("pypdf")
pytest.importorskip("bs4")

GUIDE = """---
author: someone
---
Before any heading.

# <a name="top"></a>The guide

First words. More words!

```
# not a heading
```

## Install *it*

Run the command.

> # A quoted heading

### Notes

Deep.

## Use

Last.
"""


def passages(path, max_words=100):
    return read_passages(path.parent, path, max_words)


def titles_and_texts(path, **options):
    return [tuple(row["contents"].split("\n", 1)) for row in passages(path, **options)]


def write(path, text):
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_markdown_is_divided_at_its_headings(tmp_path, line_end):
    path = write(tmp_path / "guide.md", GUIDE.replace("\n", line_end))
    assert titles_and_texts(path) == [
        ('"guide"', "Before any heading."),
        ('"The guide"', "First words. More words!\n\n```\n# not a heading\n```"),
        ('"The guide > Install it"', "Run the command.\n\n> # A quoted heading"),
        ('"The guide > Install it > Notes"', "Deep."),
        ('"The guide > Use"', "Last."),
    ]


def test_offsets_find_the_passage_in_the_document(tmp_path):
    path = write(tmp_path / "guide.md", GUIDE)
    for row in passages(path, max_words=2):
        start, end = row["metadata"]["start"], row["metadata"]["end"]
        assert GUIDE[start:end] == row["contents"].partition("\n")[2]
        assert row["id"] == f"guide.md:{start}"


def test_html_keeps_the_content_of_the_page(tmp_path):
    page = """<html><head><title>A &amp; B</title><style>p {}</style></head><body><nav>Home</nav>
        <p>One <b>bold</b>word<br>next line</p><!-- comment --><script>run()</script>
        <h2>Part <i>t</i>wo<br>a<a href="#p">¶</a> <b class="mw-editsection">[<a>edit</a>]</b></h2>
        <ul><li>first</li><li>second</li></ul><pre><b>if</b> x:\n    y</pre></body><h3>Open</h2><p>After</p>"""
    assert titles_and_texts(write(tmp_path / "page.html", page)) == [
        ('"A & B"', "One boldword\n\nnext line"),
        ('"A & B > Part two a"', "first\n\nsecond\n\nif x:\n    y\n\nOpen\n\nAfter"),
    ]


@pytest.mark.parametrize(
    ("named", "encoding", "text"),
    [
        ("iso-8859-1", "cp1252", "Zürich’s"),
        ("iso-8859-1", "utf-8", "Zürich’s"),
        ("x-sjis", "cp932", "東京①"),
        ("iso-2022-jp", "iso-2022-jp", "東京"),
        ("utf-8", "utf-16", "Zürich"),
    ],
)
def test_html_has_the_encoding_that_it_names(tmp_path, named, encoding, text):
    """By its name in browsers; UTF-8 under another name was converted."""
    (tmp_path / "page.html").write_bytes(f"<meta charset={named}><p>{text}".encode(encoding))
    assert titles_and_texts(tmp_path / "page.html") == [('"page"', text)]


def test_html_tables_forms_and_exponents(tmp_path):
    """Every element that is not inline separates words; the page of a WebForms application is one form."""
    page = """<body><form action="x"><input value="v"><button>Send</button><select><option>one</select>
        <table><tr><th>Ada Kern</th><td>1902</td><td>Marn</td></tr><tr><td><p>Bo</p></td><td>1903</td></tr></table>
        <div>10<sup>3</sup> m<sup> 2</sup>, 19<sup>th</sup>, H<sub>2</sub>O</div>tail<x-own>new</x-own>word
        <details><summary>More</summary>text</details></form></body>"""
    text = "Ada Kern | 1902 | Marn\n\nBo\n\n1903\n\n10^3 m^ 2, 19th, H2O\n\ntail\n\nnew\n\nword\n\nMore\n\ntext"
    assert titles_and_texts(write(tmp_path / "page.html", page)) == [('"page"', text)]


def test_deeply_nested_html_is_read(tmp_path):
    page = "<title>Without a body</title>" + "<div>" * 3_000 + "deep"
    assert titles_and_texts(write(tmp_path / "page.html", page)) == [('"Without a body"', "deep")]


def test_markdown_that_begins_with_a_rule_keeps_its_text(tmp_path):
    """Only lines of "key: value", lists and comments are front matter."""
    rule = "---\nThe first words.\n\n---\nMore.\n"
    assert titles_and_texts(write(tmp_path / "rule.md", rule)) == [('"rule"', rule.strip())]
    yaml = "---\ntitle: A\ntags:\n  - b\n- c\n# comment\n\ndraft: true\n---\nWords.\n"
    assert titles_and_texts(write(tmp_path / "yaml.md", yaml)) == [('"yaml"', "Words.")]
    unclosed = "---\n" + "a: b\n" * 10_000
    assert len(titles_and_texts(write(tmp_path / "open.md", unclosed))) > 0


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.html"])
def test_passages_are_composed_unicode(tmp_path, name):
    """As tokenizers compose what a policy writes."""
    ((_, text),) = titles_and_texts(write(tmp_path / name, "Besanc\u0327on"))
    assert text == "Besan\xe7on"


def write_pdf(path, pages):
    import matplotlib.pyplot as plt
    from matplotlib.backends.backend_pdf import PdfPages

    with matplotlib.rc_context({"pdf.fonttype": 42}), PdfPages(path) as file:
        for text in pages:
            figure = plt.figure()
            figure.text(0.1, 0.5, text)
            file.savefig(figure)
            plt.close(figure)
    return path


def test_a_pdf_has_a_section_per_page(tmp_path):
    path = write_pdf(tmp_path / "paper.pdf", ["The first page.", "The second\npage: ge\u2010\nändert, E-\nMail."])
    rows = passages(path)
    texts = ["The first page.", "The second page: geändert, E-Mail."]
    assert [row["contents"] for row in rows] == [f'"paper"\n{text}' for text in texts]
    assert [row["metadata"]["page"] for row in rows] == [1, 2]
    assert rows[1]["id"] == "paper.pdf#page=2:0"


def test_text_and_title_of_a_pdf_are_valid_unicode_on_one_line(tmp_path, monkeypatch):
    from pypdf import PageObject, PdfWriter

    writer = PdfWriter(clone_from=write_pdf(tmp_path / "untitled.pdf", ["text"]))
    writer.add_metadata({"/Title": "A title\nof two lines"})
    writer.write(tmp_path / "paper.pdf")
    monkeypatch.setattr(PageObject, "extract_text", lambda page: "a\ud800")
    assert titles_and_texts(tmp_path / "paper.pdf") == [('"A title of two lines"', "a?")]


def test_unreadable_documents_say_why(tmp_path):
    from pypdf import PdfWriter

    whole = write_pdf(tmp_path / "whole.pdf", ["text"])
    (tmp_path / "broken.pdf").write_bytes(whole.read_bytes()[:300])
    for name in ("latin.txt", "latin.html"):
        (tmp_path / name).write_bytes("Zürich".encode("latin-1"))
    writer = PdfWriter(clone_from=whole)
    writer.encrypt("password", algorithm="RC4-128")
    writer.write(tmp_path / "closed.pdf")
    write_pdf(tmp_path / "scan.pdf", [""])
    for name, reason in [
        ("broken.pdf", "not a PDF that can be read"),
        ("closed.pdf", "is encrypted"),
        ("scan.pdf", "contains no text"),
        ("latin.txt", "not UTF-8 (byte 1)"),
        ("latin.html", "not UTF-8 (byte 1)"),
        ("caf\udce9.txt", "the name is not UTF-8"),
    ]:
        with pytest.raises(UnreadableDocument, match=re.escape(f"{tmp_path / name}: {reason}")) as error:
            passages(tmp_path / name)
        assert "\n" not in str(error.value)


def test_the_folder_is_searched_without_hidden_files_and_links(tmp_path, monkeypatch):
    (tmp_path / "deep" / ".git").mkdir(parents=True)
    (tmp_path / "shut").mkdir()
    monkeypatch.setattr("os.access", lambda path, mode: path.name != "shut")
    for name in ("b.TXT", "deep/a.md", "deep/.git/c.md", ".hidden.md", "data.csv"):
        write(tmp_path / name, "text")
    (tmp_path / "link.md").symlink_to(tmp_path / "b.TXT")
    documents, left_out = find_documents(tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path in documents] == ["b.TXT", "deep/a.md"]
    names = {reason: [path.name for path in paths] for reason, paths in left_out.items()}
    expected = {"hidden": [".hidden.md", ".git"], ".csv": ["data.csv"], "symbolic link": ["link.md"]}
    assert names == expected | {"no permission": ["shut"]}


@given(st.text(alphabet='ab .!?\n文。é"', max_size=200), st.integers(1, 8))
def test_passages_hold_every_word_once_in_order(text, max_words):
    spans = list(split_text(text, max_words))
    assert [word for start, end in spans for word in WORD.findall(text[start:end])] == WORD.findall(text)
    assert all(0 < len(WORD.findall(text[start:end])) <= max_words for start, end in spans)
    assert all(text[start:end].strip() == text[start:end] for start, end in spans)
