"""Folders of documents as passages."""

import re
import zipfile

import pytest

from memsearcher_jax.data.documents import UnreadableDocument, find_documents, read_document, read_passages
from tests.data.document_files import write, write_docx, write_epub, write_pdf, write_pptx

pytest.importorskip("pypdfium2")
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


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_markdown_is_divided_at_its_headings(tmp_path, line_end):
    path = write(tmp_path / "guide.md", GUIDE.replace("\n", line_end))
    assert titles_and_texts(path) == [
        ('"The guide"', "Before any heading."),
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


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("---\ntitle: A\ntags:\n  - b\n- c\n---\nWords.\n", '"A"'),  # invalid YAML
        ("---\ntitle: A\ntags:\n  - b\n# comment\n\ndraft: true\n---\nWords.\n", '"A"'),
        ('---\n"title": A\ndate created: 2021-05-05\nnav.order: 3\n...\nWords.\n', '"A"'),
        ("---\ntitle: A: the first\n---\nWords.\n", '"A: the first"'),  # invalid YAML
        ("---\nlayout: page\nday: 2021-02-30\n---\nWords.\n", '"page"'),
        ('+++\ntitle = "A"\n[extra]\nb = 1\n+++\nWords.\n', '"A"'),
        ("---\ntitle: 1984\nlang: de\n---\nWords.\n", '"1984"'),
        ("---\n---\nWords.\n", '"page"'),
        ("---\ntitle: Site\n---\n# A\n\nWords.\n", '"A"'),
        ("---\ntitle: Site\n---\n# A\n\n# B\n\nWords.\n", '"Site > B"'),
    ],
)
def test_front_matter_gives_the_title_and_is_no_content(tmp_path, text, title):
    assert titles_and_texts(write(tmp_path / "page.md", text)) == [(title, "Words.")]


@pytest.mark.parametrize(
    "text",
    [
        "---\nThe first words.\n\n---\nMore.\n",
        "---\n\nNote: the first words.\n\n---\nMore.\n",
        "+++\nno = toml = here\n+++\nMore.\n",
        "---\n" + "a: b\n" * 100,
    ],
)
def test_markdown_that_begins_with_a_rule_keeps_its_text(tmp_path, text):
    ((_, content),) = titles_and_texts(write(tmp_path / "rule.md", text), max_words=1_000)
    assert content == text.strip()


def test_embedded_images_are_no_text(tmp_path):
    data = "data:image/png;base64," + "iVBOR/+w=" * 500
    text = f"# Pump\n\nSeven ![valves]({data}), ![][1] and <img src='{data}'> seals.\n\n[1]: <{data}>\n"
    path = write(tmp_path / "pump.md", text)
    assert titles_and_texts(path) == [('"Pump"', "Seven valves, ![][1] and  seals.")]
    assert read_document(path).left_out == {"data of embedded images": 3}


def test_encoded_data_does_not_make_a_long_passage(tmp_path):
    path = write(tmp_path / "key.txt", "Key " + "A" * 50_000)
    assert max(len(text) for _, text in titles_and_texts(path, max_words=10)) <= 1_010


def test_html_keeps_the_content_of_the_page(tmp_path):
    page = """<html><head><title>A &amp; B</title><style>p {}</style></head><body><nav>Home</nav>
        <p>One <b>bold</b>word<br>next
        line</p><!-- comment --><script>run()</script>
        <h2>Part <i>t</i>wo<br>a<a class="headerlink" href="#p">¶</a> <b class="mw-editsection">[<a>edit</a>]</b></h2>
        <ul><li>first</li><li><a href="x">second</a></li></ul><pre><b>if</b> x:\n    y</pre></body><p>After"""
    path = write(tmp_path / "page.html", page)
    assert titles_and_texts(path) == [
        ('"A & B"', "One boldword\nnext line"),
        ('"A & B > Part two a"', "- first\n- second\n\n```\nif x:\n    y\n```\n\nAfter"),
    ]


def test_notes_and_sources_inside_the_content_are_kept(tmp_path):
    page = """<aside>News</aside><main><p>Open slowly.</p><aside>It bursts above 9 bar.</aside><article>
        <blockquote><p>Steam.</p><footer>J. Reuter</footer></blockquote></article></main><footer>Imprint</footer>"""
    path = write(tmp_path / "page.html", page)
    ((_, text),) = titles_and_texts(path)
    assert text == "Open slowly.\n\nIt bursts above 9 bar.\n\n> Steam.\n>\n> J. Reuter"
    assert list(read_document(path).left_out.values()) == [2]


def test_unknown_elements_are_part_of_their_sentence(tmp_path):
    page = (
        "<p>Press <x-key>Enter</x-key> in <st1:City w:st='on'>Lindau</st1:City> near <nobr>gate 12</nobr>.<o:p></o:p>"
    )
    assert titles_and_texts(write(tmp_path / "a.html", page)) == [('"a"', "Press Enter in Lindau near gate 12.")]


@pytest.mark.parametrize(
    ("formula", "text"),
    [
        (  # MediaWiki
            '<span class="mwe-math-element"><math alttext="{\\displaystyle E=mc^{2}}"><mi>E</mi><annotation encoding='
            '"application/x-tex">{\\displaystyle E=mc^{2}}</annotation></math><img alt="E=mc^{2}"></span>',
            "$E=mc^{2}$",
        ),
        (  # KaTeX
            '<span class="katex"><span class="katex-mathml"><math><mi>x</mi><annotation encoding="application/x-tex">'
            'x^2</annotation></math></span><span class="katex-html"><span>x</span><span>2</span></span></span>',
            "$x^2$",
        ),
        (  # MathJax 2
            '<span class="MathJax_Preview">x2</span><span class="MathJax"><span>x</span><span>2</span></span>'
            '<script type="math/tex">x^2</script>',
            "$x^2$",
        ),
        (  # MathJax 3
            "<mjx-container><mjx-math>x2</mjx-math><mjx-assistive-mml><math><mi>x</mi></math></mjx-assistive-mml>"
            "</mjx-container>",
            "x",
        ),
        ("<math><mi>x</mi> <mo>+</mo> <mn>1</mn></math>", "x+1"),
        (r'<span class="math">\(\frac{x_1}{2}\)</span>', r"$\frac{x_1}{2}$"),
        (r"<code>\(x\)</code>", r"`\(x\)`"),
    ],
)
def test_a_formula_is_there_once(tmp_path, formula, text):
    path = write(tmp_path / "a.html", f"<p>So {formula} holds.</p>")
    assert titles_and_texts(path) == [('"a"', f"So {text} holds.")]


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
    """The page of a WebForms application is one form."""
    page = """<body><form action="x"><input value="v"><button>Send</button><select><option>one</select>
        <table><tr><th>Ada Kern</th><td>1902</td></tr><tr><td><p>Bo</p></td><td>1903</td></tr></table>
        <div>10<sup>3</sup> m<sup>2</sup>, 19<sup>th</sup>, H<sub>2</sub>O</div>
        <details><summary>More</summary>text</details></form></body>"""
    text = "| Ada Kern | 1902 |\n| --- | --- |\n| Bo | 1903 |\n\n10^3 m^2, 19th, H2O\n\nMore\n\ntext"
    assert titles_and_texts(write(tmp_path / "page.html", page)) == [('"page"', text)]


def test_tables_that_arrange_a_page_do_not_join_its_text(tmp_path):
    page = """<table><tr><td>Menu</td><td><h1>Title</h1><p>One.</p><p>Two.</p>
        <table><tr><td>a</td><td>b</td></tr></table></td></tr></table>"""
    assert titles_and_texts(write(tmp_path / "page.html", page)) == [
        ('"Title"', "Menu"),
        ('"Title"', "One.\n\nTwo.\n\n| a | b |\n| --- | --- |"),
    ]


def test_text_of_a_page_that_looks_like_markdown_is_text(tmp_path):
    page = "<p># one</p><p>a<br>---</p><p>snake_case and *stars*</p>"
    ((title, text),) = titles_and_texts(write(tmp_path / "page.html", page))
    assert title == '"page"'
    assert text == "\\# one\n\na\n\\---\n\nsnake_case and *stars*"


def test_deeply_nested_html_is_read(tmp_path):
    page = "<title>Without a body</title>" + "<div>" * 3_000 + "deep"
    assert titles_and_texts(write(tmp_path / "page.html", page)) == [('"Without a body"', "deep")]
    with pytest.raises(UnreadableDocument, match="nested too deeply"):
        passages(write(tmp_path / "lists.html", "<ul><li>" * 3_000 + "deep"))


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.html"])
def test_passages_are_canonical_text(tmp_path, name):
    ((_, text),) = titles_and_texts(write(tmp_path / name, "Besanc\u0327on o\ufb03ce Donau\xaddampf"))
    assert text == "Besan\xe7on office Donaudampf"


def test_a_pdf_has_a_section_per_page(tmp_path):
    path = write_pdf(
        tmp_path / "paper.pdf", ["The first page.", "", "The second\npage: ge\u2010\nändert, E-\nMail, divid-\ned."]
    )
    rows = passages(path)
    texts = ["The first page.", "The second page: geändert, E-Mail, divided."]
    assert [row["contents"] for row in rows] == [f'"paper"\n{text}' for text in texts]
    assert [row["metadata"]["page"] for row in rows] == [1, 3]
    assert rows[1]["id"] == "paper.pdf#page=3:0"
    document = read_document(path)
    assert (document.pages, document.empty_pages) == (3, [2])


@pytest.mark.parametrize(
    ("stated", "sizes", "title"),
    [
        ("A title", [(30, "Larger")], "A title"),
        ("Microsoft Word - draft.doc", [(30, "A Study of Weirs"), (10, "by X")], "A Study of Weirs"),
        ("", [(10, "No larger text")], "paper"),
        ("untitled", [(30, "7")], "paper"),
    ],
)
def test_the_title_of_a_pdf_is_stated_or_its_largest_text(tmp_path, stated, sizes, title):
    path = write_pdf(tmp_path / "paper.pdf", ["The text of the page is much longer than its title."], stated, sizes)
    assert read_document(path).sections[0].headings == (title,)


def test_bookmarks_of_a_pdf_are_headings(tmp_path):
    pypdf = pytest.importorskip("pypdf")
    pages = write_pdf(tmp_path / "pages.pdf", ["Preface.", "Chapter.", "More.", "End."])
    writer = pypdf.PdfWriter(clone_from=pages)
    chapter = writer.add_outline_item(title="Chapter", page_number=1)
    writer.add_outline_item(title="Part of it", page_number=2, parent=chapter)
    writer.add_outline_item(title="Last", page_number=2)
    writer.write(tmp_path / "book.pdf")
    headings = [section.headings[1:] for section in read_document(tmp_path / "book.pdf").sections]
    assert headings == [(), ("Chapter",), ("Chapter", "Part of it"), ("Last",)], "page 3 begins before the last one"


def test_encrypted_pdf_files_without_a_password_are_read(tmp_path):
    pypdf = pytest.importorskip("pypdf")
    pytest.importorskip("cryptography")
    whole = write_pdf(tmp_path / "whole.pdf", ["The lighthouse was lit in 1879."])
    for algorithm in ("RC4-128", "AES-128", "AES-256"):
        writer = pypdf.PdfWriter(clone_from=whole)
        writer.encrypt(user_password="", owner_password="owner", algorithm=algorithm)
        writer.write(tmp_path / "closed.pdf")
        ((_, text),) = titles_and_texts(tmp_path / "closed.pdf")
        assert text == "The lighthouse was lit in 1879."


def test_word_files(tmp_path):
    paragraphs = [
        ("Title", "Weirs"),
        ("heading 1", "History"),
        ("", "The weir of Almen &amp; co was closed."),
        ("heading 2", "Use"),
        ("", "Fire."),
    ]
    comment = '<w:comments xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"><w:t>No!</w:t>'
    extra = {"word/comments.xml": comment + "</w:comments>", "word/footer1.xml": "<empty/>"}
    path = write_docx(tmp_path / "draft2.docx", paragraphs, title="Microsoft Word - draft.doc", extra=extra.items())
    assert titles_and_texts(path) == [
        ('"Weirs > History"', "The weir of Almen & co was closed."),
        ('"Weirs > History > Use"', "Fire."),
    ]
    assert read_document(path).left_out == {"comments, headers and footers of Word files": 1}
    for title, expected in (("Sluices", '"Sluices"'), ("Dokument.docx", '"plain"')):
        assert titles_and_texts(write_docx(tmp_path / "plain.docx", [("", "Words.")], title)) == [(expected, "Words.")]


def test_formulas_and_charts_of_office_files_are_counted(tmp_path):
    """The libraries that read these files pass over them."""
    math = "http://schemas.openxmlformats.org/officeDocument/2006/math"
    formula = f'<m:oMath xmlns:m="{math}"><m:r><m:t>E=mc</m:t></m:r></m:oMath>'
    words = f"Energy</w:t></w:r>{formula}<w:r><w:t> is conserved."
    notes = f'<notes xmlns:m="{math}"><m:oMathPara>{formula}</m:oMathPara></notes>'
    parts = {"word/charts/chart1.xml": "<chart/>", "word/endnotes.xml": notes}
    path = write_docx(tmp_path / "energy.docx", [("", words)], extra=parts.items())
    assert titles_and_texts(path) == [('"energy"', "Energy is conserved.")]
    left_out = {"formulas of Word and PowerPoint files": 2, "charts, diagrams and media": 1}
    assert read_document(path).left_out == left_out
    slides = write_pptx(tmp_path / "energy.pptx", [("Energy", "Conserved.", "")])
    with zipfile.ZipFile(slides) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    slide = "ppt/slides/slide1.xml"
    contents[slide] = contents[slide].replace(b"</a:p>", formula.encode() + b"</a:p>", 1)
    with zipfile.ZipFile(slides, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    assert read_document(slides).left_out["formulas of Word and PowerPoint files"] == 1


def test_slides(tmp_path):
    slides = [("Weirs", "One\nTwo", "Say hello."), ("History", "Closed.", "")]
    path = write_pptx(tmp_path / "talk.pptx", slides, title="PowerPoint Presentation")
    first = "One\n\nTwo\n\n| left \\| cell | right |\n| --- | --- |\n\nSay hello."
    assert titles_and_texts(path) == [('"Weirs"', first), ('"Weirs > History"', "Closed.")]
    assert read_document(path).left_out == {"images without a description": 1}


def test_books(tmp_path):
    chapters = ["<h1>One</h1><p>It leaked.</p>", "<h1>Two</h1><p>Am 3. Oktober war <em>es</em> zu.</p>"]
    path = write_epub(tmp_path / "book.epub", chapters, "The Book of Weirs", "de-CH")
    assert read_document(path).language == "de"
    assert titles_and_texts(path) == [
        ('"The Book of Weirs > One"', "It leaked."),
        ('"The Book of Weirs > Two"', "Am 3. Oktober war es zu."),
    ]


def test_unreadable_documents_say_why(tmp_path, monkeypatch):
    pypdf = pytest.importorskip("pypdf")
    whole = write_pdf(tmp_path / "whole.pdf", ["text"])
    (tmp_path / "broken.pdf").write_bytes(whole.read_bytes()[:300])
    for name in ("latin.txt", "latin.html"):
        (tmp_path / name).write_bytes("Zürich".encode("latin-1"))
    writer = pypdf.PdfWriter(clone_from=whole)
    writer.encrypt("password", algorithm="RC4-128")
    writer.write(tmp_path / "closed.pdf")
    write_pdf(tmp_path / "scan.pdf", [""])
    for suffix in ("docx", "pptx", "epub"):
        (tmp_path / f"broken.{suffix}").write_bytes(b"PK nothing")
    write_epub(tmp_path / "page.docx", ["text"])
    write_epub(tmp_path / "page.pptx", ["text"])
    write_docx(tmp_path / "text.epub", [("", "text")])
    for name, reason in [
        ("broken.pdf", "not a PDF that can be read"),
        ("closed.pdf", "is encrypted"),
        ("scan.pdf", "contains no text"),
        ("latin.txt", "not UTF-8 (byte 1)"),
        ("latin.html", "not UTF-8 (byte 1)"),
        ("caf\udce9.txt", "the name is not UTF-8"),
        ("broken.docx", "is damaged, or no .docx file"),
        ("broken.pptx", "is damaged, or no .pptx file"),
        ("broken.epub", "is damaged, or no .epub file"),
        ("page.docx", "is damaged, or no .docx file"),
        ("page.pptx", "is damaged, or no .pptx file"),
        ("text.epub", "is damaged, or no .epub file"),
    ]:
        if name == "caf\udce9.txt":
            (tmp_path / name).write_bytes(b"text")
        with pytest.raises(UnreadableDocument, match=re.escape(f"{tmp_path / name}: {reason}")) as error:
            passages(tmp_path / name)
        assert "\n" not in str(error.value)
    monkeypatch.setattr("memsearcher_jax.data.converters.MAX_ARCHIVE_BYTES", 10)
    with pytest.raises(UnreadableDocument, match="its parts have"):
        passages(tmp_path / "text.epub")


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
