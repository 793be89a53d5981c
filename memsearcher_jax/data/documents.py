"""The documents of a folder as the passages of a corpus: Markdown, plain text, HTML, PDF, Word, PowerPoint and EPUB.

A passage is part of one section of one document, so that its title names what it is about and its id says where it is.
The libraries that read the formats come with the extra `documents`.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from memsearcher_jax.canonical import canonical
from memsearcher_jax.data import converters
from memsearcher_jax.data.converters import ConversionError, Converted
from memsearcher_jax.data.markdown import (
    FRONT_MATTER,
    Section,
    read_front_matter,
    sections,
    without_embedded_images,
)
from memsearcher_jax.data.sentences import ENGLISH, split_text
from memsearcher_jax.types import encodable

DOCUMENT_LIBRARIES = converters.LIBRARIES
WORD_TOKENS = 4  # assumed tokens of a word, with room for titles, when documents are cut into chunks of tokens
TITLE_SEPARATOR = " > "
BROWSER_ENCODINGS: dict[str, str] = dict.fromkeys(("us-ascii", "ascii", "iso-8859-1", "latin1", "latin-1"), "cp1252")
BROWSER_ENCODINGS |= {"gb2312": "gb18030", "shift_jis": "cp932", "x-sjis": "cp932", "euc-kr": "cp949"}
"""What browsers read in place of an encoding that a page names."""


SHOWN_NAMES = 3  # of files that a line names
SHOWN_PAGES = 10
DAMAGE = (KeyError, ValueError, AttributeError, TypeError, RecursionError, zipfile.BadZipFile, ElementTree.ParseError)
"""What the libraries raise for files of another structure."""


class UnreadableDocument(ValueError):
    """A document that cannot be read; the message is one line that starts with its path."""


@dataclass(frozen=True)
class Document:
    """The text of a document, and what its reader left out."""

    sections: list[Section]
    language: str = ""  # an ISO 639 code, if the document states one
    left_out: Counter[str] = field(default_factory=Counter)  # by kind
    pages: int = 0  # of a PDF
    empty_pages: list[int] = field(default_factory=list)  # of a PDF, counted from 1: scanned, or of pictures alone


@dataclass
class FolderReading:
    """What became of the documents of a folder."""

    rows: list[dict[str, Any]] = field(default_factory=list)  # of the corpus
    unreadable: list[str] = field(default_factory=list)  # messages
    empty: list[str] = field(default_factory=list)  # paths of documents without text
    partly_empty: list[str] = field(default_factory=list)  # PDF files some of whose pages have no text
    parts: Counter[str] = field(default_factory=Counter)  # left out of documents, by kind
    documents_by_part: Counter[str] = field(default_factory=Counter)

    def add(self, path: Path, document: Document, rows: list[dict[str, Any]]) -> None:
        self.rows += rows
        if not rows:
            self.empty.append(str(path))
        if document.empty_pages:
            numbers = ", ".join(map(str, document.empty_pages[:SHOWN_PAGES]))
            more = ", ..." if len(document.empty_pages) > SHOWN_PAGES else ""
            count = f"{len(document.empty_pages)} of {document.pages} pages"
            self.partly_empty.append(f"{path}: {count} ({numbers}{more}); OCR recognises scanned pages")
        self.parts.update(document.left_out)
        self.documents_by_part.update(document.left_out.keys())

    def lines(self, other_files: Mapping[str, Sequence[Path]]) -> list[str]:
        """One line for each thing that is not in the corpus."""
        lines = [f"cannot read {message}" for message in self.unreadable]
        lines += [f"without text: {place}" for place in (*self.empty, *self.partly_empty)]
        for part, count in self.parts.items():
            lines.append(f"left out of {self.documents_by_part[part]:,} documents: {part}: {count:,}")
        for reason, paths in other_files.items():
            names = [path.name for path in paths[:SHOWN_NAMES]]
            if len(paths) > SHOWN_NAMES:
                names.append("...")
            lines.append(f"left out, {reason}: {len(paths)} ({', '.join(names)})")
        return lines


def find_documents(folder: Path) -> tuple[list[Path], dict[str, list[Path]]]:
    """The documents in a folder and its subfolders, sorted, and the files left out by the reason.

    Links are not followed, and nothing in a hidden folder is listed.
    """
    documents = list[Path]()
    left_out = dict[str, list[Path]]()
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


def read_document(path: Path) -> Document:
    """The document in a file of one of the suffixes of `READERS`.

    Raises UnreadableDocument or OSError for a document that cannot be read, ImportError without the extra `documents`.
    """
    return READERS[path.suffix.lower()](path)


def read_passages(folder: Path, path: Path, max_words: int) -> list[dict[str, Any]]:
    """The passages of a document in `folder`; see `passages`. Raises as `read_document`."""
    return passages(folder, path, read_document(path), max_words)


def passages(folder: Path, path: Path, document: Document, max_words: int) -> list[dict[str, Any]]:
    """The passages of a document in `folder`, at most `max_words` words each, which end where a sentence ends.

    Only a sentence of more than `max_words` words is cut. An empty document has no passages.

    Returns:
      Rows of a corpus in FlashRAG's layout. The id is unique, and says where the passage is. `metadata` holds the
      document's path in the folder as `source`, in a PDF the `page`, and the offsets `start` and `end`. They count
      characters of the document's text: the file's own text if it is Markdown or plain text, without embedded images,
      else the Markdown that it was converted to, or the text of the page of a PDF; in the form of `canonical`, with
      "\\n" as line end.

    Raises UnreadableDocument for a name that is not UTF-8.
    """
    source = path.relative_to(folder).as_posix()
    if source != encodable(source):
        raise UnreadableDocument(f"{path}: the name is not UTF-8: rename it")
    rows = []
    for section in document.sections:
        title = " ".join(TITLE_SEPARATOR.join(section.headings).replace('"', "'").split())
        place = f"{source}#page={section.page}" if section.page else source
        page = {"page": section.page} if section.page else {}
        for start, end in split_text(section.text, max_words, document.language or ENGLISH):
            metadata = {"source": source, "start": section.start + start, "end": section.start + end, **page}
            contents = f'"{title}"\n{section.text[start:end]}'
            rows.append({"id": f"{place}:{metadata['start']}", "contents": contents, "metadata": metadata})
    return rows


def _read_text(path: Path) -> Document:
    return Document([Section((_stem(path),), _decode(path))])


def _read_markdown(path: Path) -> Document:
    """The sections keep their Markdown. Of front matter the title and the language are read."""
    left_out = Counter[str]()
    text = without_embedded_images(_decode(path), left_out)
    front_matter = read_front_matter(text)
    if front_matter.length:
        left_out[FRONT_MATTER] += 1
    found = sections(text, front_matter.title, default_title=_stem(path), start=front_matter.length)
    return Document(found, front_matter.language, left_out)


def _read_html(path: Path) -> Document:
    html = _decode(path, is_html=True)
    return _read_converted(path, lambda: converters.html_to_markdown(html, Counter()))


def _read_word(path: Path) -> Document:
    return _read_converted(path, lambda: converters.word_to_markdown(path))


def _read_slides(path: Path) -> Document:
    return _read_converted(path, lambda: converters.slides_to_markdown(path))


def _read_epub(path: Path) -> Document:
    return _read_converted(path, lambda: converters.epub_to_markdown(path))


def _read_converted(path: Path, convert: Callable[[], Converted]) -> Document:
    try:
        converted = convert()
    except ConversionError as error:
        raise UnreadableDocument(f"{path}: {error}") from error
    except DAMAGE as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UnreadableDocument(f"{path}: is damaged, or no {path.suffix} file ({reason})") from error
    text = canonical(converted.markdown)
    title = canonical(converted.title)
    found = sections(text, title, default_title=_stem(path), is_title_above=converted.is_title_above)
    return Document(found, converted.language, converted.left_out)


def _read_pdf(path: Path) -> Document:
    """A section for each page that has text."""
    try:
        pdf = converters.read_pdf(path)
    except ConversionError as error:
        raise UnreadableDocument(f"{path}: {error}") from error
    title = canonical(pdf.title) or _stem(path)
    found = list[Section]()
    empty = list[int]()
    for number, page in enumerate(pdf.pages, start=1):
        text = canonical(page.text)
        if text.strip():
            headings = tuple(canonical(heading) for heading in page.headings if heading and heading != pdf.title)
            found.append(Section((title, *headings), text, page=number))
        else:
            empty.append(number)
    if not found:
        raise UnreadableDocument(f"{path}: contains no text: recognise the text of scanned pages (OCR) first")
    return Document(found, pages=len(pdf.pages), empty_pages=empty)


READERS: dict[str, Callable[[Path], Document]] = {
    ".md": _read_markdown,
    ".markdown": _read_markdown,
    ".txt": _read_text,
    ".html": _read_html,
    ".htm": _read_html,
    ".xhtml": _read_html,
    ".pdf": _read_pdf,
    ".docx": _read_word,
    ".pptx": _read_slides,
    ".epub": _read_epub,
}
"""How to read a document, by the suffix of its name in lower case."""


def _stem(path: Path) -> str:
    return canonical(path.stem)


def _decode(path: Path, is_html: bool = False) -> str:
    """The text of a file in the form of `canonical`, with line ends as Markdown's parser counts them.

    It is UTF-8, or HTML in the encoding that it names: one that was guessed would be read without an error.
    """
    content = path.read_bytes()
    named = ""
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
    return canonical(re.sub(r"\r\n?", "\n", text))
