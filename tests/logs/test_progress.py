"""The progress display: plain lines for a file, one live display for a terminal."""

import contextlib
import io

from memsearcher_jax.logs.metric_names import MetricName
from memsearcher_jax.logs.progress import Progress, format_metrics

METRICS = {
    "time/rollout": 12.34,
    MetricName.TOKENS_PER_SECOND: 1234.5,
    MetricName.REWARD: 0.1234,
    "accuracy/lifetime/other": 1.0,
    MetricName.EXACT_MATCH: 0.05,
    MetricName.TURNS: 2.44,
    "time/update": 3.0,
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_metrics_are_formatted_in_a_fixed_order():
    assert format_metrics(METRICS) == "reward 0.123  EM 0.050  turns 2.4  1,234 tok/s  rollout 12.3s  update 3.0s"
    assert format_metrics({MetricName.REWARD: float("nan"), "accuracy": 0.5}) == "reward nan  accuracy 0.500"
    assert format_metrics({}) == ""


def test_devices_that_wait_for_the_host_are_shown_from_a_tenth_of_the_rollout_on():
    assert format_metrics({"time/rollout": 10.0, "host_wait": 1.01}) == "rollout 10.0s  host_wait 1.0s"
    assert format_metrics({"time/rollout": 10.0, "host_wait": 0.99}) == "rollout 10.0s"
    assert format_metrics({"time/update": 2.0, "host_peak_gb": 1.234}) == "update 2.0s  host 1.23 GB"


def test_a_file_gets_one_plain_line_per_step():
    stream, clock = io.StringIO(), Clock()
    with Progress("train", 10, done=7, stream=stream, clock=clock) as progress:
        progress.activity("rollout 1/8")
        clock.now = 60.0
        progress.advance({MetricName.REWARD: 0.5})
        clock.now = 150.0
        progress.advance({})
        progress.note("alarm at step 0: kl is 1")
    lines = ["train 8/10  reward 0.500  left 0:02:00", "train 9/10  left 0:01:15", "train: alarm at step 0: kl is 1"]
    assert stream.getvalue().splitlines() == lines


def test_a_file_gets_an_activity_line_after_a_quiet_period():
    stream, clock = io.StringIO(), Clock()
    with Progress("evaluate", 1, quiet_s=30.0, stream=stream, clock=clock) as progress:
        for done in range(100):
            clock.now += 1.0
            progress.activity(f"{done}/100")
    assert stream.getvalue() == "evaluate 0/1  29/100\nevaluate 0/1  59/100\nevaluate 0/1  89/100\n"


def test_a_terminal_gets_the_live_display_and_is_restored_after_an_error(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    with contextlib.suppress(RuntimeError), Progress("train", 4, done=1, stream=stream) as progress:
        progress.activity("rollout 3/8")
        progress.advance(METRICS)
        progress.activity("update 1/2")
        raise RuntimeError
    output = stream.getvalue()
    last = output[output.rindex("train") :]
    assert "2/4" in last and "reward 0.123" in last and "update 1/2" in last and "rollout 3/8" not in last
    assert output.rstrip("\n").endswith("\x1b[?25h"), "the cursor is visible again"


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    with Progress("train", 4, stream=stream) as progress:
        progress.advance(METRICS)
    assert stream.getvalue().startswith("train 1/4  reward 0.123") and "\x1b" not in stream.getvalue()
