"""The documents of a folder as the passages of a corpus: Markdown, plain text, HTML and PDF.

A passage is part of one section of one document, so that its title names what it is about and its id says where it is.
The libraries that read the formats come with the extra `documents`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unicodedata import normalize

from memsearcher_jax.analyzer import SPACELESS
from memsearcher_jax.types import encodable

DOCUMENT_LIBRARIES = ("markdown_it", "bs4", "pypdf")  # the extra `documents`
WORD_TOKENS = 4  # assumed tokens of a word, with room for titles, when documents are cut into chunks of tokens
TITLE_SEPARATOR = " > "
PARAGRAPH_END = r"\n[ \t]*\n"
# In a script without spaces between words each character counts as a word, and so does its punctuation.
_CHARACTER = SPACELESS + "\u3001-\u303f\uff01-\uff60"
WORD = re.compile(rf"[{_CHARACTER}]|[^\s{_CHARACTER}]+")
SENTENCE = re.compile(rf"\S.*?(?:[.!?…][\"'”’)\]]*(?=\s)|[。！？](?!\s)|(?={PARAGRAPH_END})|\Z)", re.DOTALL)
FRONT_MATTER = re.compile(r"---[ \t]*\n(?=\w[\w-]*[ \t]*:)(?:\w[\w-]*[ \t]*:.*\n|[ \t#-].*\n|\n)*?---[ \t]*\n")
"""YAML of "key: value" lines, lists and indented lines. Other text after a rule at the beginning is content."""
BROWSER_ENCODINGS: dict[str, str] = dict.fromkeys(("us-ascii", "ascii", "iso-8859-1", "latin1", "latin-1"), "cp1252")
BROWSER_ENCODINGS |= {"gb2312": "gb18030", "shift_jis": "cp932", "x-sjis": "cp932", "euc-kr": "cp949"}
"""What browsers read in place of an encoding that a page names."""
DIVIDED = re.compile(r"(?<=\w)([-\xad\u2010])\n(?=(\w))")  # a word, or before a capital or a digit "E-Mail"
HTML_CELLS = ("td", "th")
BLOCK_END = "\n\n"
HTML_INLINE = re.compile(
    "a|abbr|bdi|bdo|big|b|cite|code|data|del|dfn|em|font|img|ins|i|kbd|label|mark|q|rp|rt|ruby|samp|small|span|strike|"
    "strong|sub|sup|s|time|tt|u|var|wbr"
)
# Of a form only the controls are left out: it may hold the whole page.
HTML_NO_CONTENT = re.compile("^(script|style|nav|footer|aside|noscript|template|svg|button|datalist|select|textarea)$")
HTML_NO_HEADING = re.compile("^(p|[uod]l|table|h[1-6])$")  # in a heading: it has no end, and holds the rest of the page


class UnreadableDocument(ValueError):
    """A document that cannot be read; the message is one line that starts with its path."""


@dataclass(frozen=True)
class Section:
    """The text between two headings, or a page of a PDF."""

    headings: tuple[str, ...]  # the document's title, and the headings down to the section's own
    text: str
    start: int = 0  # offset of `text`, in characters of the document's text, see `read_passages`
    page: int | None = None  # PDF: counted from 1


def find_documents(folder: Path) -> tuple[list[Path], dict[str, list[Path]]]:
    """The documents in a folder and its subfolders, sorted, and the files left out by the reason.

    Links are not followed, and nothing in a hidden folder is listed.
    """
    documents, left_out = list[Path](), dict[str, list[Path]]()
    for path in sorted(folder.rglob("*")):
        *parents, name = path.relative_to(folder).parts
        if any(parent.startswith(".") for parent in parents):
            continue
        if name.startswith("."):
            left_out.setdefault("hidden", []).append(path)
        elif path.is_symlink():
            left_out.setdefault("symbolic link", []).append(path)
        elif path.is_dir() and not os.access(path, os.R_OK | os.X_OK):  # its files are not listed
            left_out.setdefault("no permission", []).append(path)
        elif path.is_file() and path.suffix.lower() in READERS:
            documents.append(path)
        elif path.is_file():
            left_out.setdefault(path.suffix or path.name, []).append(path)
    return documents, left_out


def read_passages(folder: Path, document: Path, max_words: int) -> list[dict[str, Any]]:
    """The passages of a document in `folder`, at most `max_words` words each, which end where a sentence ends.

    Only a sentence of more than `max_words` words is cut. An empty document has no passages.

    Returns:
      Rows of a corpus in FlashRAG's layout. The id is unique, and says where the passage is. `metadata` holds the
      document's path in the folder as `source`, in a PDF the `page`, and the offsets `start` and `end`. They count
      characters, in NFC and with "\\n" as line end, of the file, or of the text of an HTML file or of a page of a PDF.

    Raises UnreadableDocument or OSError for a document that cannot be read, ImportError without the extra `documents`.
    """
    source = document.relative_to(folder).as_posix()
    if source != encodable(source):
        raise UnreadableDocument(f"{document}: the name is not UTF-8: rename it")
    rows = []
    for section in READERS[document.suffix.lower()](document):
        title = " ".join(TITLE_SEPARATOR.join(section.headings).replace('"', "'").split())
        place = f"{source}#page={section.page}" if section.page else source
        page = {"page": section.page} if section.page else {}
        for start, end in split_text(section.text, max_words):
            metadata = {"source": source, "start": section.start + start, "end": section.start + end, **page}
            contents = f'"{title}"\n{section.text[start:end]}'
            rows.append({"id": f"{place}:{metadata['start']}", "contents": contents, "metadata": metadata})
    return rows


def split_text(text: str, max_words: int) -> Iterator[tuple[int, int]]:
    """The (start, end) of consecutive passages of at most `max_words` words, without the space around them."""
    start, end, words = 0, 0, 0
    for sentence in SENTENCE.finditer(text):
        spans = [word.span() for word in WORD.finditer(text, *sentence.span())]
        if words and words + len(spans) > max_words:
            yield start, end
            words = 0
        for first in range(0, len(spans), max_words):
            if first:
                yield start, end
                words = 0
            run = spans[first : first + max_words]
            start, end, words = start if words else run[0][0], run[-1][1], words + len(run)
    if words:
        yield start, end


def read_text(path: Path) -> list[Section]:
    return [Section((path.stem,), _decode(path))]


def read_markdown(path: Path) -> list[Section]:
    """The sections keep their Markdown; front matter is left out."""
    from markdown_it import MarkdownIt

    text = _decode(path)
    body = front_matter.end() if (front_matter := FRONT_MATTER.match(text)) else 0
    line_starts = [body, *(body + match.end() for match in re.finditer("\n", text[body:])), len(text)]
    outline = _Outline(path.stem)
    start = body
    tokens = MarkdownIt("commonmark").parse(text[body:])
    for token, content in pairwise(tokens):
        if token.type == "heading_open" and token.map and not token.level:
            first, after = token.map
            outline.add_text(text[start : line_starts[first]], start)
            children = [child for child in content.children or () if child.type != "html_inline"]
            words = (" " if child.type.endswith("break") else child.content for child in children)
            outline.open(int(token.tag[1]), "".join(words))
            start = line_starts[after]
    outline.add_text(text[start:], start)
    return outline.sections


def read_html(path: Path) -> list[Section]:
    """The text of the page, without navigation, scripts and controls. Cells of a row are separated by " | "."""
    from bs4 import BeautifulSoup
    from bs4.element import NavigableString, Tag

    soup = BeautifulSoup(_decode(path, is_html=True), "html.parser")
    for element in (*soup(HTML_NO_CONTENT), *soup(class_="mw-editsection")):  # "[edit]" in headings of MediaWiki
        element.decompose()
    # Extracted, since without a <body>, which is optional, it would be part of the text.
    title = " ".join(soup.title.extract().get_text().split()) if soup.title else ""
    outline = _Outline(normalize("NFC", title) or path.stem)
    pieces, offset = list[str](), 0  # of the section's text: adding to one string would copy it each time

    def close() -> None:
        nonlocal offset
        text = normalize("NFC", "".join(pieces))
        outline.add_text(text, offset)
        pieces.clear()
        offset += len(text)

    todo: list[Any] = [soup]
    while todo:
        node = todo.pop()
        tag = node if isinstance(node, Tag) else None
        name = tag.name if tag else node[1:] if type(node) is str else ""  # "/p" is the end of a <p>
        if tag and re.fullmatch("h[1-6]", name) and not tag.find(HTML_NO_HEADING):
            close()
            for mark in tag(["a", "br"]):
                if not re.search(r"\w", mark.get_text()):  # the end of a line, or a link such as "#" to the heading
                    mark.replace_with(" ")
            outline.open(int(name[1]), normalize("NFC", tag.get_text()))
            continue
        if name in HTML_CELLS:
            if tag and tag.find_previous_sibling(HTML_CELLS) and pieces[-1:] != [BLOCK_END]:
                pieces.append(" | ")
        elif tag and name == "sup" and re.match(r"\s*[-+−\d]", tag.get_text()):
            pieces.append("^")  # 10<sup>3</sup> is not 103
        elif name and not HTML_INLINE.fullmatch(name) and pieces and pieces[-1] != BLOCK_END:
            pieces[-1] = pieces[-1].rstrip(" ")
            pieces.append(BLOCK_END)
        elif type(node) is NavigableString:  # comments and other markup are subclasses
            words = re.sub(r"\s+", " ", node)
            words = words.lstrip(" ") if not pieces or pieces[-1][-1:].isspace() else words
            if words := str(node) if node.find_parent("pre") else words:  # lines and indents of code
                pieces.append(words)
        if tag:
            todo += [f"/{name}", *reversed(tag.contents)]
    close()
    return outline.sections


def read_pdf(path: Path) -> list[Section]:
    """A section per page. Lines are joined, and words that were divided at the end of a line."""
    from pypdf import PdfReader
    from pypdf.errors import FileNotDecryptedError

    try:
        reader = PdfReader(path)  # which tries an empty password
        pages = [valid_text(page.extract_text()) for page in reader.pages]
        title = valid_text(str((reader.metadata and reader.metadata.title) or "")).strip()
    except FileNotDecryptedError as error:
        raise UnreadableDocument(f"{path}: is encrypted: remove the password first") from error
    except Exception as error:  # pypdf raises errors of many kinds for damaged files
        raise UnreadableDocument(f"{path}: not a PDF that can be read ({' '.join(str(error).split())})") from error
    if not any(page.strip() for page in pages):
        raise UnreadableDocument(f"{path}: contains no text: recognise the text of scanned pages (OCR) first")
    whole = (DIVIDED.sub(lambda end: "" if end[2].islower() else end[1], page) for page in pages)
    joined = [re.sub(r"[ \t]*\n(?!\s*\n)", " ", page) for page in whole]
    return [Section((title or path.stem,), page, page=number) for number, page in enumerate(joined, start=1)]


READERS = {".md": read_markdown, ".markdown": read_markdown, ".txt": read_text, ".pdf": read_pdf}
READERS |= dict.fromkeys((".html", ".htm"), read_html)
"""How to read a document, by the suffix of its name in lower case."""


class _Outline:
    def __init__(self, title: str):
        self.sections: list[Section] = []
        self._title = title
        self._open: list[tuple[int, str]] = []  # (level, heading)

    def open(self, level: int, heading: str) -> None:
        """Starts the section of a heading; it ends those of its own and of deeper levels."""
        self._open = [outer for outer in self._open if outer[0] < level]
        if heading := " ".join(heading.split()):
            self._open.append((level, heading))

    def add_text(self, text: str, start: int) -> None:
        """A section under the open headings. An <h1> or # heading replaces the document's title."""
        title = () if self._open and self._open[0][0] == 1 else (self._title,)
        if text.strip():
            self.sections.append(Section((*title, *(heading for _, heading in self._open)), text, start))


def valid_text(text: str) -> str:
    """The text in NFC, as models write it, with "?" for lone surrogates, which UTF-8 cannot represent."""
    return normalize("NFC", encodable(text))


def _decode(path: Path, is_html: bool = False) -> str:
    """The text of a file in NFC, as models write it, with line ends as Markdown's parser counts them.

    It is UTF-8, or HTML in the encoding that it names: one that was guessed would be read without an error.
    """
    content, named = path.read_bytes(), ""
    if is_html:
        from bs4.dammit import EncodingDetector

        marked = EncodingDetector.strip_byte_order_mark(content)[1]
        named = marked or EncodingDetector.find_declared_encoding(content, is_html=True) or ""
    try:
        # A page that was converted may still name another encoding. One in ISO-2022-JP has no other bytes than ASCII.
        text = content.decode(named if named == "iso-2022-jp" else "utf-8")
    except UnicodeDecodeError as error:
        try:
            text = content.decode(BROWSER_ENCODINGS.get(named, named))
        except (LookupError, ValueError):
            raise UnreadableDocument(f"{path}: not UTF-8 (byte {error.start}): convert it with iconv") from error
    return normalize("NFC", re.sub(r"\r\n?", "\n", text.removeprefix("\ufeff")))
