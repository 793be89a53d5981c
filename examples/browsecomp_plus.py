"""BrowseComp-Plus as questions and passages: a fixed corpus of about 100,000 documents, 830 questions, judgements.

Its questions are published encrypted. `scripts_build_index/decrypt_dataset.py` of github.com/texttron/BrowseComp-Plus
writes them as `browsecomp_plus_decrypted.jsonl`; do not publish that file. `topics-qrels/qrel_evidence.txt` there names
the documents that a question needs. The corpus is `Tevatron/browsecomp-plus-corpus` on the Hub, rows of docid and text.

python -m examples.browsecomp_plus questions browsecomp_plus_decrypted.jsonl --qrels qrel_evidence.txt \\
    --out DATA/browsecomp_plus/test.jsonl
python -m examples.browsecomp_plus passages corpus.parquet --out passages.jsonl

python launch/evaluate.py --checkpoint DIR --benchmarks browsecomp_plus --data.root DATA \\
    --retrieval.corpus passages.jsonl --retrieval.method bm25 --judge.backend openai --judge.url URL --judge.model NAME

A passage is at most 350 words of one document, since the benchmark's own search returns 512 tokens of each; its id is
DOCID#START. The evaluation reports EM and the judge's accuracy, searches per question, the calibration error, and as
evidence recall the fraction of the documents of `qrel_evidence.txt` of which any passage was retrieved.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memsearcher_jax.data.readers import parquet_rows
from memsearcher_jax.data.sentences import split_text
from memsearcher_jax.jsonl import id_field, numbered_lines, parse_object, text_field
from memsearcher_jax.launch import cli

MAX_WORDS = 350
TITLE = re.compile(r"\A---\s*\n(?:.*\n)*?title:[ \t]*(.+)\n")
"""Of a document that begins with "key: value" lines."""


def read_questions(file: Path, qrels: Path) -> Iterator[dict[str, Any]]:
    """Rows in FlashRAG's layout. Raises ValueError for a question without a relevance judgement."""
    relevant = defaultdict[str, list[str]](list)
    for where, line in numbered_lines(qrels):
        try:
            query, _, document, grade = line.decode().split()
            if float(grade) > 0:
                relevant[query].append(document)
        except ValueError as error:
            raise ValueError(f"{where}: a line is QUESTION 0 DOCUMENT GRADE") from error
    for where, line in numbered_lines(file):
        row = parse_object(where, line)
        query = id_field(where, row, "query_id")
        if query not in relevant:
            raise ValueError(f"{qrels}: has no document for question {query}")
        metadata = {"source": "browsecomp_plus", "supporting_ids": relevant[query]}
        question = text_field(where, row, "query")
        answer = text_field(where, row, "answer")
        yield {"id": query, "question": question, "golden_answers": [answer], "metadata": metadata}


def read_documents(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """("file:row", row with docid and text) of a parquet or JSONL file."""
    if file.suffix == ".parquet":
        return parquet_rows(file, ("docid", "text"))
    return ((where, parse_object(where, line)) for where, line in numbered_lines(file))


def passages(where: str, document: dict[str, Any]) -> Iterator[dict[str, str]]:
    if document.get("text") == "":
        return
    docid = id_field(where, document, "docid")
    text = text_field(where, document, "text")
    title = match[1] if (match := TITLE.match(text)) else text.strip().partition("\n")[0]
    title = " ".join(title.replace('"', "'").split())[:200]
    for start, end in split_text(text, MAX_WORDS):
        yield {"id": f"{docid}#{start}", "contents": f'"{title}"\n{text[start:end]}'}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("questions", "passages"))
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--qrels", type=Path, default=Path("topics-qrels/qrel_evidence.txt"))
    parser.add_argument("--out", type=Path, required=True)
    flags = parser.parse_args()
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    partial = flags.out.with_name(f"{flags.out.name}.partial")
    with cli.one_line_errors(), partial.open("w", encoding="utf-8") as out:
        for file in flags.files:
            if flags.what == "questions":
                rows: Iterator[dict[str, Any]] = read_questions(file, flags.qrels)
            else:
                rows = (row for document in read_documents(file) for row in passages(*document))
            for row in rows:
                out.write(json.dumps(row, ensure_ascii=False) + "\n")
        partial.replace(flags.out)
    print(flags.out)


if __name__ == "__main__":
    main()
