"""What tables, plots and pages call metrics, and how they write a value."""

from __future__ import annotations

import math

from memsearcher_jax.types import FAILURES

NAME_LISTS = {"golden": "golden answers", "supporting": "supporting titles"}
NAME_METRICS = {
    "shown": "in the observation",
    "any_shown": "any in the observation",
    "held": "in the new memory",
    "any_held": "any in the new memory",
    "kept": "kept, of those observed",
    "lost": "lost, of those in the last memory",
}
MEMORY_METRICS = {
    "words": "length in words",
    "cut": "cut to the budget",
    "copied": "copied from the observation",
    "changed": "words changed, of both",
}
LABELS = {
    "exact_match": "EM",
    "f1": "F1",
    "cover_exact_match": "cover-EM",
    "macro": "average",
    "mean_peak_context_tokens": "mean peak context",
    "peak_context_tokens": "largest context",
    "calls_ok_share": "successful calls",
    "calls_skipped_share": "skipped calls",
    "calls_failed_share": "failed calls",
    "agreement_with_exact_match": "agrees with EM",
    **{f"memory_tokens/{part}": f"{part} memory tokens" for part in ("core", "semantic", "episodic")},
    **{f"wrong/{name}": f"wrong: {reason}" for name, reason in FAILURES.items()},
    **{
        f"{family}/{name}": f"{of}: {where}"
        for family, of in NAME_LISTS.items()
        for name, where in NAME_METRICS.items()
    },
    **{f"memory/{name}": f"memory: {what}" for name, what in MEMORY_METRICS.items()},
}
"""Of names that do not explain themselves."""

FRACTIONS = {
    *("exact_match", "f1", "cover_exact_match", "precision", "recall", "accuracy", "evidence_recall", "answered"),
    *("unscored", "stop", "wrong", "compression"),
    *("calls_ok_share", "calls_skipped_share", "calls_failed_share"),
    *("idle_slot_share", "prefix_hit_rate", *NAME_LISTS, "cut", "copied", "changed"),
}
"""Metrics, and families of metrics, that are shown in percent."""


def label(name: str) -> str:
    return LABELS.get(name, name.replace("_", " ").replace("/1 hops", "/1 hop"))


def percent(fraction: float) -> str:
    return "?" if math.isnan(fraction) else f"{100 * fraction:.1f}"


def format_metric(name: str, value: float, digits: int = 4) -> str:
    """A fraction in percent; of another metric these significant digits, and all before the point; NaN as a dash."""
    if math.isnan(value):
        return "–"
    if FRACTIONS & set(name.split("/")):
        return f"{percent(value)} %"
    return f"{value:,.{digits}g}" if abs(value) < 10**digits - 0.5 else f"{value:,.0f}"  # 999.9: 1,000, not 1e+03
