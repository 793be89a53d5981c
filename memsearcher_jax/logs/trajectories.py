"""Finished trajectories on disk: gzip-compressed JSON Lines.

    RUN/trajectories/step_000012.jsonl.gz      the trajectories of one training step, written at once
    RUN/trajectories/host_0000.jsonl.gz       those of one host of an evaluation, appended one at a time

    {"problem":  {"id", "question", "golden_answers", "metadata", "stream": null or
                  {"source", "chunks", "questions": [{"text", "answer", "kind", "evidence"}]}},
     "rollout":  index within the group,
     "reward":   number, "reason": explanation of the reward,
     "scores":   {"exact_match": number, ...},
     "context_rewards": [number],    one per context for Mem-alpha, empty for other workflows
     "outcome":  {"stop": value of StopReason, "answer", "counts", "error",
                  "turns": [{"memory", "reply", "calls", "queries": [{"text", "top_n"}],
                             "results": [{"error", "passages": [{"id", "contents", "score"}]}],
                             "observation", "rewrite", "new_memory"}]},
     "contexts": [{"ids": [int], "logprobs": [number], "sampled": [0 or 1],    one entry per token in all three
                   "version": training steps of the policy that sampled it,
                   "memory": [0 or 1], one entry per token: a sampled token of a memory; absent unless
                   training.train_on or training.memory_weight tell these tokens apart}],
     "transcript": ChatML text of the last context,
     "tool_results": [{"tool", "arguments", "text", "error", "lost"}]    of tools of the run's own, absent without}

Non-finite numbers are encoded as in `memsearcher_jax.jsonl`. Everything else is read back equal to what was written,
provided that a problem's metadata contains only JSON values. `zcat FILE | head -1 | python -m json.tool` shows one.
"""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, fields
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from memsearcher_jax.jsonl import encode_float, encode_floats, encode_line, numbered_lines, parse_object
from memsearcher_jax.logs.atomic_write import atomic_write
from memsearcher_jax.logs.typed_json import decode
from memsearcher_jax.types import (
    Completion,
    Context,
    Outcome,
    ScoredTrajectory,
    SearchResult,
    StopReason,
    ToolResult,
    Trajectory,
    TrajectorySummary,
)

STEP_FILES = f"step_{'[0-9]' * 6}.jsonl.gz"
"""Pattern of the files of a training run: a copy in the same folder has another name."""
HOST_FILES = f"host_{'[0-9]' * 4}.jsonl.gz"
"""Pattern of the files of an evaluation."""
GZIP_MAGIC = b"\x1f\x8b"


def step_path(directory: str | Path, step: int) -> Path:
    """File with the trajectories of a training step; the names sort by step."""
    return Path(directory) / "trajectories" / f"step_{step:06d}.jsonl.gz"


def compress_trajectories(scored: Iterable[ScoredTrajectory]) -> bytes:
    """The content of a file; equal trajectories give equal bytes. Concatenated contents are a valid file too.

    Raises ValueError if a problem's metadata contains a value that JSON cannot represent.
    """
    content = io.BytesIO()
    # The gzip header would otherwise contain the time and the file name.
    with gzip.GzipFile(filename="", fileobj=content, mode="wb", compresslevel=6, mtime=0) as file:
        file.writelines(map(encode_trajectory, scored))
    return content.getvalue()


def read_trajectories(path: str | Path, *, log: bool = False) -> Iterator[ScoredTrajectory]:
    """The trajectories of one file, one at a time; of a log the complete ones, as `log_lines`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, or a line is not a trajectory; the message names the line.
    """
    lines = log_lines(Path(path)) if log else numbered_lines(Path(path))
    for where, line in lines:
        yield decode_trajectory(where, line)


def append_trajectory(log: BinaryIO, scored: ScoredTrajectory) -> None:
    """Append one trajectory to a log, a file opened with "ab"; it is on disk when this returns.

    Each line is a gzip member of its own, so a killed process loses no trajectory that it had finished. One process at
    most may append, after `clean_log`; others may read at the same time.
    """
    log.write(compress_trajectories([scored]))
    log.flush()
    os.fsync(log.fileno())


def log_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """As `numbered_lines`, without an incomplete end: of a log that is being written to, or whose process was killed.

    Raises ValueError if the file is damaged elsewhere.
    """
    try:
        yield from numbered_lines(path)
    except ValueError as error:
        is_cut = isinstance(error.__cause__, EOFError)
        if not is_cut and not (isinstance(error.__cause__, gzip.BadGzipFile) and _is_cut_after_one_byte(path)):
            raise


def _is_cut_after_one_byte(path: Path) -> bool:
    """Whether complete gzip members are followed by the first byte of another one, which is no EOFError to gzip."""
    content = path.read_bytes()
    if content[-1:] != GZIP_MAGIC[:1]:
        return False
    try:
        gzip.decompress(content[:-1])
    except (EOFError, gzip.BadGzipFile, zlib.error):
        return False
    return True


def clean_log(path: Path, keep: Callable[[ScoredTrajectory], bool]) -> None:
    """Remove an incomplete end, and the trajectories that are not to be kept. Raises ValueError if it is damaged."""
    kept = [scored for scored in read_trajectories(path, log=True) if keep(scored)]
    try:
        is_clean = len(kept) == sum(1 for _ in numbered_lines(path))
    except ValueError:  # the end is incomplete
        is_clean = False
    if not is_clean:
        atomic_write(path, b"".join(compress_trajectories([scored]) for scored in kept))


def encode_trajectory(scored: ScoredTrajectory) -> bytes:
    """The JSON line of one trajectory. Raises ValueError if its metadata contains a value JSON cannot represent."""
    trajectory = scored.trajectory
    # A workflow's own outcome has more fields, such as a memory, which are not stored.
    outcome = {field.name: getattr(trajectory.outcome, field.name) for field in fields(Outcome)}
    outcome["turns"] = list(map(asdict, trajectory.outcome.turns))
    outcome["stop"] = trajectory.outcome.stop.value
    if outcome["tool_reward"] is None:
        del outcome["tool_reward"]
    record = {
        "problem": asdict(trajectory.problem),
        "rollout": trajectory.rollout,
        "reward": encode_float(scored.reward),
        "reason": scored.reason,
        "scores": encode_floats(scored.scores),
        "context_rewards": encode_floats(scored.context_rewards),
        "outcome": encode_floats(outcome),
        "contexts": list(map(encode_context, trajectory.contexts)),
        "transcript": trajectory.transcript,
    }
    if trajectory.tool_results:
        record["tool_results"] = list(map(asdict, trajectory.tool_results))
    try:
        return encode_line(record).encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"problem {trajectory.problem.id!r} cannot be written as JSON: {error}") from error


def decode_trajectory(where: str, line: bytes) -> ScoredTrajectory:
    """The inverse of `encode_trajectory`; its ValueError starts with `where`."""
    record = parse_object(where, line)
    try:
        # The fields of a trajectory are those of its record, too.
        trajectory = {field.name: record.pop(field.name) for field in fields(Trajectory) if field.name in record}
        record["trajectory"] = trajectory
        scored = decode(ScoredTrajectory, record)
        for context in scored.trajectory.contexts:
            if not len(context.ids) == len(context.logprobs) == len(context.sampled):
                raise ValueError("a context's ids, logprobs and sampled differ in length")
            if len(context.memory) not in (0, len(context.ids)):
                raise ValueError("a context's ids and memory differ in length")
        return scored
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{where}: not a trajectory: {error}") from error


def encode_context(context: Context) -> dict[str, Any]:
    """The context as plain JSON."""
    logprobs = context.logprobs.tolist()
    if not np.isfinite(context.logprobs).all():
        logprobs = encode_floats(logprobs)
    record = {
        "ids": context.ids.tolist(),
        "logprobs": logprobs,
        "sampled": context.sampled.astype(int).tolist(),
        "version": context.version,
    }
    if len(context.memory):
        record["memory"] = context.memory.astype(int).tolist()
    return record


def encode_response(response: Completion | tuple[SearchResult, ...] | ToolResult) -> Any:
    """What answered a workflow's request, as plain JSON."""
    if isinstance(response, Completion):
        return asdict(response) | {"finish": response.finish.value}
    return list(map(asdict, response)) if isinstance(response, tuple) else asdict(response)


def decode_response(fields: Any) -> Completion | tuple[SearchResult, ...] | ToolResult:
    """The inverse of `encode_response`."""
    if isinstance(fields, list):
        return decode(tuple[SearchResult, ...], fields)
    return decode(Completion if "finish" in fields else ToolResult, fields)


def summarize_trajectory(scored: ScoredTrajectory, step: int | None = None) -> TrajectorySummary:
    """The summary of one trajectory; dataset and hops come from its problem's metadata."""
    trajectory = scored.trajectory
    outcome = trajectory.outcome
    hops = trajectory.problem.metadata.get("hops")
    source = trajectory.problem.metadata.get("source")
    return TrajectorySummary(
        dataset=source if isinstance(source, str) else "",
        hops=hops if isinstance(hops, int) else None,
        turns=len(outcome.turns),
        searches=sum(len(turn.queries) for turn in outcome.turns),
        stop=outcome.stop,
        reward=scored.reward,
        scores=scored.scores,
        context_lengths=context_lengths(trajectory),
        step=step,
        counts=outcome.counts,
        versions=tuple(context.version for context in trajectory.contexts),
        failure=failure(scored),
    )


def failure(scored: ScoredTrajectory) -> str:
    """Why an answer is no exact match: the first of `FAILURES` that holds; "" if it is one, or has no such score."""
    outcome = scored.trajectory.outcome
    titles = scored.trajectory.problem.supporting_titles
    if scored.scores.get("exact_match", 1) == 1 or outcome.stop.is_fault:
        return ""
    if outcome.stop is not StopReason.ANSWERED:
        return "no_answer"
    queries = [query.text for turn in outcome.turns for query in turn.queries]
    if len(set(queries)) < len(queries):
        return "repeated_search"
    shown = {passage.title.casefold() for passage in outcome.passages}
    if shown >= {title.casefold() for title in titles}:
        return "misread"
    return "answered_early" if len(queries) < len(titles) else "page_not_found"


def context_lengths(trajectory: Trajectory) -> tuple[int, ...]:
    """Tokens in the context at the end of each turn.

    An agent with a memory has one context per turn. In the contexts of an agent that keeps its history, each reply is a
    run of sampled tokens: a turn ends where its run ends, or that of the summary which it wrote after it.
    """
    contexts = trajectory.contexts
    turns = trajectory.outcome.turns
    if len(contexts) == 1 and len(turns) > 1:
        return tuple(_ends_of_runs(contexts[0]))
    ends = [end for context in contexts for end in _ends_of_runs(context)]
    runs_of_turns = [2 if turn.rewrite else 1 for turn in turns]
    if len(contexts) >= len(turns) or sum(runs_of_turns) != len(ends):
        return tuple(len(context.ids) for context in contexts)
    return tuple(ends[last - 1] for last in accumulate(runs_of_turns))


def _ends_of_runs(context: Context) -> list[int]:
    """Where the runs of sampled tokens end."""
    ends_T = context.sampled & ~np.append(context.sampled[1:], False)
    return (1 + np.flatnonzero(ends_T)).tolist()
