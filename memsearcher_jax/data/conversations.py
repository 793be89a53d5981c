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
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

from memsearcher_jax.canonical import canonical
from memsearcher_jax.data.sentences import WORD, split_text
from memsearcher_jax.jsonl import MalformedRow
from memsearcher_jax.types import Problem, Stream, StreamQuestion

LONGMEMEVAL = "longmemeval"
LOCOMO = "locomo"
LOCOMO_CATEGORIES = {1: "multi-hop", 2: "temporal", 3: "open-domain", 4: "single-hop", 5: "adversarial"}
_SESSION = re.compile(r"session_(\d+)")
_TURN_ID = re.compile(r"D\d+:\d+")


@dataclass(frozen=True)
class Session:
    """What was said on one date."""

    date: str
    turns: list[str]  # each with its speaker


@dataclass(frozen=True)
class Conversation:
    """One entry of a file: the text to read, and what is asked about it."""

    name: str
    chunks: list[str]
    questions: list[StreamQuestion]


def conversation_problem(where: str, entry: dict[str, Any], max_words: int, file: str) -> Problem:
    """The stream of one entry of `file`, a name without suffix. Raises MalformedRow for an entry of another layout.

    The files of LongMemEval have the same questions: their names tell them apart, as data sets and in the ids.
    """
    source = LONGMEMEVAL if "haystack_sessions" in entry else LOCOMO
    read = _longmemeval if source == LONGMEMEVAL else _locomo
    try:
        conversation = read(entry, max_words)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"neither a question of LongMemEval nor a conversation of LoCoMo ({type(error).__name__}: {error})"
        raise MalformedRow(f"{where}: {reason}") from error
    chunks = tuple(conversation.chunks)
    questions = tuple(conversation.questions)
    if not chunks or not questions:
        raise MalformedRow(f"{where}: has {len(chunks)} chunks of text and {len(questions)} questions")
    dataset = file.removesuffix("_cleaned") if file.startswith(f"{source}_") else source
    problem = Problem.of_stream(f"{dataset}/{conversation.name}", Stream(source, chunks, questions))
    return replace(problem, metadata={"source": dataset})


def _longmemeval(entry: dict[str, Any], max_words: int) -> Conversation:
    # The sessions of the oracle file are not in the order of their dates, which sort as text: "2023/05/20 (Sat) 02:21".
    dated = sorted(zip(entry["haystack_dates"], entry["haystack_sessions"], strict=True), key=itemgetter(0))
    sessions = []
    evidence = list[str]()
    for date, turns in dated:
        # Added, not formatted: a content that is null, or in parts, is no text to read.
        sessions.append(Session(date, [turn["role"] + ": " + turn["content"] for turn in turns]))
        evidence += [canonical(turn["content"]) for turn in turns if turn.get("has_answer")]
    kind = entry["question_type"] + ("_abs" if "_abs" in entry["question_id"] else "")
    text = canonical("The date is " + entry["question_date"] + ". " + entry["question"])
    question = StreamQuestion(text, _answer(entry["answer"]), kind, tuple(evidence))
    return Conversation(entry["question_id"], _chunks(sessions, max_words), [question])


def _locomo(entry: dict[str, Any], max_words: int) -> Conversation:
    conversation = entry["conversation"]
    matches = [_SESSION.fullmatch(name) for name in conversation]
    sessions = list[Session]()
    text_by_turn = dict[str, str]()
    for number in sorted(int(match[1]) for match in matches if match):
        turns = []
        for turn in conversation[f"session_{number}"]:
            image = f" [shares an image: {turn['blip_caption']}]" if turn.get("blip_caption") else ""
            text = canonical(turn["speaker"] + ": " + turn["text"] + image)
            text_by_turn[turn["dia_id"]] = text
            turns.append(text)
        sessions.append(Session(conversation[f"session_{number}_date_time"], turns))
    questions = [_locomo_question(question, text_by_turn) for question in entry["qa"]]
    return Conversation(str(entry["sample_id"]), _chunks(sessions, max_words), questions)


def _locomo_question(question: dict[str, Any], text_by_turn: dict[str, str]) -> StreamQuestion:
    kind = LOCOMO_CATEGORIES[question["category"]]
    answer = "Not mentioned" if kind == "adversarial" else _answer(question["answer"])
    # A text of the list may name several turns.
    turn_ids = dict.fromkeys(_TURN_ID.findall(" ".join(question.get("evidence") or ())))
    evidence = tuple(text_by_turn[turn_id] for turn_id in turn_ids if turn_id in text_by_turn)
    return StreamQuestion(canonical(question["question"]), answer, kind, evidence)


def _answer(value: Any) -> str:
    """Some answers are numbers."""
    if not isinstance(value, str | int):
        raise TypeError(f"an answer is {value!r}")
    return canonical(str(value))


def _chunks(sessions: Sequence[Session], max_words: int) -> list[str]:
    chunks = list[str]()
    for session in sessions:
        pieces = list[str]()
        words = 0
        for turn in session.turns:
            for start, end in split_text(turn, max_words):
                piece = turn[start:end]
                piece_words = len(WORD.findall(piece))
                if pieces and words + piece_words > max_words:
                    chunks.append("\n".join((session.date, *pieces)))
                    pieces = []
                    words = 0
                pieces.append(piece)
                words += piece_words
        if pieces:
            chunks.append("\n".join((session.date, *pieces)))
    return [canonical(chunk) for chunk in chunks]
