"""A writer of questions without a language model: a service that fills templates with the facts of a passage.

    python examples/template_writer.py --port 8000
    python launch/make_questions.py ... --writer.url http://127.0.0.1:8000/v1 --writer.model templates

It knows three kinds of facts: rows of Markdown tables, defaults of parameters, and definitions ("name: what it is").
The facts and the templates decide what it writes, so the same passage always gets the same question. A question of
several passages describes each next one by the words before its name. Asked a question about a passage, it answers from
the facts of that passage alone, and without one it knows nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any

MAX_ANSWER_WORDS = 8
MAX_PROPERTY_WORDS = 12
WORDS_BEFORE = 3  # of a mention, which say which of the mentions is meant
PASSAGE = re.compile(
    r"^Title: (.*)\n((?:.|\n)*?)(?=\n\nTitle: |\n\nWrite one question|\n\nQuestion: |\Z)", re.MULTILINE
)
SIGNATURE = re.compile(r"^\w+\((.+)\)$", re.MULTILINE)
DEFAULT = re.compile(r"\b([a-z]\w+)=(-?\d[\w.+-]*|'[^',()]+'|\"[^\",()]+\")(?=,|$)")
_TERM = r"[-*]?\s*`{0,2}([A-Za-z_][\w.-]*)`{0,2}(?: \([^)]*\))?: +"
_CONTINUED = rf"\n +(?!{_TERM.replace('(', '(?:', 1)})\S.*"
DEFINITION = re.compile(rf"^\s*{_TERM}(.+(?:{_CONTINUED})*)", re.MULTILINE)
CLAUSE_END = re.compile(r"[.;(](?:\s|$)")
TABLE = re.compile(r"^\|(.+)\|\n\|[ :|-]+\|\n((?:\|.+\|\n?)+)", re.MULTILINE)
LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")
QUESTION = re.compile(r"What is (?P<property>.+) in (?P<subject>.+)\?")
NOT_DEFINED = {"args", "returns", "raises", "example", "examples", "note", "notes", "references", "https", "http"}


@dataclass(frozen=True)
class Fact:
    """What a passage says of something that its title names."""

    property: str
    value: str


@dataclass(frozen=True)
class Page:
    title: str
    text: str

    @property
    def name(self) -> str:
        """What other pages call it: the last part of its title."""
        return self.title.rpartition(" > ")[2]

    def facts(self) -> list[Fact]:
        """The facts that a question can ask for: those with a short answer, each property once."""
        found = self._table_facts()
        for parameters in SIGNATURE.findall(self.text):
            for name, value in DEFAULT.findall(parameters):
                found.append(Fact(f"the default of {name}", value.strip("'\"")))
        for name, meaning in DEFINITION.findall(self.text):
            if name.lower() not in NOT_DEFINED:
                clause = CLAUSE_END.split(meaning)[0]
                found.append(Fact(name, " ".join(clause.replace("`", "").split())))
        properties = [fact.property for fact in found]
        return [fact for fact in found if _is_short(fact) and properties.count(fact.property) == 1]

    def _table_facts(self) -> list[Fact]:
        facts = []
        for header, body in TABLE.findall(self.text):
            columns = _cells(header)
            for row in body.splitlines():
                cells = _cells(row.strip("|"))
                if len(cells) == len(columns) and cells[0]:
                    for column, cell in list(zip(columns, cells, strict=True))[1:]:
                        column = column.removeprefix("the ") or "value"
                        facts.append(Fact(f"the {column} of {cells[0]}", cell))
        return facts

    def words_before(self, name: str) -> str:
        """The last words before the first mention of a name; "" if the page has none."""
        mention = re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", self.text)
        if mention is None:
            return ""
        words = re.findall(r"\w+", self.text[: mention.start()])
        return " ".join(words[-WORDS_BEFORE:])


def _cells(row: str) -> list[str]:
    return [LINK.sub(r"\1", cell).replace("`", "").strip(" *") for cell in row.split("|")]


def _is_short(fact: Fact) -> bool:
    words = re.findall(r"\w+", fact.value)
    return 0 < len(words) <= MAX_ANSWER_WORDS and len(fact.property.split()) <= MAX_PROPERTY_WORDS


def write(pages: Sequence[Page]) -> str:
    """A question that leads from page to page to a fact of the last one, as JSON; a refusal where there is none."""
    subject = pages[0].title
    for page, following in pairwise(pages):
        words = page.words_before(following.name)
        if not words:
            return f"{page.title} does not lead to {following.title} by a name."
        subject = f'the page that {subject} mentions after "{words}"'
    facts = pages[-1].facts()
    if not facts:
        return f"{pages[-1].title} has no fact with a short answer."
    digest = hashlib.sha256(subject.encode()).digest()
    fact = facts[int.from_bytes(digest[:8]) % len(facts)]
    return json.dumps({"question": f"What is {fact.property} in {subject}?", "answer": fact.value})


def answer(question: str, pages: Sequence[Page]) -> str:
    """The answer that one of the pages states, or "unknown"."""
    for page in pages:
        for fact in page.facts():
            if question == f"What is {fact.property} in {page.title}?":
                return fact.value
    return "unknown"


def reply(message: str) -> str:
    """The reply to a message of launch/make_questions.py."""
    pages = [Page(title, text) for title, text in PASSAGE.findall(message)]
    if "\n\nWrite one question" in message:
        return write(pages)
    question = message.rpartition("\n\nQuestion: ")[2]
    return answer(question, pages)


class Handler(BaseHTTPRequestHandler):
    """Chat completions."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = reply(body["messages"][-1]["content"])
        read = sum(len(message["content"].split()) for message in body["messages"])
        written = len(text.split())
        usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        self._send({"object": "chat.completion", "model": body.get("model", ""), "choices": [choice], "usage": usage})

    def _send(self, answer: dict[str, Any]) -> None:
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Requests are not printed."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve chat completions that fill templates with facts of passages.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    flags = parser.parse_args()
    with ThreadingHTTPServer((flags.host, flags.port), Handler) as server:
        print(f"http://{flags.host}:{server.server_port}/v1", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
