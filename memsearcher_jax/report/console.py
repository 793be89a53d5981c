"""A trajectory on the terminal, turn by turn.

Everything a model or a web page wrote is shown as text: console markup in it is not interpreted, and control
characters, which could move the cursor, recolour or retitle the terminal, are spelt out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memsearcher_jax.agent.types import Context, Found, Outcome, Problem, Query, Stop, Trajectory, Turn
from memsearcher_jax.report.diff import word_diff

PASSAGE_CHARACTERS = 240

WHY = {
    Stop.ANSWERED: "its last reply gave an answer",
    Stop.REMEMBERED: "the whole stream was read",
    Stop.NO_ANSWER: "its last reply held neither an answer outside <think> nor a tool call",
    Stop.MAX_TURNS: "it used all its turns without an answer",
    Stop.CUT_OFF: "a generation reached its token limit",
    Stop.FORGED_TURN: "a generation opened a chat turn of its own",
    Stop.BAD_MEMORY: "the rewrite held no memory",
    Stop.CONTEXT_FULL: "the next text did not fit the context",
    Stop.SEARCH_FAILED: "a search failed",
    Stop.FAULT: "the workflow raised an error",
    Stop.NOT_FINITE: "the policy's logits were not finite",
}

# C0 and C1 control characters but tab and newline; the marks that turn the direction of text, with which a page could
# show one word and hold another; halves of surrogate pairs, which no terminal encoding can write.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(text: str, style: str = "") -> Text:
    """`text` as it is, with unsafe characters spelt as Python escapes (`\\x1b`). Rich markup in it stays text."""
    return Text(_UNSAFE.sub(lambda match: ascii(match[0])[1:-1], text), style=style)


def shorten(text: str, limit: int) -> str:
    """`text` on one line, cut at `limit` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[:limit].rstrip() + " …"


def show_trajectory(trajectory: Trajectory, console: Console, *, reward: float | None = None, reason: str = "") -> None:
    """Prints the question, every turn, and how the trajectory ended."""
    show_question(trajectory.problem, console)
    for number, turn in enumerate(trajectory.outcome.turns, 1):
        show_turn(number, turn, console)
    show_end(trajectory.outcome, trajectory.problem, console, reward=reward, reason=reason)
    if trajectory.contexts:
        console.print(_token_table(trajectory.contexts))


def show_question(problem: Problem, console: Console) -> None:
    console.print(Text("question  ", style="bold").append_text(plain(problem.question)))


def show_turn(number: int, turn: Turn, console: Console) -> None:
    """One round: the memory it started from, the reply, what was searched and found, the rewritten memory."""
    show_turn_start(number, turn.memory, console, has_memory=bool(turn.memory or turn.rewrite))
    show_reply(turn.reply, console)
    if len(turn.queries) == len(turn.found):
        for query, found in zip(turn.queries, turn.found, strict=True):
            show_search(query, found, console)
    else:  # the search itself failed: there are queries without results
        for query in turn.queries:
            show_search(query, Found(error="no result"), console)
    if turn.rewrite:
        show_rewrite(turn.memory, turn.new_memory, turn.rewrite, console)


def show_turn_start(number: int, memory: str, console: Console, *, has_memory: bool) -> None:
    """A rule with the turn's number, and the memory that the turn starts from if the agent keeps one."""
    console.rule(Text(f"turn {number}"), align="left", style="cyan")
    if has_memory:
        _section(console, "memory", plain(memory) if memory else Text("empty", style="dim"))


def show_rewrite(old: str, new: str, reply: str, console: Console) -> None:
    """What the rewrite changed, or the whole reply where it holds no memory."""
    if new:
        _section(console, "memory rewritten", _changes(old, new))
    else:
        _section(console, "memory reply without a memory", plain(reply))


def show_end(outcome: Outcome, problem: Problem, console: Console, *, reward: float | None, reason: str) -> None:
    """The answer beside the golden ones, the reward, and why the trajectory ended."""
    console.rule(Text("end"), align="left", style="cyan")
    table = Table.grid(padding=(0, 2))
    table.add_row("answer", plain(outcome.answer, "bold") if outcome.stop is Stop.ANSWERED else Text("none"))
    if problem.golden_answers:
        table.add_row("golden", plain(" | ".join(problem.golden_answers)))
    table.add_row("stopped", Text(f"{outcome.stop.value}: {WHY[outcome.stop]}"))
    if outcome.error:
        table.add_row("error", plain(outcome.error, "red"))
    if reward is not None:
        table.add_row("reward", plain(f"{reward:.3f}  {reason}".rstrip()))
    for name, count in outcome.counts.items():
        if count:
            table.add_row(plain(name.replace("_", " ")), str(count))
    console.print(table)


def show_summary(metrics: Mapping[str, float], console: Console) -> None:
    """The numbers of an evaluation in their order; a member of a family (`stop/...`) that is 0 is left out."""
    table = Table("metric", "value", box=None, header_style="dim", pad_edge=False)
    table.columns[1].justify = "right"
    for name, value in metrics.items():
        if value or "/" not in name:
            table.add_row(plain(name.replace("_", " ")), f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}")
    console.print(table)


def show_reply(reply: str, console: Console) -> None:
    """The prompt opens <think>, so a reply starts inside it; a reply that never closes it has no second part."""
    think, closed, action = reply.partition("</think>")
    if not closed:
        _section(console, "reply", plain(reply.strip()))
        return
    _section(console, "think", plain(think.strip(), "italic"))
    if action.strip():
        _section(console, "act", plain(action.strip()))


def show_search(query: Query, found: Found, console: Console) -> None:
    """The query and its passages, shortened, or why there are none."""
    _section(console, "search", plain(query.text, "bold").append(f"  (top {query.top_n})", style="dim"))
    if found.error:
        console.print(Padding(plain(found.error, "red"), (0, 0, 0, 4), expand=False))
    for rank, passage in enumerate(found.passages, 1):
        _, _, body = passage.contents.partition("\n")
        line = Text(f"{rank}. ").append_text(plain(shorten(passage.title, PASSAGE_CHARACTERS), "bold"))
        line.append("  ").append_text(plain(shorten(body, PASSAGE_CHARACTERS), "dim"))
        console.print(Padding(line, (0, 0, 0, 4), expand=False))


def _section(console: Console, title: str, body: RenderableType) -> None:
    console.print(Text(title, style="bold magenta"))
    console.print(Padding(body, (0, 0, 0, 2), expand=False))


def _changes(old: str, new: str) -> Text:
    """`new` with its changes marked {+so+} and [-so-], in colour where there is colour; a first memory is all new."""
    if not old.strip():
        return plain(new)
    text = Text()
    for change, run in word_diff(old, new):
        if change == "same":
            text.append_text(plain(run))
            continue
        words = run.strip()
        before, _, after = run.partition(words)
        opening, closing, style = ("{+", "+}", "green") if change == "added" else ("[-", "-]", "red")
        text.append(before).append_text(plain(f"{opening}{words}{closing}", style)).append(after)
    return text


def _token_table(contexts: Sequence[Context]) -> Table:
    table = Table("context", "tokens", "by the policy", box=None, header_style="dim", pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for number, context in enumerate(contexts, 1):
        table.add_row(str(number), f"{len(context.ids):,}", f"{sum(context.sampled):,}")
    return table
