"""The report page of a run: one self-contained HTML file.

Metrics, tables and plots are HTML and SVG; the trajectories are JSON inside the page, which web/*.js displays. The
page's Content-Security-Policy allows that one script and nothing else, so even text that was not escaped correctly
could not run or load anything.
"""

from __future__ import annotations

import base64
import hashlib
import string
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from memsearcher_jax.logs.atomic_write import atomic_write
from memsearcher_jax.logs.run_facts import RESULTS_FILE
from memsearcher_jax.report.comparison import compare_evaluations, comparison_table, read_evaluation
from memsearcher_jax.report.evaluation import metrics_table, result_tables
from memsearcher_jax.report.page import charts, tables
from memsearcher_jax.report.page.records import TrajectoryRecords, data_elements
from memsearcher_jax.report.page.run_data import RunData, TrajectoryGroup, distinct_labels, groups_of, read_run
from memsearcher_jax.report.plots import panels_of

MAX_TRAJECTORIES = 5_000  # of a page, by default
SCRIPTS = ("diff.js", "detail.js", "page.js")  # concatenated in this order
BREAKDOWNS = ("hops", "turns")  # of the accuracy: fields of `TrajectorySummary`


def write_page(
    folder: Path,
    out: Path,
    *,
    compare: Path | None = None,
    max_trajectories: int = MAX_TRAJECTORIES,
    reload_seconds: int = 0,
) -> dict[str, int]:
    """Write the page of the run in `folder`; return how many trajectories were read and how many the page contains.

    `compare` is another run, shown in the same tables and plots. Differences are its values minus those of the run, as
    in `compare.py RUN OTHER`; for evaluations of the same questions they have paired intervals. `max_trajectories`
    limits the trajectories in the page and, for a training run, those that are read (see `read_run`). `reload_seconds`:
    after which the page of a running job reloads itself.

    Raises:
        FileNotFoundError, ValueError: a folder is missing, is not a run, or is damaged; nothing is written.
    """
    records = TrajectoryRecords()
    run = read_run(folder, max_trajectories=max_trajectories, on_trajectory=records.add)
    other = read_run(compare, max_trajectories=max_trajectories) if compare is not None else None
    if other:
        label, other_label = distinct_labels(run, other)
        run = replace(run, name=label)
        other = replace(other, name=other_label)
    own_groups = groups_of(run, run.name if other else "")
    # Of another training run, only its last steps are compared.
    other_groups = groups_of(other, other.name)[-1:] if other else []
    groups = own_groups + other_groups
    style = web_file("page.css")
    script = "\n".join(map(web_file, SCRIPTS))
    policy = "default-src 'none'; base-uri 'none'; form-action 'none'"
    for name, text in (("style-src", style), ("script-src", script)):
        policy += f"; {name} 'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
    paired = ""
    if other and compare is not None and run.results and other.results:
        paired = _paired_table(folder, compare, run.name, other.name)
    shown_tables = [*_tables(run, other, groups), paired, tables.memory_table(records.qualities)]
    page = string.Template(web_file("page.html")).substitute(
        reload=f'<meta http-equiv="refresh" content="{reload_seconds}">' if reload_seconds else "",
        policy=policy,
        style=style,
        script=script,
        title=tables.escape_html(f"{run.name}: {run.kind}"),
        heading=tables.escape_html(run.name),
        about=tables.escape_html(_about(run, other)),
        tiles=tables.tiles(own_groups[-1], other_groups[0] if other_groups else None) if own_groups else "",
        plots="\n".join(_plots(run, other, groups)),
        tables="\n".join(table for table in shown_tables if table),
        settings=tables.settings_table(run.settings, other.settings if other else None),
        data=data_elements(records),
    )
    atomic_write(out, page.encode("utf-8"))
    return {"read": len(run.summaries), "shown": len(records.index)}


def _about(run: RunData, other: RunData | None) -> str:
    parts = [run.kind.capitalize()]
    if checkpoint := run.results.get("checkpoint"):
        step = run.results.get("step")
        parts.append(f"of {Path(str(checkpoint)).name}" + (f", step {step}" if step is not None else ""))
    if run.steps:
        parts.append(f"with {len(run.steps):,} steps")
    if other:
        parts.append(f"compared with {other.name}")
    return " ".join(parts) + f". {len(run.summaries):,} trajectories. {run.note}".rstrip()


def _tables(run: RunData, other: RunData | None, groups: Sequence[TrajectoryGroup]) -> list[str]:
    metrics = {run.name: run.results.get("metrics", {})}
    if other:
        metrics[other.name] = other.results.get("metrics", {})
    try:
        found = result_tables(run.results) if "evaluation" in run.results else []
        if metrics[run.name]:
            found.append(metrics_table(metrics if other else {"value": metrics[run.name]}))
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{RESULTS_FILE} of {' or '.join(metrics)} is damaged or of another version ({reason})"
        ) from error
    parts = list(map(tables.result_table, found))
    if groups:
        parts.append(tables.stops_table(groups))
        parts += [tables.accuracy_table(groups, name) for name in BREAKDOWNS]
        parts.append(tables.datasets_table(groups) if other or "evaluation" not in run.results else "")
    if run.steps:
        parts.append(tables.steps_tables(run.steps))
    return parts


def _paired_table(folder: Path, other: Path, name: str, other_name: str) -> str:
    """The paired comparison of two finished evaluations, or a note why there is none."""
    try:
        comparison = compare_evaluations(read_evaluation(folder), read_evaluation(other))
    except (OSError, ValueError) as error:
        return f'<p class="note">No paired comparison: {tables.escape_html(error)}.</p>'
    return tables.result_table(comparison_table(comparison["metrics"], name, other_name))


def _plots(run: RunData, other: RunData | None, groups: Sequence[TrajectoryGroup]) -> list[str]:
    own = (run.name, run.steps)
    runs = [own, (other.name, other.steps)] if other else [own]
    parts = []
    for panel in panels_of(run.steps):
        # A family of metrics, "NAME/...", has a line for each of them, too many to compare.
        is_family = "/" in panel.metrics[0]
        parts.append(charts.curve(panel, [own] if is_family else runs))
    if groups:
        parts.append(charts.turn_tokens(groups))
    return parts


def web_file(name: str) -> str:
    """The text of a file in report/page/web."""
    return (files("memsearcher_jax.report.page") / "web" / name).read_text(encoding="utf-8")
