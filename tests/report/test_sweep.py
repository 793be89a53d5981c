"""A sweep as a table and as a page: results by value, plots, untrusted names."""

import io
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from rich.console import Console

from memsearcher_jax.report.evaluation import SCORES, summarize_evaluation
from memsearcher_jax.report.sweep import SweepPoint, show_sweep, write_sweep_page
from memsearcher_jax.types import StopReason, TrajectorySummary

EVIL = '</style><script>alert(1)</script><img src=x onerror="alert(2)">&amp;'


def point(value, share, tokens, datasets=("nq",)):
    summaries = [
        TrajectorySummary(
            name,
            None,
            2,
            1,
            StopReason.ANSWERED,
            1.0,
            dict.fromkeys(SCORES, float(number < 10 * share)),
            (tokens, tokens),
        )
        for name in datasets
        for number in range(10)
    ]
    return point_of(value, summaries)


def point_of(value, summaries):
    evaluation = summarize_evaluation(summaries, in_distribution=()).to_json()
    return SweepPoint.from_evaluation(value, {"questions": len(summaries), "evaluation": evaluation})


POINTS = [point("2048", 0.6, 1500), point("512", 0.2, 700), point("1024", 0.4, 1000)]


@pytest.fixture
def page(tmp_path):
    def write(setting="agent.memory_tokens", points=POINTS, about="Of a run."):
        write_sweep_page(tmp_path / "sweep.html", setting, points, about)
        return (tmp_path / "sweep.html").read_text(encoding="utf-8")

    return write


def test_a_point_has_the_macro_average_of_its_benchmarks():
    summaries = [
        *[TrajectorySummary("nq", None, 1, 0, StopReason.ANSWERED, 1.0, dict.fromkeys(SCORES, 1.0), (100,))] * 30,
        TrajectorySummary("popqa", None, 3, 2, StopReason.ANSWERED, 0.0, dict.fromkeys(SCORES, 0.0), (300, 300, 300)),
    ]
    one = point_of("x", summaries)
    assert (one.questions, one.scores["f1"].mean) == (31, 0.5)
    assert one.effort == {"turns": 2, "searches": 1, "tokens_per_turn": 200, "mean_peak_context_tokens": 200}
    row = one.to_json()
    assert row["value"] == "x"
    assert row["scores"]["f1"]["mean"] == 0.5
    assert row["tokens_per_turn"] == 200


def test_the_table_has_a_row_for_each_value_in_the_order_given():
    stream = io.StringIO()
    show_sweep("agent.memory_tokens", POINTS, Console(file=stream, width=80))
    lines = stream.getvalue().splitlines()
    assert all(len(line) <= 80 and "…" not in line for line in lines)
    rows = [line.split() for line in lines if re.match(r"\d", line)]
    assert rows == [
        ["2048", "10", "60.0", "60.0", "60.0", "2.00", "1.00", "1,500", "1,500"],
        ["512", "10", "20.0", "20.0", "20.0", "2.00", "1.00", "700", "700"],
        ["1024", "10", "40.0", "40.0", "40.0", "2.00", "1.00", "1,000", "1,000"],
    ]


def test_the_plots_show_each_value_at_its_tokens_with_its_interval(page):
    text = page()
    plots = re.findall(r"<figure>.*?</figure>", text, re.DOTALL)
    assert [re.search(r"<b>(.*?)</b>", plot)[1] for plot in plots] == [
        f"{name} against tokens" for name in ("EM", "F1", "cover-EM")
    ]
    dots = re.findall(r'<circle class="dot c0" cx="([\d.]+)" cy="([\d.]+)" r="3"><title>(.*?)</title>', plots[0])
    assert [hint for *_, hint in dots] == ["EM: 0.2 at 700", "EM: 0.4 at 1,000", "EM: 0.6 at 1,500"]
    across, up = zip(*((float(x), float(y)) for x, y, _ in dots), strict=True)
    assert list(across) == sorted(across)
    assert list(up) == sorted(up, reverse=True)  # y grows downwards
    names = re.findall(r'<text class="value" x="([\d.]+)" y="[\d.]+" text-anchor="(.*?)">(.*?)</text>', plots[0])
    assert [name for *_, name in names] == ["512", "1024", "2048"]
    assert [anchor for _, anchor, _ in names] == ["start", "start", "end"]
    assert all(0 < abs(x - float(left)) < 10 for x, (left, *_) in zip(across, names, strict=True))
    whiskers = re.findall(r'<line class="whisker" x1="([\d.]+)" x2="\1" y1="([\d.]+)" y2="([\d.]+)"', plots[0])
    assert [float(x) for x, *_ in whiskers] == list(across)
    assert all(float(low) > y > float(high) for y, (_, low, high) in zip(up, whiskers, strict=True))
    assert "<path" not in plots[0]


def test_the_page_has_the_intervals(page):
    row = next(row for row in re.findall(r"<tr>.*?</tr>", page(), re.DOTALL) if ">512<" in row)
    cells = re.findall(r"<td>(.*?)</td>", row)
    low, high = (100 * getattr(POINTS[1].scores["exact_match"], end) for end in ("low", "high"))
    assert cells[0] == "10"
    assert cells[1] == f"20.0 <small>{low:.1f} to {high:.1f}</small>"
    assert len(cells) == 1 + len(SCORES) + 4


def test_untrusted_names_are_escaped_and_nothing_is_loaded(page):
    text = page(EVIL, [point(EVIL, 0.5, 100), point("b", 0.5, 100)], EVIL)

    class Tags(HTMLParser):
        def __init__(self):
            super().__init__()
            self.seen, self.given = set(), set()

        def handle_starttag(self, tag, attributes):
            self.seen.add(tag)
            self.given |= {name for name, _ in attributes}

    tags = Tags()
    tags.feed(text)
    assert not tags.seen & {"script", "img", "link", "iframe", "object"}
    assert not tags.given & {"src", "href", "style", "onerror", "onload"}
    assert "default-src 'none'" in text and "script-src 'none'" in text
    assert not re.search(r"@import|url\(|https?:", text)
    assert text.count("&lt;script&gt;") >= 3


def test_overlapping_labels_are_stacked(page):
    text = page(points=[point("a", 0.5, 100), point("b", 0.5, 101), point("c", 0.5, 102), point("d", 0.5, 400)])
    heights = [float(y) for y in re.findall(r'<text class="value" x="[\d.]+" y="([\d.]+)"', text)[:4]]
    assert heights == pytest.approx([heights[0], heights[0] - 12, heights[0] - 24, heights[0]])


def test_single_values_and_equal_tokens_can_be_plotted(page):
    assert "EM: 0.5 at 100" in page(points=[point("a", 0.5, 100)])
    assert page(points=[point("a", 0.5, 100), point("b", 0.7, 100)]).count('class="dot c0"') == 2


def stream(source, accuracy, memory=100):
    counts = {"questions": 4, "chunks": 10, "stream_tokens": 1_000, "memory_tokens": memory, "calls": 4, "calls_ok": 2}
    scores = {} if accuracy is None else {"accuracy": accuracy}
    return TrajectorySummary(source, None, 10, 0, StopReason.STREAM_READ, 0.0, scores, (), counts=counts)


def test_streams_have_the_macro_average_of_their_sources(tmp_path):
    summaries = [stream("a", 1.0), stream("a", 0.0), stream("a, b", 0.0, memory=300), stream("a", None)]
    one = SweepPoint.from_streams("0.1", summaries, seed=0)
    accuracy = one.scores["accuracy"]
    assert (one.questions, accuracy.mean, accuracy.low, accuracy.high) == (16, 0.25, 0.0, 0.5)
    assert one.effort == {"stream_tokens": 1_000, "memory_tokens": 200, "compression": 0.8, "ok": 0.5}
    console = Console(file=io.StringIO(), width=100)
    show_sweep("memalpha.reward.compression_weight", [one], console)
    assert "25.0" in console.file.getvalue()
    write_sweep_page(tmp_path / "s.html", "x", [one], "About.")
    assert "tokens of the memory</text>" in (tmp_path / "s.html").read_text()


def test_a_value_without_a_score_has_no_dot_and_no_number(page):
    scored, unscored = (SweepPoint.from_streams(str(one), [stream("a", one)], seed=0) for one in (0.5, None))
    text = page(points=[scored, unscored])
    assert text.count("<circle") == text.count('class="whisker"') == 1
    assert "? <small>? to ?</small>" in text and "nan" not in text
    console = Console(file=io.StringIO(), width=100)
    show_sweep("x", [scored, unscored], console)
    assert "nan" not in console.file.getvalue()


def test_trained_values_have_their_learning_curves(page):
    trained = [replace(one, curve=(0.1, 0.2, 0.3)) for one in POINTS]
    assert "Learning curves" in page(points=trained)
    assert "Learning curves" not in page()
    assert set(re.findall(r'class="stroke (c\d+)"', page(points=trained * 3))) == {f"c{n}" for n in range(6)}
