"""HTML, Word, PowerPoint and EPUB files as Markdown, and PDF files as pages of text.

Beautiful Soup removes what is no content of a page and html-to-markdown converts the rest. Word (by mammoth) and
PowerPoint (by python-pptx) become HTML first; EPUB is a collection of HTML. PDFium reads PDF. All come with the extra
`documents`. What is left out is counted by kind.
"""

from __future__ import annotations

import re
import statistics
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree

LIBRARIES = ("markdown_it", "yaml", "bs4", "html_to_markdown", "mammoth", "pptx", "pypdfium2")  # the extra `documents`

NO_TEXT = "script, style, template, noscript, svg, link, meta, .mw-editsection, a.headerlink"
"""Elements that no reader sees as text of a page, or as marks beside its headings."""
PAGE_PARTS = (
    "nav, [role=navigation], [role=search], button, datalist, select, textarea, input, video, audio, iframe, canvas, "
    "aside:not(:is(main, article) aside), footer:not(:is(main, article, blockquote, figure) footer)"
)
INLINE_MARKUP = (
    "a, abbr, b, bdi, bdo, big, cite, data, del, dfn, em, font, i, ins, mark, s, small, span, strike, strong, sub, "
    "sup, time, tt, u, var, wbr"
)
"""Elements whose text is kept without their markup."""
CAPTIONS = "summary, legend, figcaption"  # which html-to-markdown would emphasise
LAYOUT_TABLES = "table:has(table, h1, h2, h3, h4, h5, h6, pre, blockquote), table[role=presentation]"
TABLE_PARTS = ["caption", "thead", "tbody", "tfoot", "tr", "td", "th"]
MATHJAX_OUTPUT = ".MathJax_Preview, .MathJax, .MathJax_Display, .MathJax_SVG, .MathJax_CHTML, .MJX_Assistive_MathML"
FORMULA_IMAGES = ".katex-html, .mwe-math-element img"
DISPLAY_STYLE = re.compile(r"^\{\\(?:displaystyle|textstyle)\s*(.*)\}$", re.DOTALL)
TEX_DELIMITERS = re.compile(r"\\\((.+?)\\\)|\\\[(.+?)\\\]")
EXPONENT = re.compile(r"\s*[-+−\d]")

PARTS = "navigation, side bars, footers and controls of pages"
IMAGES = "images without a description"
GRAPHICS = "charts, diagrams and media"
WORD_EXTRAS = "comments, headers and footers of Word files"
WORD_TEXT = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}t"
FORMULAS = "formulas of Word and PowerPoint files"
FORMULA = "{http://schemas.openxmlformats.org/officeDocument/2006/math}oMath"
FORMULA_PARTS = re.compile(r"(word/(document|footnotes|endnotes)|ppt/slides/slide\d+)\.xml")
WORD_GRAPHICS = re.compile(r"word/(charts/chart|diagrams/data)\d*\.xml")
WORD_EXTRA_PARTS = re.compile(r"word/(comments|header\d*|footer\d*)\.xml")

JUNK_TITLE = re.compile(
    r"(microsoft (word|powerpoint|excel)\b.*|powerpoint presentation|presentation|untitled.*|document\s*\d*|title|"
    r"slide \d+|word document|.*\.(docx?|pptx?|rtf|odt|tex|indd|qxd|pdf|dvi|ps|html?))",
    re.IGNORECASE,
)
"""Titles that programs write: they say which program or file a document was made with."""
MAX_ARCHIVE_BYTES = 2_000_000_000
MIN_TITLE_SIZE = 1.2  # of the largest letters of a PDF's first page, relative to the median
TITLE_CHARS = 3_000  # of that page, whose sizes are compared
MAX_TITLE_CHARS = 200
LINE_HYPHEN = re.compile(r"(?:(?<=\w)[-\xad\u2010]\n|\ufffe)(?=(\w?))")
"""A hyphen at the end of a line. PDFium writes U+FFFE for a hyphen that it takes for one of division."""


class ConversionError(ValueError):
    """A document cannot be converted; the message is one line without the document's name."""


@dataclass
class Converted:
    """The text of a document as Markdown."""

    markdown: str
    title: str = ""  # "" if the document states none
    language: str = ""  # an ISO 639 code, if it states one
    is_title_above: bool = True  # whether the title is above all headings, and not another name of the first
    left_out: Counter[str] = field(default_factory=Counter)  # by kind


@dataclass(frozen=True)
class PdfPage:
    text: str
    headings: tuple[str, ...]  # of the bookmarks that lead to it


@dataclass(frozen=True)
class PdfText:
    pages: list[PdfPage]
    title: str  # "" if neither its properties nor its first page show one


def html_to_markdown(html: str, left_out: Counter[str]) -> Converted:
    """The content of a page, without links, emphasis and images; with headings, lists, tables and program text.

    Raises ConversionError for a page that is nested too deeply.
    """
    from bs4 import BeautifulSoup

    soup = BeautifulSoup(html, "html.parser")
    title = " ".join(soup.title.extract().get_text().split()) if soup.title else ""
    language = str(soup.html.get("lang") or "") if soup.html else ""
    _write_formulas(soup)
    for element in soup.select(NO_TEXT):
        element.decompose()
    for part in soup.select(PAGE_PARTS):
        if not part.decomposed:
            has_content = bool(part.get_text(strip=True)) or part.name in ("video", "audio", "iframe", "canvas")
            part.decompose()
            if has_content:
                left_out[PARTS] += 1
    _write_images(soup, left_out)
    _unwrap_inline_markup(soup)
    _unwrap_layout(soup)
    markdown = _convert(str(soup))
    return Converted(markdown, title, language.partition("-")[0].lower(), is_title_above=False, left_out=left_out)


def _write_formulas(soup: Any) -> None:
    """Each formula once, as TeX between dollar signs where the page has it: pages hold two or three renderings."""
    scripts = soup.select('script[type^="math/tex"]')
    for container in soup.select("mjx-container:has(math)"):
        container.replace_with(container.find("math"))
    for image in soup.select(FORMULA_IMAGES):
        image.decompose()
    if scripts:
        for element in soup.select(MATHJAX_OUTPUT):
            element.decompose()
    for script in scripts:
        script.replace_with(_formula(script.get_text()))
    for math in soup("math"):
        if math.decomposed:
            continue
        annotation = math.find("annotation", encoding=re.compile("tex", re.IGNORECASE))
        source = annotation.get_text() if annotation else str(math.get("alttext") or "")
        math.replace_with(_formula(source) if source.strip() else "".join(math.get_text().split()))


def _formula(source: str) -> str:
    source = " ".join(source.split())
    if styled := DISPLAY_STYLE.match(source):
        source = styled[1].strip()
    return f"${source}$"


def _write_images(soup: Any, left_out: Counter[str]) -> None:
    """The descriptions of images in their place."""
    for image in soup("img"):
        description = " ".join(str(image.get("alt") or "").split())
        if not description:
            left_out[IMAGES] += 1
        image.replace_with(description)


def _unwrap_inline_markup(soup: Any) -> None:
    """Text without emphasis and links; white space as a browser shows it. An exponent keeps its place: 10^3."""
    from bs4.element import NavigableString

    for element in soup.select(INLINE_MARKUP):
        if element.name == "sup" and EXPONENT.match(element.get_text()):
            element.insert(0, "^")
        element.unwrap()
    for text in soup.find_all(string=True):
        if type(text) is NavigableString and not text.find_parent("pre"):  # comments are a subclass
            words = re.sub(r"\s+", " ", text)
            text.replace_with(words if text.find_parent("code") else TEX_DELIMITERS.sub(r"$\1\2$", words))


def _unwrap_layout(soup: Any) -> None:
    """Tables that arrange a page become divisions. A division that holds one division only is removed."""
    from bs4.element import NavigableString

    for table in soup.select(LAYOUT_TABLES):
        for part in table(TABLE_PARTS):
            if part.find_parent("table") is table:
                part.name = "div"
    for table in soup.select(LAYOUT_TABLES):
        table.name = "div"
    for caption in soup.select(CAPTIONS):
        caption.name = "div"
    for division in soup("div"):
        siblings = [child for child in division.parent.contents if child is not division]
        is_alone = all(isinstance(sibling, NavigableString) and not sibling.strip() for sibling in siblings)
        if is_alone and division.parent.name == "div":
            division.parent.unwrap()


def _convert(html: str) -> str:
    from html_to_markdown import ConversionOptions, PreprocessingOptions, convert

    options = ConversionOptions(
        preprocessing=PreprocessingOptions(enabled=False),  # it would remove forms, which may hold the whole page
        extract_metadata=False,
        compact_tables=True,
        hidden_content="all",
        autolinks=False,
        expand_abbreviations=False,
        include_blockquote_citations=False,
    )
    result = convert(html, options)
    if any("depth" in str(warning.kind).lower() for warning in result.warnings):
        raise ConversionError("its elements are nested too deeply: save the page as text")
    return re.sub(r"[ \t]+\n", "\n", result.content or "")


def word_to_markdown(path: Path) -> Converted:
    """The body, tables and notes of a .docx file. A paragraph of the style "Title" is the title."""
    import mammoth
    from bs4 import BeautifulSoup

    left_out = Counter[str]()
    check_archive(path)
    _count_formulas(path, left_out)
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if WORD_EXTRA_PARTS.fullmatch(name) and _has_words(archive.read(name)):
                left_out[WORD_EXTRAS] += 1
            if WORD_GRAPHICS.fullmatch(name):
                left_out[GRAPHICS] += 1

    def no_image(image: Any) -> dict[str, str]:
        return {"alt": image.alt_text or ""}

    style_map = "p[style-name='Title'] => p.document-title:fresh"
    images = mammoth.images.img_element(no_image)
    try:
        with path.open("rb") as file:
            html = mammoth.convert_to_html(file, style_map=style_map, convert_image=images).value
    except OSError as error:  # mammoth's error for a file without a document in it
        raise ConversionError(f"is damaged, or no .docx file ({error})") from error
    soup = BeautifulSoup(html, "html.parser")
    titles = [title.extract().get_text(" ", strip=True) for title in soup.select("p.document-title")]
    converted = html_to_markdown(str(soup), left_out)
    converted.title = " ".join(titles) or _core_title(path)
    converted.is_title_above = bool(titles)  # a title among the properties may be an old one
    return converted


def _has_words(part: bytes) -> bool:
    return any((text.text or "").strip() for text in ElementTree.fromstring(part).iter(WORD_TEXT))


def _count_formulas(path: Path, left_out: Counter[str]) -> None:
    """Counts the formulas of an Office file, which neither mammoth nor python-pptx reads."""
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if FORMULA_PARTS.fullmatch(name):
                formulas = sum(1 for _ in ElementTree.fromstring(archive.read(name)).iter(FORMULA))
                if formulas:
                    left_out[FORMULAS] += formulas


def _core_title(path: Path) -> str:
    """The title among the properties of an Office file."""
    with zipfile.ZipFile(path) as archive:
        if "docProps/core.xml" not in archive.namelist():
            return ""
        properties = ElementTree.fromstring(archive.read("docProps/core.xml"))
    return stated_title(properties.findtext("{http://purl.org/dc/elements/1.1/}title"))


def stated_title(title: str | None) -> str:
    """The title on one line, or "" for one that a program wrote."""
    words = " ".join((title or "").split())
    return "" if JUNK_TITLE.fullmatch(words) else words


def slides_to_markdown(path: Path) -> Converted:
    """The slides of a .pptx file, each with a heading, its texts, tables and notes."""
    import pptx

    left_out = Counter[str]()
    check_archive(path)
    _count_formulas(path, left_out)
    presentation = pptx.Presentation(str(path))
    html = list[str]()
    headings = list[str]()
    for number, slide in enumerate(presentation.slides, start=1):
        title = slide.shapes.title
        words = " ".join(title.text_frame.text.split()) if title is not None else ""
        headings.append(words or f"Slide {number}")
        html.append(f"<h1>{escape(headings[-1])}</h1>")
        for shape in _shapes(slide.shapes):
            if title is None or shape.shape_id != title.shape_id:
                html.append(_shape_html(shape, left_out))
        if slide.has_notes_slide and slide.notes_slide.notes_text_frame is not None:
            html += _paragraphs(slide.notes_slide.notes_text_frame)
    converted = html_to_markdown("\n".join(html), left_out)
    converted.title = stated_title(presentation.core_properties.title) or "".join(headings[:1])
    converted.is_title_above = True
    return converted


def _shapes(shapes: Any) -> Iterator[Any]:
    """All shapes in order, with those of groups."""
    for shape in shapes:
        if hasattr(shape, "shapes"):
            yield from _shapes(shape.shapes)
        else:
            yield shape


def _shape_html(shape: Any, left_out: Counter[str]) -> str:
    if shape.has_text_frame:
        return "\n".join(_paragraphs(shape.text_frame))
    if shape.has_table:
        rows = list[str]()
        for row in shape.table.rows:
            cells = "".join(f"<td>{escape(cell.text_frame.text)}</td>" for cell in row.cells)
            rows.append(f"<tr>{cells}</tr>")
        return f"<table>{''.join(rows)}</table>"
    properties = shape.element.xpath(".//p:cNvPr")
    description = str(properties[0].get("descr") or "").strip() if properties else ""
    if description:
        return f"<p>{escape(description)}</p>"
    left_out[IMAGES if hasattr(shape, "image") else GRAPHICS] += 1
    return ""


def _paragraphs(text_frame: Any) -> list[str]:
    """The paragraphs of a text frame as HTML."""
    return [f"<p>{escape(paragraph.text)}</p>" for paragraph in text_frame.paragraphs if paragraph.text.strip()]


def epub_to_markdown(path: Path) -> Converted:
    """The pages of an .epub file in reading order."""
    left_out = Counter[str]()
    check_archive(path)
    with zipfile.ZipFile(path) as archive:
        container = ElementTree.fromstring(archive.read("META-INF/container.xml"))
        root_file = container.find(".//{*}rootfile")
        if root_file is None:
            raise ConversionError("names no package document")
        package_path = PurePosixPath(root_file.attrib["full-path"])
        package = ElementTree.fromstring(archive.read(str(package_path)))
        hrefs = {item.attrib["id"]: item.attrib["href"] for item in package.iterfind(".//{*}manifest/{*}item")}
        pages = list[str]()
        for reference in package.iterfind(".//{*}spine/{*}itemref"):
            href = unquote(hrefs[reference.attrib["idref"]])
            page = archive.read(str(package_path.parent / href)).decode("utf-8-sig")
            pages.append(html_to_markdown(page, left_out).markdown)
    title = stated_title(package.findtext(".//{http://purl.org/dc/elements/1.1/}title"))
    language = package.findtext(".//{http://purl.org/dc/elements/1.1/}language") or ""
    return Converted("\n".join(pages), title, language.strip().partition("-")[0].lower(), left_out=left_out)


def check_archive(path: Path) -> None:
    """Raises ConversionError for a file that would fill the memory when it is unpacked."""
    with zipfile.ZipFile(path) as archive:
        size = sum(entry.file_size for entry in archive.infolist())
    if size > MAX_ARCHIVE_BYTES:
        raise ConversionError(f"its parts have {size:,} bytes, more than {MAX_ARCHIVE_BYTES:,}")


def read_pdf(path: Path) -> PdfText:
    """The text of each page: lines are joined, and words that were divided at the end of a line.

    An empty password is tried. Raises ConversionError.
    """
    import pypdfium2

    try:
        with pypdfium2.PdfDocument(path) as pdf:
            headings = _bookmarks(pdf)
            texts = [pdf[number].get_textpage().get_text_range() for number in range(len(pdf))]
            title = stated_title(pdf.get_metadata_dict().get("Title"))
            title = title or (_largest_text(pdf[0].get_textpage()) if texts else "")
    except pypdfium2.PdfiumError as error:
        if "password" in str(error):
            raise ConversionError("is encrypted: remove the password first") from error
        raise ConversionError(f"not a PDF that can be read ({error})") from error
    pages = [PdfPage(_joined_lines(text), headings.get(number, ())) for number, text in enumerate(texts)]
    return PdfText(pages, title)


def _joined_lines(text: str) -> str:
    text = re.sub(r"\r\n?", "\n", text)
    whole = LINE_HYPHEN.sub(lambda end: "" if end[1].islower() else "-", text)
    return re.sub(r"[ \t]*\n(?!\s*\n)", " ", whole)


def _bookmarks(pdf: Any) -> dict[int, tuple[str, ...]]:
    """By page, counted from 0, the bookmarks that lead to the first that begins on it, else to the last before it."""
    first_on_page = dict[int, tuple[str, ...]]()
    last_on_page = dict[int, tuple[str, ...]]()
    path = list[str]()
    for bookmark in pdf.get_toc():
        destination = bookmark.get_dest()
        page = destination.get_index() if destination else None
        path = [*path[: bookmark.level], " ".join(bookmark.get_title().split())]
        if page is not None:
            first_on_page.setdefault(page, tuple(path))
            last_on_page[page] = tuple(path)
    headings = dict[int, tuple[str, ...]]()
    current: tuple[str, ...] = ()
    for page in range(len(pdf)):
        headings[page] = first_on_page.get(page, current)
        current = last_on_page.get(page, current)
    return headings


def _largest_text(page: Any) -> str:
    """The text in the largest letters of a page if they are clearly larger than the others; "" if they are not."""
    letters = list[str]()
    heights = list[float]()
    for index in range(min(TITLE_CHARS, page.count_chars())):
        _, bottom, _, top = page.get_charbox(index, loose=True)
        letters.append(page.get_text_range(index, 1))
        heights.append(round(top - bottom, 1))
    visible = [height for letter, height in zip(letters, heights, strict=True) if letter.strip()]
    if not visible or max(visible) < MIN_TITLE_SIZE * statistics.median(visible):
        return ""
    of_title = list[str]()
    for letter, height in zip(letters, heights, strict=True):
        if height == max(visible) or (of_title and not letter.strip()):
            of_title.append(letter or " ")
        elif of_title:
            break
    title = " ".join("".join(of_title).split())
    has_words = sum(letter.isalpha() for letter in title) >= 3
    return title if has_words and len(title) <= MAX_TITLE_CHARS else ""
