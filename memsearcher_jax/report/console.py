"""Trajectories and tables on the terminal.

Text from models and web pages is untrusted: console markup in it is not interpreted, and control characters, which
could move the cursor or recolour and rename the terminal, are shown as escapes.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memsearcher_jax.report.sources import sources_of
from memsearcher_jax.report.word_diff import word_diff
from memsearcher_jax.types import (
    Outcome,
    Problem,
    Query,
    SearchResult,
    StopReason,
    ToolResult,
    Trajectory,
    Turn,
)

MAX_PASSAGE_CHARACTERS = 240
MAX_SOURCES = 5

# C0 and C1 control characters except tab and newline; bidirectional marks, which can make text read differently from
# what it contains; lone surrogates, which no terminal encoding can represent.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def safe_text(text: str, style: str = "") -> Text:
    """`text` with unsafe characters shown as Python escapes (`\\x1b`) and without interpreting Rich markup."""
    return Text(_UNSAFE.sub(lambda match: ascii(match[0])[1:-1], text), style=style)


def shorten(text: str, limit: int) -> str:
    """`text` on one line, cut at `limit` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[:limit].rstrip() + " …"


def make_table(*columns: str, left: Collection[str] = ()) -> Table:
    """A table without borders. The columns after the first one are right-aligned, except those in `left`."""
    table = Table(box=None, header_style="dim", pad_edge=False)
    for name in columns:
        table.add_column(safe_text(name), justify="left" if name in (columns[0], *left) else "right")
    table.columns[0].overflow = "fold"  # a name that is cut does not name its row
    return table


def show_trajectory(trajectory: Trajectory, console: Console, *, reward: float | None = None, reason: str = "") -> None:
    """Print the question, every turn, the calls of tools of the run's own, and the outcome."""
    show_question(trajectory.problem, console)
    for number, turn in enumerate(trajectory.outcome.turns, 1):
        show_turn_start(number, turn.memory, console, has_memory=bool(turn.memory or turn.rewrite))
        show_reply(turn.reply, console)
        for query, result in search_results(turn):
            show_search(query, result, console)
        if turn.rewrite:
            show_rewrite(turn.memory, turn.new_memory, turn.rewrite, console)
    for result in trajectory.tool_results:
        show_call(result, console)
    show_end(trajectory.outcome, trajectory.problem, console, reward=reward, reason=reason)


def show_question(problem: Problem, console: Console) -> None:
    console.print(Text("question  ", style="bold").append_text(safe_text(problem.question)))


def search_results(turn: Turn) -> list[tuple[Query, SearchResult]]:
    """The queries of a turn with their results. A turn whose search failed has queries without results."""
    failed = len(turn.queries) != len(turn.results)
    results = (SearchResult(error="no result"),) * len(turn.queries) if failed else turn.results
    return list(zip(turn.queries, results, strict=True))


def show_turn_start(number: int, memory: str, console: Console, *, has_memory: bool) -> None:
    """Print the turn number and, if the agent has one, the memory at the start of the turn."""
    console.rule(Text(f"turn {number}"), align="left", style="cyan")
    if has_memory:
        _section(console, "memory", safe_text(memory) if memory else Text("empty", style="dim"))


def show_rewrite(old: str, new: str, reply: str, console: Console) -> None:
    """Print the changes of the rewrite, or the reply if it contains no memory."""
    if new:
        _section(console, "memory rewritten", _changes(old, new))
    else:
        _section(console, "rewrite without a memory", safe_text(reply))


def show_end(outcome: Outcome, problem: Problem, console: Console, *, reward: float | None, reason: str) -> None:
    """Print the answer with the golden answers, the reward and the stop reason."""
    console.rule(Text("end"), align="left", style="cyan")
    table = Table.grid(padding=(0, 2))
    table.add_row("answer", safe_text(outcome.answer, "bold") if outcome.stop is StopReason.ANSWERED else Text("none"))
    if problem.golden_answers:
        table.add_row("golden", safe_text(" | ".join(problem.golden_answers)))
    table.add_row("stopped", Text(f"{outcome.stop.value}: {outcome.stop.description}"))
    if outcome.error:
        table.add_row("error", safe_text(outcome.error, "red"))
    if reward is not None:
        table.add_row("reward", safe_text(f"{reward:.3f}  {reason}".rstrip()))
    for name, count in outcome.counts.items():
        if count:
            table.add_row(safe_text(name.replace("_", " ")), str(count))
    console.print(table)


def show_sources(outcome: Outcome, console: Console) -> None:
    """Print the passages of the searches that contain the answer."""
    sources, found = sources_of(outcome)
    lines = [safe_text(f"{passage.id}  {passage.title}") for passage in sources[:MAX_SOURCES]]
    heading = f"sources: {len(sources)} of the {found} passages found contain the answer"
    _section(console, heading, Text("\n").join(lines))


def show_reply(reply: str, console: Console) -> None:
    """Print a reply as thought and action. The prompt opens <think>, so a reply starts inside it."""
    think, closed, action = reply.partition("</think>")
    if not closed:
        _section(console, "reply", safe_text(reply.strip()))
        return
    _section(console, "think", safe_text(think.strip(), "italic"))
    if action.strip():
        _section(console, "action", safe_text(action.strip()))


def show_search(query: Query, result: SearchResult, console: Console) -> None:
    """Print the query and its shortened passages, or the error."""
    _section(console, "search", safe_text(query.text, "bold").append(f"  (top {query.top_n})", style="dim"))
    if result.error:
        console.print(Padding(safe_text(result.error, "red"), (0, 0, 0, 4), expand=False))
    for rank, passage in enumerate(result.passages, 1):
        _, _, body = passage.contents.partition("\n")
        line = Text(f"{rank}. ").append_text(safe_text(shorten(passage.title, MAX_PASSAGE_CHARACTERS), "bold"))
        line.append("  ").append_text(safe_text(shorten(body, MAX_PASSAGE_CHARACTERS), "dim"))
        line.append("  ").append_text(safe_text(f"[{passage.id}]", "dim"))
        console.print(Padding(line, (0, 0, 0, 4), expand=False))


def show_call(result: ToolResult, console: Console) -> None:
    """Print a call of a tool and its shortened result, or the error."""
    arguments = ", ".join(f"{name}={value!r}" for name, value in result.arguments.items())
    _section(console, result.tool, safe_text(shorten(arguments, MAX_PASSAGE_CHARACTERS), "bold"))
    text = safe_text(shorten(result.error or result.text, MAX_PASSAGE_CHARACTERS), "red" if result.error else "dim")
    console.print(Padding(text, (0, 0, 0, 4), expand=False))


def _section(console: Console, title: str, body: RenderableType) -> None:
    console.print(Text(title, style="bold magenta"))
    console.print(Padding(body, (0, 0, 0, 2), expand=False))


def _changes(old: str, new: str) -> Text:
    """`new` with additions and deletions marked as {+added+} and [-deleted-]; a first memory is shown as it is."""
    if not old.strip():
        return safe_text(new)
    marks = {"same": ("", "", ""), "added": ("{+", "+}", "green"), "removed": ("[-", "-]", "red")}
    text = Text()
    for change, run in word_diff(old, new):
        opening, closing, style = marks[change]
        words = run.strip()
        before = run[: len(run) - len(run.lstrip())]
        after = run[len(before) + len(words) :]
        marked = safe_text(f"{opening}{words}{closing}", style)
        text.append_text(safe_text(before)).append_text(marked).append_text(safe_text(after))
    return text
