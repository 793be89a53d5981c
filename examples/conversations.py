"""Writes invented conversations in the layout of LongMemEval's files, to try its evaluation without the published data.

python -m examples.conversations --out conversations.json --count 200
python launch/evaluate.py --config tiny_memalpha --checkpoint memsearcher_jax/assets/tiny_memalpha \\
    --data conversations.json --agent.question_tokens 48 --memalpha.chunk_tokens 120 --sampling.context_tokens 448 \\
    --training.seq_len 448 --judge.backend openai --judge.url URL --judge.model NAME

A conversation is a synthetic stream of Mem-alpha (data/synthetic/streams.py): each day is a session, whose statements
the user makes. One question is asked about one statement; the types of the question are those of LongMemEval.
"""

from __future__ import annotations

import argparse
import json
from datetime import datetime
from pathlib import Path
from typing import Any

from memsearcher_jax.data.synthetic.streams import Statement, Story, SyntheticStreamConfig, make_stories
from memsearcher_jax.launch import cli

TYPES = {
    "person": "single-session-user",
    "event": "temporal-reasoning",
    "fact": "single-session-assistant",
    "rule": "multi-session",
}


def layout(story: Story, number: int) -> dict[str, Any]:
    """A question about the story with its sessions, as an entry of longmemeval_s.json."""
    sessions = []
    dates = []
    asked = story.stream.questions[number % len(story.stream.questions)]
    for chunk, sentences in zip(story.stream.chunks, story.sentences_C, strict=True):
        answers = any(isinstance(sentence, Statement) and sentence.question == asked for sentence in sentences)
        day, _, said = chunk.partition(". ")
        turns: list[dict[str, Any]] = [{"role": "user", "content": said}, {"role": "assistant", "content": "Noted."}]
        if answers:
            turns[0]["has_answer"] = True
        sessions.append(turns)
        dates.append(datetime.strptime(day, "%d %B %Y").strftime("%Y/%m/%d (%a) 09:00"))
    ids = [f"session_{number}_{place}" for place in range(len(sessions))]
    return {
        "question_id": f"made_{number}",
        "question_type": TYPES[asked.kind],
        "question": asked.text,
        "answer": asked.answer,
        "question_date": dates[-1].replace("09:00", "21:00"),
        "haystack_session_ids": ids,
        "haystack_dates": dates,
        "haystack_sessions": sessions,
        "answer_session_ids": [id for id, turns in zip(ids, sessions, strict=True) if "has_answer" in turns[0]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1_000)
    flags = parser.parse_args()
    config = SyntheticStreamConfig(seed=flags.seed, train_chunks=10, statements=2, filler=1, questions=12)
    entries = [layout(story, number) for number, story in enumerate(make_stories(config, flags.count))]
    with cli.one_line_errors():
        flags.out.write_text(json.dumps(entries, indent=1))
    print(f"{flags.out}: {len(entries)} conversations")


if __name__ == "__main__":
    main()
