"""Trajectories as the report page's browser reads them: JSON inside the page, in blocks that are parsed when needed.

    why            {stop: what it means}
    index          [{"id", "question", "dataset", "stop", "right", "reward", "turns", "tokens", "step", ...}]   all
    trajectories   [{"golden", "reason", "scores", "counts", "error", "turns": [...], "transcript"}]   in blocks
    passages       [contents]   in blocks, each passage once, for the rollouts of one question find the same ones

Everything a model or a web page wrote goes through `spelt` and `embedded_json`: as text it can neither end the element
that it stands in nor hide characters from the reader.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from memsearcher_jax.agent.types import Found, Turn
from memsearcher_jax.report.console import WHY, plain
from memsearcher_jax.report.files import encode_float
from memsearcher_jax.report.memory_quality import Names, Rules, TrajectoryQuality, TurnQuality, memory_quality
from memsearcher_jax.report.page_facts import Facts
from memsearcher_jax.report.trajectories import Scored

BLOCK = 50  # trajectories, and passages, of one block

# What could end a script element, open a comment in it or start an entity; line ends that old parsers choke on; halves
# of surrogate pairs, which UTF-8 cannot hold. Outside strings JSON has none of them, so the escape is always right.
_UNSAFE_IN_SCRIPT = re.compile("[<>&\u2028\u2029\ud800-\udfff]")


@dataclass
class Browsed:
    """Collects the records of a page; `add` is what `read_run` calls for each trajectory."""

    rules: Rules  # what a text must hold to hold a golden answer
    index: list[dict[str, Any]] = field(default_factory=list)
    trajectories: list[dict[str, Any]] = field(default_factory=list)
    qualities: list[TrajectoryQuality] = field(default_factory=list)  # of the memories
    numbers: dict[str, int] = field(default_factory=dict)  # passage contents to its number

    @property
    def passages(self) -> list[str]:
        return list(self.numbers)

    def add(self, scored: Scored, facts: Facts) -> None:
        problem, outcome = scored.trajectory.problem, scored.trajectory.outcome
        quality = memory_quality(scored.trajectory, self.rules)
        self.qualities.append(quality)
        self.index.append(
            _spelt_all(
                {
                    "id": problem.id,
                    "question": problem.question,
                    "answer": outcome.answer,
                    "dataset": facts.dataset,
                    "stop": facts.stop.value,
                    "right": facts.right,
                    "reward": encode_float(facts.reward),
                    "turns": facts.turns,
                    "tokens": sum(len(context.ids) for context in scored.trajectory.contexts),
                    "step": facts.step,
                    "rollout": scored.trajectory.rollout,
                }
            )
        )
        self.trajectories.append(
            _spelt_all(
                {
                    "golden": problem.golden_answers,
                    "reason": scored.reason,
                    "scores": {name: encode_float(value) for name, value in scored.scores.items()},
                    "counts": {name: count for name, count in outcome.counts.items() if count},
                    "error": outcome.error,
                    "turns": self._turns(outcome.turns, quality.turns, facts.tokens_of_turns),
                    # A workflow that leaves no turns leaves its text here alone.
                    "transcript": "" if outcome.turns else scored.trajectory.transcript,
                }
            )
        )

    def _turns(
        self, turns: Sequence[Turn], qualities: Sequence[TurnQuality], tokens: Sequence[int]
    ) -> list[dict[str, Any]]:
        records, memory = [], ""
        for number, (turn, quality) in enumerate(zip(turns, qualities, strict=True)):
            think, closed, act = turn.reply.partition("</think>")
            records.append(
                {
                    # Most turns start from what the one before them kept: that text is in the page once.
                    "memory": None if turn.memory == memory else turn.memory,
                    "think": think.strip() if closed else "",
                    "act": act.strip() if closed else think.strip(),
                    "searches": self._searches(turn),
                    "observation": "" if _shows_all(turn) else turn.observation,
                    "rewrite": "" if turn.new_memory else turn.rewrite,
                    "kept": turn.new_memory,
                    "remembers": bool(turn.memory or turn.rewrite),
                    "golden": _names(quality.golden),
                    "supporting": _names(quality.supporting),
                    "copied": quality.text.get("copied"),
                    "tokens": tokens[number] if number < len(tokens) else None,
                }
            )
            memory = turn.new_memory
        return records

    def _searches(self, turn: Turn) -> list[dict[str, Any]]:
        # Where the search itself failed there are queries without results.
        found = turn.found if len(turn.found) == len(turn.queries) else (Found(error="no result"),) * len(turn.queries)
        return [
            {
                "query": query.text,
                "top_n": query.top_n,
                "error": one.error,
                "passages": [[self._number(passage.contents), encode_float(passage.score)] for passage in one.passages],
            }
            for query, one in zip(turn.queries, found, strict=True)
        ]

    def _number(self, contents: str) -> int:
        return self.numbers.setdefault(spelt(contents), len(self.numbers))


def _shows_all(turn: Turn) -> bool:
    """Whether what the model was shown is the passages themselves, uncut: then the page need not hold it again."""
    passages = [passage.contents for found in turn.found for passage in found.passages]
    return bool(passages) and all(contents in turn.observation for contents in passages)


def _names(names: Names | None) -> dict[str, list[str] | None] | None:
    """What docs/memory_quality.md says of a turn's golden answers or supporting passages; None if there are none."""
    return names and {"shown": names.shown, "held": names.held, "lost": names.lost}


def spelt(text: str) -> str:
    """`text` with control characters and marks that turn the direction of text spelt out, as on the terminal."""
    return plain(text).plain


def embedded_json(value: Any) -> str:
    """`value` as JSON that may stand inside a script element: no text in it can end the element.

    Raises ValueError or TypeError for what JSON cannot hold.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _UNSAFE_IN_SCRIPT.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def data_elements(browsed: Browsed) -> str:
    """The script elements with the data; a browser does not run them, and page.js parses a block when it is needed."""
    elements = [_element("why", {stop.value: why for stop, why in WHY.items()}), _element("index", browsed.index)]
    for name, rows in (("trajectories", browsed.trajectories), ("passages", browsed.passages)):
        elements += [_element(name, rows[start : start + BLOCK]) for start in range(0, len(rows), BLOCK)]
    return "\n".join(elements)


def _element(name: str, rows: Any) -> str:
    return f'<script type="application/json" data-rows="{name}">{embedded_json(rows)}</script>'


def _spelt_all(value: Any) -> Any:
    """The same JSON value with every text in it spelt out, names of fields included."""
    if isinstance(value, str):
        return spelt(value)
    if isinstance(value, dict):
        return {spelt(name): _spelt_all(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_spelt_all(one) for one in value]
    return value
