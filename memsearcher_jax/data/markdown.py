"""Markdown as sections: the text under each heading. Documents of other formats are converted to it first.

markdown-it-py finds the headings, PyYAML and tomllib read front matter.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

YAML_FRONT_MATTER = re.compile(r"---[ \t]*\n(?![ \t]*\n)(.*?)^(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL | re.MULTILINE)
TOML_FRONT_MATTER = re.compile(r"\+\+\+[ \t]*\n(.*?)^\+\+\+[ \t]*(?:\n|\Z)", re.DOTALL | re.MULTILINE)
YAML_KEY = re.compile(r"""["']?\w[^:\n]*:(?:[ \t]|\n)""")
YAML_TITLE = re.compile(r"""^["']?title["']?:[ \t]*["']?(.*?)["']?[ \t]*$""", re.MULTILINE)

DATA_IMAGE = re.compile(r"!\[([^\]]*)\]\([ \t]*<?data:[^)]*\)")
DATA_DEFINITION = re.compile(r"^ {0,3}\[[^\]\n]+\]:[ \t]*<?data:.*\n?", re.MULTILINE)
DATA_SOURCE = re.compile(r"<img\b[^>]*\bsrc\s*=\s*[\"']?data:[^>]*>", re.IGNORECASE)

FRONT_MATTER = "front matter, apart from its title"
EMBEDDED_IMAGES = "data of embedded images"


@dataclass(frozen=True)
class Section:
    """The text between two headings, or a page of a PDF."""

    headings: tuple[str, ...]  # the document's title, and the headings down to the section's own
    text: str
    start: int = 0  # offset of `text`, in characters of the document's text
    page: int | None = None  # of a PDF, counted from 1


@dataclass(frozen=True)
class FrontMatter:
    """The settings before a document's text. Without any, all fields are empty."""

    length: int = 0  # characters before the text
    title: str = ""
    language: str = ""


@dataclass(frozen=True)
class _Heading:
    level: int  # 1 to 6
    text: str
    first_line: int
    line_after: int


def read_front_matter(text: str) -> FrontMatter:
    """The YAML between two `---`, or `---` and `...`, or the TOML between two `+++`, at the beginning of a text.

    Other text after a rule is content, also where it reads as YAML behind an empty line, as for Pandoc. YAML that is
    invalid, as with a colon in a title, is still front matter if its first line is a key.
    """
    import yaml

    if match := TOML_FRONT_MATTER.match(text):
        try:
            return _front_matter(match.end(), tomllib.loads(match[1]))
        except tomllib.TOMLDecodeError:
            return FrontMatter()
    match = YAML_FRONT_MATTER.match(text)
    if not match:
        return FrontMatter()
    try:
        values = yaml.safe_load(match[1])
    except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: a date such as 2021-02-30
        if not YAML_KEY.match(match[1]):
            return FrontMatter()
        title = YAML_TITLE.search(match[1])
        values = {"title": title[1]} if title else {}
    if values is None and not match[1].strip():
        values = {}  # two rules with nothing between
    return _front_matter(match.end(), values) if isinstance(values, dict) else FrontMatter()


def _front_matter(length: int, values: dict[Any, Any]) -> FrontMatter:
    title = values.get("title")
    language = values.get("lang") or values.get("language")
    return FrontMatter(
        length,
        " ".join(str(title).split()) if isinstance(title, str | int | float) else "",
        language if isinstance(language, str) else "",
    )


def without_embedded_images(text: str, left_out: Counter[str]) -> str:
    """The text without images that are written into it as `data:` addresses; their descriptions stay. Counts them."""
    text, images = DATA_IMAGE.subn(r"\1", text)
    text, definitions = DATA_DEFINITION.subn("", text)
    text, elements = DATA_SOURCE.subn("", text)
    if images + definitions + elements:
        left_out[EMBEDDED_IMAGES] += images + definitions + elements
    return text


def sections(
    text: str, title: str, *, default_title: str, start: int = 0, is_title_above: bool = False
) -> list[Section]:
    """The sections of `text[start:]`, with their Markdown.

    The headings of a section begin with the document's title. It is the only first-level heading of the text, unless
    `is_title_above` says that `title` is a title of its own; else it is `title`; of a document that states none, it is
    each first-level heading for the text below it, and the first of them, or `default_title`, for other text.
    """
    from markdown_it import MarkdownIt

    line_starts = [start]
    for match in re.finditer("\n", text[start:]):
        line_starts.append(start + match.end())
    line_starts.append(len(text))
    headings = _headings(MarkdownIt("commonmark").parse(text[start:]))
    first_level = [heading.text for heading in headings if heading.level == 1 and heading.text]
    is_only_title = len(first_level) == 1 and not is_title_above
    replaces_title = not title or is_only_title
    document_title = first_level[0] if replaces_title and first_level else title or default_title
    found = list[Section]()
    path = list[_Heading]()
    offset = start

    def close(end: int) -> None:
        section = text[offset:end]
        if section.strip():
            names = tuple(heading.text for heading in path)
            is_titled = bool(path) and path[0].level == 1 and (replaces_title or path[0].text == document_title)
            found.append(Section(names if is_titled else (document_title, *names), section, offset))

    for heading in headings:
        close(line_starts[heading.first_line])
        path = [outer for outer in path if outer.level < heading.level]
        if heading.text:
            path.append(heading)
        offset = line_starts[heading.line_after]
    close(len(text))
    return found


def _headings(tokens: Sequence[Any]) -> list[_Heading]:
    """The headings outside quotations and lists, without their markup."""
    found = list[_Heading]()
    for token, content in pairwise(tokens):
        if token.type != "heading_open" or token.level or not token.map:
            continue
        words = list[str]()
        for child in content.children or ():
            if child.type.endswith("break"):
                words.append(" ")
            elif child.type != "html_inline":
                words.append(child.content)
        text = " ".join("".join(words).split())
        found.append(_Heading(int(token.tag[1]), text, *token.map))
    return found
