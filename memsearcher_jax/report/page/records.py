"""Trajectories as JSON inside the report page, in blocks that the page's script parses when it needs them.

    stop_descriptions   {stop: description}
    index               [{"id", "question", "dataset", "stop", "correct", "reward", "turns", "tokens", "step", ...}]
    trajectories        [{"golden_answers", "questions", "reason", "scores", "turns", "tools", ...}]   in blocks
    passages            [contents]   in blocks, each passage once: rollouts of one question share passages

Text from models and web pages passes through `sanitize` and `embedded_json`: it can neither end its script element nor
contain invisible characters.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from typing import Any

from memsearcher_jax.jsonl import encode_float, encode_floats
from memsearcher_jax.report.console import safe_text, search_results
from memsearcher_jax.report.evaluation import numbers_of
from memsearcher_jax.report.memory_quality import TurnQuality, memory_quality
from memsearcher_jax.types import ScoredTrajectory, StopReason, ToolResult, TrajectorySummary, Turn

BLOCK_SIZE = 50  # trajectories or passages
MAX_TOOL_CHARACTERS = 20_000  # of one result of a tool

# Characters that could end a script element, open a comment in it or start an entity; line separators that old parsers
# reject; lone surrogates, which UTF-8 cannot represent. JSON has them only inside strings, so escapes are always valid.
_UNSAFE_IN_SCRIPT = re.compile("[<>&\u2028\u2029\ud800-\udfff]")


@dataclass
class TrajectoryRecords:
    """The records of a page; `add` is the `on_trajectory` of `read_run`."""

    index: list[dict[str, Any]] = field(default_factory=list)
    trajectories: list[dict[str, Any]] = field(default_factory=list)
    qualities: list[tuple[TurnQuality, ...]] = field(default_factory=list)
    passage_ids: dict[str, int] = field(default_factory=dict)  # contents to position in the page's passages

    def add(self, scored: ScoredTrajectory, summary: TrajectorySummary) -> None:
        problem = scored.trajectory.problem
        outcome = scored.trajectory.outcome
        quality = memory_quality(scored.trajectory)
        self.qualities.append(quality)
        entry = {
            "id": problem.id,
            "question": problem.question,
            "answer": outcome.answer,
            "dataset": summary.dataset,
            "stop": summary.stop.value,
            "correct": summary.correct,
            "accuracy": numbers_of(summary).get("accuracy"),
            "reward": encode_float(summary.reward),
            "turns": summary.turns,
            "tokens": sum(len(context.ids) for context in scored.trajectory.contexts),
            "step": summary.step,
            "rollout": scored.trajectory.rollout,
        }
        turns = []
        memory = ""  # after the previous turn
        for number, (turn, turn_quality) in enumerate(zip(outcome.turns, quality, strict=True)):
            has_length = number < len(summary.context_lengths)
            tokens = summary.context_lengths[number] if has_length else None
            turns.append(self._turn(turn, turn_quality, memory) | {"tokens": tokens})
            memory = turn.new_memory
        details = {
            "golden_answers": problem.golden_answers,
            "questions": [question.text for question in problem.stream.questions] if problem.stream else [],
            "reason": scored.reason,
            "scores": encode_floats(scored.scores),
            "error": outcome.error,
            "counts": encode_floats({name: count for name, count in outcome.counts.items() if count}),
            "turns": turns,
            "tools": list(map(_tool_call, scored.trajectory.tool_results)),
            # Only for workflows without turns, whose text is nowhere else.
            "transcript": "" if turns else scored.trajectory.transcript,
        }
        self.index.append(sanitize(entry))
        self.trajectories.append(sanitize(details))

    def _turn(self, turn: Turn, quality: TurnQuality, previous_memory: str) -> dict[str, Any]:
        thought, closed, action = turn.reply.partition("</think>")
        passages = [passage.contents for result in turn.results for passage in result.passages]
        # What calls that are no searches returned is in the observation alone.
        searched = bool(passages) and len(turn.calls) <= len(turn.queries)
        shown_in_full = searched and all(contents in turn.observation for contents in passages)
        searches = []
        for query, result in search_results(turn):
            found = [[self._passage_id(passage.contents), encode_float(passage.score)] for passage in result.passages]
            searches.append({"query": query.text, "top_n": query.top_n, "error": result.error, "passages": found})
        return {
            # null if it is the new memory of the previous turn, as it is nearly always.
            "memory": None if turn.memory == previous_memory else turn.memory,
            "thought": thought.strip() if closed else "",
            "action": action.strip() if closed else thought.strip(),
            "searches": searches,
            "observation": "" if shown_in_full else turn.observation,
            "rewrite": "" if turn.new_memory else turn.rewrite,
            "new_memory": turn.new_memory,
            "has_memory": bool(turn.memory or turn.rewrite),
            **{name: asdict(trace) for name, trace in quality.names.items()},  # golden and supporting
            "copied": quality.metrics.get("memory/copied"),
        }

    def _passage_id(self, contents: str) -> int:
        return self.passage_ids.setdefault(sanitize(contents), len(self.passage_ids))


def _tool_call(result: ToolResult) -> dict[str, str]:
    cut = len(result.text) - MAX_TOOL_CHARACTERS
    note = f"\n… {cut:,} more characters: the trajectory file has them" if cut > 0 else ""
    return {
        "tool": result.tool,
        "arguments": json.dumps(result.arguments, ensure_ascii=False),
        "text": result.text[:MAX_TOOL_CHARACTERS] + note,
        "error": result.error,
    }


def sanitize(value: Any) -> Any:
    """The JSON value with all text, keys included, as `safe_text` shows it."""
    if isinstance(value, str):
        return safe_text(value).plain
    if isinstance(value, dict):
        return {sanitize(name): sanitize(inner) for name, inner in value.items()}
    return [sanitize(inner) for inner in value] if isinstance(value, list | tuple) else value


def embedded_json(value: Any) -> str:
    """`value` as JSON for a script element, which no text in it can end.

    Raises ValueError or TypeError for a value that JSON cannot represent.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _UNSAFE_IN_SCRIPT.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def data_elements(records: TrajectoryRecords) -> str:
    """Script elements with the data. A browser does not run them; page.js parses a block when it is needed."""
    blocks = [("stop_descriptions", {stop.value: stop.description for stop in StopReason}), ("index", records.index)]
    for name, rows in (("trajectories", records.trajectories), ("passages", list(records.passage_ids))):
        blocks += [(name, rows[start : start + BLOCK_SIZE]) for start in range(0, len(rows), BLOCK_SIZE)]
    element = '<script type="application/json" data-rows="{}">{}</script>'
    return "\n".join(element.format(name, embedded_json(rows)) for name, rows in blocks)
