"""Finished trajectories on disk: gzip-compressed JSON lines, one file per training step or per host of an evaluation.

    RUN/trajectories/step_000012.jsonl.gz      one trajectory per line
    RUN/trajectories/part_0000.jsonl.gz        likewise, written by report/trajectory_log.py

    {"problem":  {"id", "question", "golden_answers", "metadata"},
     "rollout":  which of the problem's copies,
     "reward":   number, "reason": why the reward is what it is,
     "scores":   {"exact_match": number, ...},
     "context_rewards": [number],    one for each context of Mem-alpha, empty for the other workflows
     "outcome":  {"stop": value of agent.types.Stop, "answer", "counts", "error",
                  "turns": [{"memory", "reply", "calls", "queries": [{"text", "top_n"}],
                             "found": [{"error", "passages": [{"id", "contents", "score"}]}],
                             "observation", "rewrite", "new_memory"}]},
     "contexts": [{"ids": [int], "logprobs": [number], "sampled": [0 or 1]}],    one entry per token in all three
     "transcript": ChatML text of the last context}

Numbers that JSON cannot hold are spelt as `report/files.py` says. Everything else comes back equal to what was written,
given that a problem's metadata holds only what JSON can hold. `zcat FILE | head -1 | python -m json.tool` shows one.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memsearcher_jax.agent.types import (
    Context,
    Found,
    Outcome,
    Passage,
    Problem,
    Query,
    Stop,
    Trajectory,
    Turn,
)
from memsearcher_jax.jsonl import numbered_lines, parse_object
from memsearcher_jax.report.files import decode_float, encode_float, encode_line, replacing


@dataclass(frozen=True)
class Scored:
    """A trajectory and what it was worth."""

    trajectory: Trajectory
    reward: float
    reason: str = ""
    scores: dict[str, float] = field(default_factory=dict)  # exact_match, token_f1, ...
    context_rewards: tuple[float, ...] = ()  # one for each context, where these have rewards of their own; NaN: none


def step_path(directory: str | Path, step: int) -> Path:
    """Where the trajectories of a training step are; the names sort by step."""
    return Path(directory) / "trajectories" / f"step_{step:06d}.jsonl.gz"


def write_trajectories(path: str | Path, scored: Iterable[Scored]) -> None:
    """Writes the whole file beside `path`, then renames it: a reader never sees half a step.

    A file already there is replaced, since a resumed run replays its steps. Equal trajectories give equal bytes.

    Raises:
        ValueError: a problem's metadata holds a value that JSON cannot hold.
    """
    write_packed(path, packed(scored))


def packed(scored: Iterable[Scored]) -> bytes:
    """The content of a file. Contents one after the other are a file too, so that hosts can pack their own.

    Raises ValueError as `write_trajectories` does.
    """
    content = io.BytesIO()
    # The gzip header would hold the time and the file's name; both are left out so that equal input gives equal bytes.
    with gzip.GzipFile(filename="", fileobj=content, mode="wb", compresslevel=6, mtime=0) as file:
        for one in scored:
            file.write(encode(one))
    return content.getvalue()


def write_packed(path: str | Path, content: bytes) -> None:
    """Like `write_trajectories`, of what is packed already."""
    with replacing(Path(path)) as file:
        file.write(content)


def read_trajectories(path: str | Path) -> Iterator[Scored]:
    """The trajectories of one file, one at a time.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, or a line of it is no trajectory; the message names the line.
    """
    for where, line in numbered_lines(Path(path)):
        yield decode(where, line)


def encode(scored: Scored) -> bytes:
    """The line of one trajectory. Raises ValueError if its problem's metadata holds a value that JSON cannot hold."""
    try:
        return encode_line(_encode(scored)).encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"problem {scored.trajectory.problem.id!r} cannot be written as JSON: {error}") from error


def decode(where: str, line: bytes) -> Scored:
    """The inverse of `encode`; ValueError starts with `where` if the line is no trajectory."""
    return _decode(where, parse_object(where, line))


def _encode(scored: Scored) -> dict[str, Any]:
    trajectory = scored.trajectory
    problem, outcome = trajectory.problem, trajectory.outcome
    return {
        "problem": {
            "id": problem.id,
            "question": problem.question,
            "golden_answers": problem.golden_answers,
            "metadata": problem.metadata,
        },
        "rollout": trajectory.rollout,
        "reward": encode_float(scored.reward),
        "reason": scored.reason,
        "scores": {name: encode_float(value) for name, value in scored.scores.items()},
        "context_rewards": [encode_float(value) for value in scored.context_rewards],
        "outcome": {
            "stop": outcome.stop.value,
            "answer": outcome.answer,
            "counts": outcome.counts,
            "error": outcome.error,
            "turns": [_encode_turn(turn) for turn in outcome.turns],
        },
        "contexts": [
            {
                "ids": context.ids,
                "logprobs": [encode_float(value) for value in context.logprobs],
                "sampled": [int(flag) for flag in context.sampled],
            }
            for context in trajectory.contexts
        ],
        "transcript": trajectory.transcript,
    }


def _encode_turn(turn: Turn) -> dict[str, Any]:
    return {
        "memory": turn.memory,
        "reply": turn.reply,
        "calls": turn.calls,
        "queries": [{"text": query.text, "top_n": query.top_n} for query in turn.queries],
        "found": [
            {
                "error": found.error,
                "passages": [
                    {"id": passage.id, "contents": passage.contents, "score": encode_float(passage.score)}
                    for passage in found.passages
                ],
            }
            for found in turn.found
        ],
        "observation": turn.observation,
        "rewrite": turn.rewrite,
        "new_memory": turn.new_memory,
    }


def _decode(where: str, record: dict[str, Any]) -> Scored:
    try:
        problem, outcome = record["problem"], record["outcome"]
        return Scored(
            trajectory=Trajectory(
                problem=Problem(**(problem | {"golden_answers": tuple(problem["golden_answers"])})),
                rollout=record["rollout"],
                outcome=Outcome(
                    stop=Stop(outcome["stop"]),
                    answer=outcome["answer"],
                    turns=tuple(_decode_turn(turn) for turn in outcome["turns"]),
                    counts=outcome["counts"],
                    error=outcome["error"],
                ),
                contexts=tuple(_decode_context(context) for context in record["contexts"]),
                transcript=record["transcript"],
            ),
            reward=decode_float(record["reward"]),
            reason=record["reason"],
            scores={name: decode_float(value) for name, value in record["scores"].items()},
            context_rewards=tuple(decode_float(value) for value in record.get("context_rewards", ())),
        )
    except KeyError as error:
        raise ValueError(f"{where}: not a trajectory, {error} is missing") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{where}: not a trajectory: {error}") from error


def _decode_context(context: dict[str, Any]) -> Context:
    decoded = Context(
        ids=tuple(context["ids"]),
        logprobs=tuple(decode_float(value) for value in context["logprobs"]),
        sampled=tuple(bool(flag) for flag in context["sampled"]),
    )
    if not len(decoded.ids) == len(decoded.logprobs) == len(decoded.sampled):
        raise ValueError("a context's ids, logprobs and sampled differ in length")
    return decoded


def _decode_turn(turn: dict[str, Any]) -> Turn:
    return Turn(
        memory=turn["memory"],
        reply=turn["reply"],
        calls=tuple(turn["calls"]),
        queries=tuple(Query(**query) for query in turn["queries"]),
        found=tuple(
            Found(
                passages=tuple(
                    Passage(id=passage["id"], contents=passage["contents"], score=decode_float(passage["score"]))
                    for passage in found["passages"]
                ),
                error=found["error"],
            )
            for found in turn["found"]
        ),
        observation=turn["observation"],
        rewrite=turn["rewrite"],
        new_memory=turn["new_memory"],
    )
