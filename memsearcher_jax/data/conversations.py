"""Long conversations as streams: LongMemEval and LoCoMo, from the JSON files that their authors publish.

LongMemEval (`longmemeval_s.json`, `_m`, `_oracle`): a list of questions with `question_id`, `question_type`,
`question`, `answer`, `question_date`, `haystack_dates` and `haystack_sessions`, lists of turns {role, content}; a turn
with the evidence has `has_answer`. An id with `_abs` is a question to abstain from; its kind here has `_abs`, too. Each
question is a stream.

LoCoMo (`locomo10.json`): a list of conversations with `sample_id`, `conversation`, which holds lists of turns
{speaker, dia_id, text} as `session_1`, with `session_1_date_time`, and `qa`, {question, answer, category, evidence}.

A session becomes chunks of at most `max_words` words, which begin with its date and end where a turn does, or within a
turn of more words where a sentence does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from memsearcher_jax.data.documents import WORD, split_text, valid_text
from memsearcher_jax.jsonl import MalformedRow
from memsearcher_jax.types import Problem, Stream, StreamQuestion

LONGMEMEVAL, LOCOMO = "longmemeval", "locomo"
LOCOMO_CATEGORIES = {1: "multi-hop", 2: "temporal", 3: "open-domain", 4: "single-hop", 5: "adversarial"}
_SESSION, _TURN_ID = re.compile(r"session_(\d+)"), re.compile(r"D\d+:\d+")


def conversation_problem(where: str, entry: dict[str, Any], max_words: int, file: str) -> Problem:
    """The stream of one entry of `file`, a name without suffix. Raises MalformedRow for an entry of another layout.

    The files of LongMemEval have the same questions: their names tell them apart, as data sets and in the ids.
    """
    try:
        source, make = (LONGMEMEVAL, _longmemeval) if "haystack_sessions" in entry else (LOCOMO, _locomo)
        name, chunks, questions = make(entry, max_words)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"neither a question of LongMemEval nor a conversation of LoCoMo ({type(error).__name__}: {error})"
        raise MalformedRow(f"{where}: {reason}") from error
    if not chunks or not questions:
        raise MalformedRow(f"{where}: has {len(chunks)} chunks of text and {len(questions)} questions")
    dataset = file.removesuffix("_cleaned") if file.startswith(f"{source}_") else source
    problem = Problem.of_stream(f"{dataset}/{name}", Stream(source, tuple(chunks), tuple(questions)))
    return replace(problem, metadata={"source": dataset})


def _longmemeval(entry: dict[str, Any], max_words: int) -> tuple[str, list[str], list[StreamQuestion]]:
    # The sessions of the oracle file are not in the order of their dates, which sort as text: "2023/05/20 (Sat) 02:21".
    sessions = sorted(zip(entry["haystack_dates"], entry["haystack_sessions"], strict=True), key=lambda one: one[0])
    # Added, not formatted: a content that is null, or in parts, is no text to read.
    turns = [(date, [turn["role"] + ": " + turn["content"] for turn in session]) for date, session in sessions]
    kind = entry["question_type"] + ("_abs" if "_abs" in entry["question_id"] else "")
    question = valid_text("The date is " + entry["question_date"] + ". " + entry["question"])
    marked = [turn["content"] for _, session in sessions for turn in session if turn.get("has_answer")]
    asked = StreamQuestion(question, _answer(entry["answer"]), kind, tuple(map(valid_text, marked)))
    return entry["question_id"], _chunks(turns, max_words), [asked]


def _locomo(entry: dict[str, Any], max_words: int) -> tuple[str, list[str], list[StreamQuestion]]:
    conversation = entry["conversation"]
    numbers = sorted(int(match[1]) for name in conversation if (match := _SESSION.fullmatch(name)))
    turns, texts = [], dict[str, str]()
    for number in numbers:
        said = []
        for turn in conversation[f"session_{number}"]:
            image = f" [shares an image: {turn['blip_caption']}]" if turn.get("blip_caption") else ""
            texts[turn["dia_id"]] = valid_text(turn["speaker"] + ": " + turn["text"] + image)
            said.append(texts[turn["dia_id"]])
        turns.append((conversation[f"session_{number}_date_time"], said))
    questions = []
    for asked in entry["qa"]:
        kind = LOCOMO_CATEGORIES[asked["category"]]
        answer = "Not mentioned" if kind == "adversarial" else _answer(asked["answer"])
        named = _TURN_ID.findall(" ".join(asked.get("evidence") or ()))  # a text of the list may name several turns
        evidence = tuple(texts[name] for name in dict.fromkeys(named) if name in texts)
        questions.append(StreamQuestion(valid_text(asked["question"]), answer, kind, evidence))
    return str(entry["sample_id"]), _chunks(turns, max_words), questions


def _answer(value: Any) -> str:
    """Some answers are numbers."""
    if not isinstance(value, str | int):
        raise TypeError(f"an answer is {value!r}")
    return valid_text(str(value))


def _chunks(sessions: Sequence[tuple[str, Sequence[str]]], max_words: int) -> list[str]:
    chunks = list[str]()
    for date, turns in sessions:
        pieces, words = list[str](), 0
        for turn in turns:
            for start, end in split_text(turn, max_words):
                count = len(WORD.findall(turn[start:end]))
                if pieces and words + count > max_words:
                    chunks.append("\n".join((date, *pieces)))
                    pieces, words = [], 0
                pieces.append(turn[start:end])
                words += count
        if pieces:
            chunks.append("\n".join((date, *pieces)))
    return list(map(valid_text, chunks))
