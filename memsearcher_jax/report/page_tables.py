"""Tables of the report page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from memsearcher_jax.agent.types import Stop
from memsearcher_jax.report.console import WHY
from memsearcher_jax.report.files import NON_FINITE
from memsearcher_jax.report.memory_quality import TrajectoryQuality, summarise
from memsearcher_jax.report.metrics import Metrics
from memsearcher_jax.report.page_facts import Facts, Group, Run, mean, wilson_interval
from memsearcher_jax.report.page_svg import markup, share_bar

LAST_STEPS = 10  # of training, whose mean a table shows beside the last one
SCORES = {"exact_match": "exact match", "f1": "F1", "cover_exact_match": "cover exact match"}


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], *, note: str = "") -> str:
    """A table whose first column names the row and whose other cells are numbers; cells are HTML already."""
    columns = "".join(f'<th scope="col">{markup(name)}</th>' for name in head)
    body = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in others)}</tr>'
        for first, *others in rows
    )
    said = f'<p class="note">{markup(note)}</p>' if note else ""
    # A wide table scrolls in its own frame, which a keyboard must reach to scroll.
    return (
        f'<div class="table" tabindex="0" role="region" aria-label="{markup(caption)}"><table>'
        f"<caption>{markup(caption)}</caption><thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table>{said}</div>"
    )


def number(value: float) -> str:
    """Four digits that matter, whole above ten thousand; a dash where there is no number."""
    if math.isnan(value):
        return "–"
    return f"{value:,.4g}" if abs(value) < 1e4 or math.isinf(value) else f"{value:,.0f}"


def summary(facts: Sequence[Facts]) -> dict[str, float]:
    """Means over trajectories, tokens per turn over turns; a score that nobody measured is left out."""
    lengths = [tokens for one in facts for tokens in one.tokens_of_turns]
    scores = {
        label: mean([one.scores[name] for one in facts if name in one.scores])
        for name, label in SCORES.items()
        if any(name in one.scores for one in facts)
    }
    return scores | {
        "reward": mean([one.reward for one in facts]),
        "answered": mean([one.stop is Stop.ANSWERED for one in facts]),
        "turns": mean([one.turns for one in facts]),
        "searches": mean([one.searches for one in facts]),
        "tokens per turn": mean(lengths),
        "peak context": float(max(lengths, default=0)),
    }


def results_table(run: Run, other: Run | None) -> str:
    """Every number of results.json; beside another evaluation, its numbers and the differences."""
    ours, theirs = flat(run.results.get("metrics", {})), flat(other.results.get("metrics", {})) if other else {}
    names = [name for name in ours if not name.startswith("stop/")]
    if not theirs:
        return table("Metrics", ("metric", "value"), [(_name(name), number(ours[name])) for name in names])
    names += [name for name in theirs if name not in ours and not name.startswith("stop/")]
    rows = []
    for name in names:
        first, second = ours.get(name, math.nan), theirs.get(name, math.nan)
        rows.append((_name(name), number(first), number(second), _signed(first - second)))
    return table("Metrics", ("metric", run.name, other.name, "difference"), rows)


def steps_table(steps: Sequence[Metrics]) -> str:
    """Every metric of a training run: first and last value, the mean of the last steps, the range."""
    rows = []
    for name in dict.fromkeys(name for metrics in steps for name in metrics if name != "step"):
        values = [metrics[name] for metrics in steps if name in metrics]
        finite = [value for value in values if math.isfinite(value)]
        last = [value for value in values[-LAST_STEPS:] if math.isfinite(value)]
        cells = [_exact(values[0]), _exact(values[-1]), number(mean(last))]
        rows.append((_name(name), *cells, *(number(end(finite)) if finite else "–" for end in (min, max))))
    head = ("metric", "first", "last", f"mean of last {LAST_STEPS}", "lowest", "highest")
    return table(f"Metrics of {len(steps):,} steps", head, rows)


def stops_table(groups: Sequence[Group]) -> str:
    """Why trajectories ended, the most frequent reason first; reasons that never occurred are left out."""
    counts = [Counter(one.stop for one in group.facts) for group in groups]
    total = sum(counts, Counter())
    rows = []
    for stop, _ in total.most_common():
        cells = [f'<code>{markup(stop.value)}</code><br><span class="why">{markup(WHY[stop])}</span>']
        for color, (group, count) in enumerate(zip(groups, counts, strict=True)):
            share = count[stop] / max(len(group.facts), 1)
            cells.append(f"{share_bar(share, color)}{100 * share:.1f} % <small>{count[stop]:,}</small>")
        rows.append(cells)
    return table("Why trajectories ended", ("reason", *(group.label for group in groups)), rows)


def accuracy_table(caption: str, head: str, groups: Sequence[Group], key: Callable[[Facts], int | None]) -> str:
    """Exact match with its 95 % interval, and how many, for each value of `key`; "" if no trajectory has one."""
    keys = keys_of(groups, key)
    if not keys:
        return ""
    rows = []
    for value in keys:
        cells = [str(value)]
        for group in groups:
            right, total = right_of(group.facts, key, value)
            low, high = wilson_interval(right, total)
            interval = f"{right / total:.3f} <small>{low:.2f} to {high:.2f}, n {total:,}</small>" if total else "–"
            cells.append(interval)
        rows.append(cells)
    return table(caption, (head, *(group.label for group in groups)), rows, note="Exact match, 95 % Wilson intervals.")


def datasets_table(groups: Sequence[Group]) -> str:
    """The means of each dataset; "" if there is one dataset alone."""
    names = sorted({one.dataset for group in groups for one in group.facts})
    if len(names) < 2:
        return ""
    rows, head = [], []
    for group in groups:
        for name in names:
            if chosen := [one for one in group.facts if one.dataset == name]:
                numbers = summary(chosen)
                head = ["dataset", "questions", *numbers] if len(numbers) + 2 > len(head) else head
                title = markup(name or "no name") + (f" <small>{markup(group.label)}</small>" if groups[1:] else "")
                rows.append([title, f"{len(chosen):,}", *map(number, numbers.values())])
    return table("By dataset", head, rows)


def memory_table(qualities: Sequence[TrajectoryQuality]) -> str:
    """The numbers of docs/memory_quality.md over the page's trajectories; "" if none of them wrote a memory."""
    if not any(turn.wrote_memory for quality in qualities for turn in quality.turns):
        return ""
    quality = summarise(qualities)
    rows = []
    for name, value in quality.over_turns.items():
        cells = [
            f"{number(one.value)} <small>n {one.count:,}</small>"
            for one in (value, quality.at_the_end.get(name))
            if one
        ]
        rows.append([_name(name), *cells, *["–"] * (2 - len(cells))])
    note = f"Means over the turns, and over the last memories, of {len(qualities):,} trajectories that have the number."
    return table("Memory quality", ("metric", "turns", "at the end"), rows, note=note)


def settings_table(settings: dict[str, Any], other: dict[str, Any] | None) -> str:
    """Every setting of run.json; with another run's, those that differ come first and are marked."""
    ours, theirs = dict(_leaves(settings)), dict(_leaves(other or {}))
    names = list(dict.fromkeys([*ours, *theirs]))
    if not other:
        return table("Settings", ("setting", "value"), [(markup(name), _value(ours, name)) for name in names])
    changed = [name for name in names if ours.get(name) != theirs.get(name)]
    rows = [(f"<mark>{markup(name)}</mark>", _value(ours, name), _value(theirs, name)) for name in changed]
    rows += [(markup(name), _value(ours, name), _value(theirs, name)) for name in names if name not in changed]
    return table("Settings, those that differ first", ("setting", "this run", "the other"), rows)


def keys_of(groups: Sequence[Group], key: Callable[[Facts], int | None]) -> list[int]:
    """The values of `key` among scored trajectories, ascending."""
    facts = (one for group in groups for one in group.facts if one.right is not None)
    return sorted({value for one in facts if (value := key(one)) is not None})


def right_of(facts: Sequence[Facts], key: Callable[[Facts], int | None], value: int) -> tuple[int, int]:
    """How many of the scored trajectories with this value of `key` are right, and how many there are."""
    chosen = [one.right for one in facts if one.right is not None and key(one) == value]
    return sum(chosen), len(chosen)


def flat(value: Any, name: str = "") -> dict[str, float]:
    """The numbers of nested objects and lists, under names joined by slashes; what is no number is left out."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {inner: one for key, part in items for inner, one in flat(part, f"{name}/{key}".strip("/")).items()}
    if value in NON_FINITE:
        return {name: float(value)}
    return {name: float(value)} if isinstance(value, int | float) and not isinstance(value, bool) else {}


def _leaves(value: Any, name: str = "") -> Iterable[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, part in value.items():
            yield from _leaves(part, f"{name}.{key}".strip("."))
    else:
        yield name, value


def _value(settings: dict[str, Any], name: str) -> str:
    return markup(settings[name]) if name in settings else "–"


def _exact(value: float) -> str:
    """A step that was not a number is said, unlike one that was not measured."""
    return number(value) if math.isfinite(value) else f'<em class="alarm">{markup(value)}</em>'


def _signed(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:+,.4g}"


def _name(name: str) -> str:
    return markup(name.replace("_", " "))
